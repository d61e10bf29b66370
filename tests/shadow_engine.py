"""The engine core on a shadow executor: no model, but a KV memory that remembers what was written to each slot.

`ShadowExecutor` runs plans strictly in order. Like attention over a real batch, it writes the slots of all rows of a
plan first and then lets each row read its whole prefix, through its block table; it objects when a slot holds anything
but the row's own token behind its own prefix under its own salt. `ShadowEngine` puts the core in front of it and keeps
what each request's reader was told, counting that no token is repeated or left out.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenloom.scheduler.core.plan import ModelOutput, RequestOutput, RowOutput, ScheduledRow, SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, PromptLogprobs, Request
from tokenloom.scheduler.core.scheduler import Scheduler, SchedulerConfig

NextToken = Callable[[Sequence[int]], int]

WANTS_PROMPT_LOGPROBS = "prompt logprobs"
_UNWRITTEN = -1
_POISON = -2
_GARBAGE_TOKEN = 199


def count_on(token_ids: Sequence[int]) -> int:
    """The model of readable tests: 1 2 3 goes on with 4 5 6."""
    return token_ids[-1] + 1


def coin(token_ids: Sequence[int]) -> int:
    """The model of colliding prefixes: 0 or 1, from all tokens (each below 256)."""
    return zlib.crc32(bytes(token_ids)) >> 7 & 1


def generate_alone(
    prompt: Sequence[int],
    max_output_tokens: int,
    *,
    next_token: NextToken,
    stop_token_ids: frozenset[int] = frozenset(),
    min_output_tokens: int = 0,
    resumed: Sequence[int] = (),
) -> list[int]:
    """What a request must generate: one token after the other, nobody else there."""
    output = list(resumed)
    while len(output) < max_output_tokens:
        output.append(next_token([*prompt, *output]))
        if output[-1] in stop_token_ids and len(output) >= min_output_tokens:
            break
    return output


@dataclass
class _Row:
    """A row as an executor knows it: what its plans brought, nothing else."""

    request_id: str
    prefix_root: int
    num_prompt_tokens: int
    wants_prompt_logprobs: bool
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    has_failed: bool = False


@dataclass
class _SentPlan:
    """A plan as it is on the wire: copied when it was made."""

    step_id: int
    finished_row_ids: list[int]
    known_row_ids: set[int]
    rows: list[tuple[ScheduledRow, list[int]]]
    new_rows: dict[int, _Row]


@dataclass
class _Result:
    """A step's result while it is being made."""

    fails: bool
    sampled: dict[int, RowOutput] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    row_errors: dict[int, str] = field(default_factory=dict)


