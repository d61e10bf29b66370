"""The engine core in simulated time: an executor that takes `step_s` for every step and samples made-up tokens.

Deterministic and fast: nothing is checked about KV memory here (the property machine does that), only who runs when.
A step of the simulation lets the callers submit, fills the plans in flight up to `depth`, applies the oldest result and
moves the clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenloom.scheduler.core.plan import ModelOutput, RequestOutput, RowOutput, SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request, RequestRefused
from tokenloom.scheduler.core.scheduler import Scheduler, SchedulerConfig

_TOKEN = 7


@dataclass
class Life:
    """What became of one request; steps are numbers of the simulation's steps."""

    request: Request
    submitted_step: int
    first_row_step: int | None = None
    first_token_step: int | None = None
    end_step: int | None = None
    reason: FinishReason | None = None
    error: RequestRefused | None = None
    tokens: int = 0

    @property
    def steps_to_first_token(self) -> int:
        """Steps from the submission to the step that told the first token, that one included."""
        assert self.first_token_step is not None, f"{self.request.request_id} has no token yet"
        return self.first_token_step - self.submitted_step + 1

    @property
    def steps_to_end(self) -> int:
        """Steps from the submission to the end."""
        assert self.end_step is not None, f"{self.request.request_id} has not ended"
        return self.end_step - self.submitted_step + 1


@dataclass
class Simulation:
    """A core, a clock and callers.

    Args:
        config: the core's limits.
        num_blocks: of the executor.
        depth: plans in flight.
        step_s: what a step takes.
    """

    config: SchedulerConfig
    num_blocks: int = 100_000
    depth: int = 2
    step_s: float = 0.05
    now_s: float = 0.0
    num_steps: int = 0
    num_rows: int = 0
    num_row_tokens: int = 0
    most_running: Counter[str] = field(default_factory=Counter)
    lives: dict[str, Life] = field(default_factory=dict)
    plans: list[SchedulerOutput] = field(default_factory=list)
    callers: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.core = Scheduler(self.config, self.num_blocks)

    def submit(
        self,
        name: str,
        num_prompt_tokens: int = 8,
        num_output_tokens: int = 8,
        *,
        tenant: str = "",
        priority_class: int = 0,
        deadline_s: float | None = None,
        prompt: list[int] | None = None,
        resumed: int = 0,
        age_s: float | None = None,
    ) -> Life:
        """A request arrives, with a prompt that no other has unless one is given.

        Args:
            deadline_s: remaining time.
            age_s: it was submitted so long ago and is submitted again.

        Raises: RequestRefused.
        """
        unique = [len(self.lives) * 1_000_000 + i for i in range(num_prompt_tokens)]
        request = Request(
            name,
            [token % 2**32 for token in unique] if prompt is None else prompt,
            num_output_tokens,
            output_token_ids=[_TOKEN] * resumed,
            priority_class=priority_class,
            deadline_s=None if deadline_s is None else self.now_s + deadline_s,
            tenant=tenant,
            submitted_s=self.now_s - (age_s or 0.0),
        )
        assert name not in self.lives
        told = self.core.add_request(request, self.now_s, is_resubmission=age_s is not None)
        self.lives[name] = Life(request, self.num_steps)
        if told is not None:
            self._hear([told])
        return self.lives[name]

    def try_submit(self, name: str, num_prompt_tokens: int, num_output_tokens: int, tenant: str) -> str:
        """Like submit; returns the reason if it is refused, "" otherwise."""
        try:
            self.submit(name, num_prompt_tokens, num_output_tokens, tenant=tenant)
        except RequestRefused as refused:
            return refused.reason
        return ""

    def keep_waiting(
        self,
        tenant: str,
        num_waiting: int,
        num_prompt_tokens: int = 16,
        num_output_tokens: int = 16,
        *,
        priority_class: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        """From now on so many requests of the tenant wait at every step."""

        def caller() -> None:
            while self.num_waiting_of(tenant) < num_waiting:
                self.submit(
                    f"{tenant}-{len(self.lives)}",
                    num_prompt_tokens,
                    num_output_tokens,
                    tenant=tenant,
                    priority_class=priority_class,
                    deadline_s=deadline_s,
                )

        self.callers.append(caller)

    def num_waiting_of(self, tenant: str) -> int:
        """Requests of the tenant in the queue."""
        known = self.core.tenants.get(tenant)
        return 0 if known is None else known.num_waiting

    def served(self, tenant: str) -> int:
        """Tokens that the tenant was charged for."""
        known = self.core.tenants.get(tenant)
        return 0 if known is None else known.num_served_tokens

    def of(self, prefix: str) -> list[Life]:
        """Requests whose names begin so."""
        return [life for name, life in self.lives.items() if name.startswith(prefix)]

    def plan(self) -> SchedulerOutput | None:
        """Expire what is due and make a plan, unless enough are in flight."""
        if len(self.core.plans_in_flight) >= self.depth:
            return None
        self._hear(self.core.expire(self.now_s))
        plan = self.core.schedule(self.now_s)
        if plan is None:
            return None
        self.plans.append(plan)
        self.num_rows += len(plan.rows)
        self.num_row_tokens += plan.num_scheduled_tokens
        for row in plan.rows:
            life = self.lives[row.request.request_id]
            if life.first_row_step is None:
                life.first_row_step = self.num_steps
        running = Counter(request.tenant for request in self.core.running)
        assert len(self.core.running) <= self.config.max_num_seqs
        assert plan.num_scheduled_tokens <= self.config.max_num_batched_tokens
        self.most_running |= running
        return plan

    def step(self) -> None:
        """One step of the executor."""
        for caller in self.callers:
            caller()
        while self.plan() is not None:
            pass
        if self.core.plans_in_flight:
            plan = self.core.plans_in_flight[0]
            sampled = {row.row_id: RowOutput([_TOKEN]) for row in plan.rows if row.samples}
            self._hear(self.core.update(ModelOutput(plan.step_id, sampled)))
        self.num_steps += 1
        self.now_s += self.step_s

    def run(self, num_steps: int) -> None:
        """So many steps."""
        for _ in range(num_steps):
            self.step()

    def run_until(self, life: Life, max_steps: int = 5000) -> Life:
        """Step until a request has ended."""
        limit = self.num_steps + max_steps
        while life.end_step is None:
            assert self.num_steps < limit, f"{life.request.request_id} does not end"
            self.step()
        return life

    def run_until_idle(self, max_steps: int = 5000) -> None:
        """Nobody submits any more; step until no request is alive."""
        self.callers.clear()
        limit = self.num_steps + max_steps
        while self.core.num_requests:
            assert self.num_steps < limit, "requests do not end"
            self.step()

    def _hear(self, news: list[RequestOutput]) -> None:
        for told in news:
            life = self.lives[told.request.request_id]
            assert life.end_step is None, "news after the end"
            life.tokens += len(told.token_ids)
            if told.token_ids and life.first_token_step is None:
                life.first_token_step = self.num_steps
            if told.finish_reason is not None:
                life.end_step, life.reason, life.error = self.num_steps, told.finish_reason, told.error