class ShadowExecutor:
    """Runs plans and checks what they read.

    Args:
        num_blocks: the null block included.
        block_size: tokens per block.
        next_token: the model.
    """

    def __init__(self, num_blocks: int, block_size: int, next_token: NextToken) -> None:
        self.block_size = block_size
        self.num_tokens_computed = 0
        self.failing_request_ids: set[str] = set()
        self.fails_next_step = False
        self.plans: deque[_SentPlan] = deque()
        self._next_token = next_token
        self._slots = [_UNWRITTEN] * (num_blocks * block_size)
        self._rows: dict[int, _Row] = {}
        self._prefix_ids: dict[tuple[int | str, int], int] = {}

    @property
    def num_rows(self) -> int:
        """Rows that the executor remembers."""
        return len(self._rows)

    def submit(self, plan: SchedulerOutput, known_row_ids: set[int]) -> None:
        """Take a plan; it runs later. Copies it, as sending would.

        Args:
            known_row_ids: the only rows that the executor shall know when the plan has run.
        """
        rows = [(row, list(row.new_block_ids)) for row in plan.rows]
        new_rows = {row.row_id: self._new_row(row.request) for row in plan.rows if row.is_new}
        self.plans.append(_SentPlan(plan.step_id, list(plan.finished_row_ids), known_row_ids, rows, new_rows))

    def execute(self) -> ModelOutput:
        """Run the oldest plan."""
        plan = self.plans.popleft()
        for row_id in plan.finished_row_ids:
            assert self._rows.pop(row_id, None), "a row that the executor does not know is to be forgotten"
        assert not plan.new_rows.keys() & self._rows.keys(), "a row id was used twice"
        self._rows |= plan.new_rows
        assert self._rows.keys() <= plan.known_row_ids, "rows that ended are not forgotten"
        result = _Result(self.fails_next_step)
        self.fails_next_step = False
        for planned, new_block_ids in plan.rows:
            self._write(planned, new_block_ids, result)
        for planned, _ in plan.rows:
            self._read_and_sample(planned, result)
        if result.fails:
            return ModelOutput(plan.step_id, step_error="the step failed")
        return ModelOutput(plan.step_id, result.sampled, result.prompt_logprobs, result.row_errors)

    def holds(self, block_id: int, salt: str, token_ids: Sequence[int]) -> bool:
        """The block's slots hold the last `block_size` tokens of this prefix."""
        expected = self._prefixes(self._root(salt), token_ids)[-self.block_size :]
        start = block_id * self.block_size
        return self._slots[start : start + self.block_size] == expected

    def _new_row(self, request: Request) -> _Row:
        return _Row(
            request.request_id,
            self._root(request.cache_salt),
            request.num_prompt_tokens,
            request.payload == WANTS_PROMPT_LOGPROBS,
            request.prompt_token_ids + request.output_token_ids,
        )

    def _write(self, planned: ScheduledRow, new_block_ids: list[int], result: _Result) -> None:
        row = self._rows[planned.row_id]
        row.block_table += new_block_ids
        start, end = planned.num_computed_tokens, planned.num_computed_tokens + planned.num_scheduled_tokens
        assert planned.num_scheduled_tokens >= 1, "a row computes at least one token"
        assert end <= len(row.block_table) * self.block_size, "the block table does not cover what the row computes"
        assert len(set(row.block_table)) == len(row.block_table), "a block stands twice in a table"
        if row.request_id in self.failing_request_ids and not result.fails:
            self.failing_request_ids.discard(row.request_id)
            row.has_failed = True
            result.row_errors[planned.row_id] = "the row failed"
        row.has_failed |= result.fails
        if not row.has_failed:
            assert planned.is_new or start == row.num_computed_tokens, "a token was left out or computed twice"
            assert end <= len(row.token_ids), "the row computes tokens that it does not have"
            assert planned.samples == (end == len(row.token_ids))
            assert not (planned.feeds_back and planned.is_new)
        prefixes = self._prefixes(row.prefix_root, row.token_ids[:end])
        for position in range(start, end):
            self._slots[self._slot(row, position)] = _POISON if row.has_failed else prefixes[position]
        row.num_computed_tokens = end
        self.num_tokens_computed += end - start

    def _read_and_sample(self, planned: ScheduledRow, result: _Result) -> None:
        row = self._rows[planned.row_id]
        if row.has_failed:
            if planned.samples and planned.row_id not in result.row_errors:
                result.sampled[planned.row_id] = RowOutput([_GARBAGE_TOKEN])
            return
        start, end = planned.num_computed_tokens, row.num_computed_tokens
        found = [self._slots[self._slot(row, position)] for position in range(end)]
        assert found == self._prefixes(row.prefix_root, row.token_ids[:end]), f"{row.request_id} reads foreign KV"
        if row.wants_prompt_logprobs and start + 1 < row.num_prompt_tokens:
            ids = row.token_ids[start + 1 : min(end + 1, row.num_prompt_tokens)]
            result.prompt_logprobs[planned.row_id] = PromptLogprobs(start + 1, 1, ids, [-1.0] * len(ids))
        if planned.samples:
            row.token_ids.append(self._next_token(row.token_ids))
            result.sampled[planned.row_id] = RowOutput([row.token_ids[-1]])

    def _slot(self, row: _Row, position: int) -> int:
        block_id = row.block_table[position // self.block_size]
        assert block_id != 0, "the null block was given out"
        return block_id * self.block_size + position % self.block_size

    def _root(self, salt: str) -> int:
        return self._prefix_ids.setdefault((salt, 0), len(self._prefix_ids))

    def _prefixes(self, root: int, token_ids: Sequence[int]) -> list[int]:
        """A number for each prefix of these tokens: equal numbers, equal salt and equal tokens from the start."""
        prefixes = []
        for token_id in token_ids:
            root = self._prefix_ids.setdefault((root, token_id), len(self._prefix_ids))
            prefixes.append(root)
        return prefixes


class ShadowEngine:
    """Core and shadow executor with several plans in flight, and what the readers were told.

    Args:
        config: the core's limits.
        num_blocks: the null block included.
        depth: most plans in flight.
        next_token: the model.
    """

    def __init__(
        self, config: SchedulerConfig, num_blocks: int, *, depth: int = 1, next_token: NextToken = count_on
    ) -> None:
        self.core = Scheduler(config, num_blocks)
        self.depth = depth
        self.executor = ShadowExecutor(num_blocks, config.block_size, next_token)
        self.told: dict[str, list[int]] = {}
        self.told_prompt_positions: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, FinishReason] = {}
        self.num_steps = 0
        self.now_s = 0.0
        self.is_executor_draining = False
        self._results: deque[ModelOutput] = deque()
        self._next_token = next_token

    def add(self, request: Request, *, is_resubmission: bool = False) -> RequestOutput | None:
        """Add a request to the core and begin to listen; returns the end of one that gave way to it."""
        displaced = self.core.add_request(request, self.now_s, is_resubmission=is_resubmission)
        self.told[request.request_id] = list(request.output_token_ids)
        self.told_prompt_positions[request.request_id] = []
        self.finish_reasons.pop(request.request_id, None)
        if displaced is not None:
            self.hear([displaced])
        return displaced

    def plan(self) -> SchedulerOutput | None:
        """Make and send a plan unless `depth` are in flight."""
        if len(self.core.plans_in_flight) >= self.depth:
            return None
        plan = self.core.schedule(self.now_s, admits_new=not self.is_executor_draining)
        if plan is not None:
            self._send(plan)
        return plan

    def release_rows(self) -> SchedulerOutput | None:
        """Tell an idle executor which rows ended, if it does not know."""
        plan = self.core.release_rows()
        if plan is not None:
            self._send(plan)
        return plan

    def _send(self, plan: SchedulerOutput) -> None:
        self.executor.submit(plan, {row_id for request in self.core.running if (row_id := request.row_id)})

    def execute(self) -> None:
        """Run the oldest plan that was not run; its result waits."""
        if self.executor.plans:
            self._results.append(self.executor.execute())

    def apply(self) -> list[RequestOutput]:
        """Give the core the oldest result."""
        if not self.core.plans_in_flight:
            return []
        if not self._results:
            self.execute()
        self.num_steps += 1
        news = self.core.update(self._results.popleft())
        self.hear(news)
        return news

    def step(self) -> list[RequestOutput]:
        """Fill up the plans in flight, then apply one result."""
        while self.plan() is not None:
            pass
        return self.apply()

    def run_until_idle(self, max_steps: int = 2000) -> None:
        """Step until no request is alive; each must end within `max_steps` steps."""
        limit = self.num_steps + max_steps
        while self.core.num_requests:
            assert self.num_steps < limit, "requests do not end"
            self.step()
            assert self.core.plans_in_flight or self.core.num_requests == 0 or self.plan(), "the engine stands still"
        while self.core.plans_in_flight:
            self.apply()

    def hear(self, news: Sequence[RequestOutput]) -> None:
        """Keep what the readers are told; each token comes once and in order, and nothing comes after the end."""
        for told in news:
            request_id = told.request.request_id
            tokens = self.told[request_id]
            assert request_id not in self.finish_reasons, "news after the end"
            assert told.first_token_index == len(tokens), "a token was repeated or left out"
            tokens += told.token_ids
            if told.prompt_logprobs is not None:
                run = told.prompt_logprobs
                self.told_prompt_positions[request_id] += range(run.first_position, run.end_position)
            if told.finish_reason is not None:
                self.finish_reasons[request_id] = told.finish_reason

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request from outside."""
        told = self.core.finish(request_id, reason)
        self.hear([told] if told is not None else [])

    def pass_time(self, passed_s: float) -> list[RequestOutput]:
        """Move the clock and end what expires."""
        self.now_s += passed_s
        news = self.core.expire(self.now_s)
        self.hear(news)
        return news

    def lose_executor(self, num_blocks: int, config: SchedulerConfig | None = None) -> list[RequestOutput]:
        """The executor is gone with all that was in flight; another one comes, empty, perhaps with other limits.

        It crashed, unless it was draining.
        """
        block_size = (config or self.core.config).block_size
        self.executor = ShadowExecutor(num_blocks, block_size, self._next_token)
        self._results.clear()
        news = self.core.reset(num_blocks, config, is_crash=not self.is_executor_draining)
        self.is_executor_draining = False
        self.hear(news)
        return news
