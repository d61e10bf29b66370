"""Continuous batching: which request computes how many tokens in the next step, and with which blocks.

One loop for prefill and decode: a step gives each request the tokens it lacks, `num_tokens + num_pending -
num_computed_tokens`, under one token budget (planner.py). Preempted requests start again from their prefix, with the
tokens they have (recompute, nothing is copied).

Several plans are in flight. `schedule()` counts on every plan that was made; `update()` applies results, strictly in
the order of the plans. The rules (design):

1. Plans run in order, so blocks freed while plan k is made may be given out in plan k.
2. A preempted request is planned again only when its last result in flight was applied; that token is kept.
3. A block is named in `update()`, when the results of the steps that wrote it were applied without a row error.
4. Requests whose prefix is being computed wait for it.
5. A stop known by counting is never planned past; a stop token wastes at most (plans in flight - 1) rows.
6. A row that speculates would never be in two plans: no row speculates yet.
7. Requests for prompt logprobs read no prefix cache; their logprobs have positions of their own.
8. Choices of one call are requests of their own that share their prompt by rule 4.

Blocks belong to a request while it runs: taken in `schedule()`, released by preempt and finish, named in `update()`.
Tenants are charged when a token is computed for the first time: prompt tokens when planned, output tokens when sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tokenloom.scheduler.core.admission import find_place, refuse_what_cannot_run
from tokenloom.scheduler.core.ageing import Ageing
from tokenloom.scheduler.core.config import SchedulerConfig, SchedulerStats, SchedulingPolicy
from tokenloom.scheduler.core.kv_cache import KVCache
from tokenloom.scheduler.core.plan import ModelOutput, RequestOutput, ScheduledRow, SchedulerOutput
from tokenloom.scheduler.core.planner import Planner
from tokenloom.scheduler.core.request import FinishReason, Request, RequestRefused, RequestStatus, WaitReason
from tokenloom.scheduler.core.state import CoreState
from tokenloom.scheduler.core.suspects import ExecutorCrash, Suspects
from tokenloom.scheduler.core.tenants import Tenant, TenantPolicy
from tokenloom.scheduler.core.timers import Timers
from tokenloom.scheduler.core.waiting_queue import WaitingQueue

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats", "SchedulingPolicy"]


class Scheduler:
    """The engine core. All times are seconds on one monotonic clock, the caller's.

    Args:
        config: limits.
        num_blocks: blocks of the executor, the null block included.
    """

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        ageing = Ageing(config.ageing_s if config.is_fair else 0.0, config.num_priority_classes)
        kv = KVCache(num_blocks, config.block_size)
        self._state = CoreState(config, kv, WaitingQueue(config.is_fair), ageing)
        self._planner = Planner(self._state)
        self._deadlines = Timers()
        self._next_arrival = 0
        self._next_step_id = 1
        self._is_trial_due = False
        self.plans_in_flight: deque[SchedulerOutput] = deque()

    @property
    def config(self) -> SchedulerConfig:
        """The limits in force."""
        return self._state.config

    @property
    def kv(self) -> KVCache:
        """Block tables and prefix cache; another object after `reset`."""
        return self._state.kv

    @property
    def stats(self) -> SchedulerStats:
        """Counters."""
        return self._state.stats

    @property
    def running(self) -> Sequence[Request]:
        """Requests that run, by class and age."""
        return self._state.running

    @property
    def waiting(self) -> WaitingQueue:
        """Requests that wait."""
        return self._state.waiting

    @property
    def suspects(self) -> Suspects:
        """Requests that may have killed the executor."""
        return self._state.suspects

    @property
    def max_request_tokens(self) -> int:
        """Longest request, prompt and output: what context and KV memory hold."""
        return min(self.config.max_model_len, self.kv.max_tokens)

    @property
    def num_requests(self) -> int:
        """Requests alive."""
        return len(self._state.requests)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the requests that wait."""
        return self.waiting.num_tokens

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """Tenants by name: all that have requests or a policy, and those seen lately."""
        return self._state.tenants.by_name

    def find(self, request_id: str) -> Request | None:
        """A living request."""
        return self._state.requests.get(request_id)

    def count_waiting(self) -> dict[WaitReason, int]:
        """Requests that wait, by what for, as of the last plan."""
        counts = dict.fromkeys(WaitReason, 0)
        for request in self.waiting:
            counts[WaitReason.TENANT_LIMIT if request.account.is_at_limit else request.wait_reason] += 1
        return counts

    # --- arrivals -----------------------------------------------------------------------------------------------

    def set_tenant(self, name: str, policy: TenantPolicy) -> None:
        """Set what a tenant may have, from now on; requests that run or wait stay."""
        self._state.tenants.define(name, policy)

    def add_request(
        self, request: Request, now_s: float = 0.0, *, is_resubmission: bool = False
    ) -> RequestOutput | None:
        """Take a request into the queue; lowers its `max_output_tokens` to what fits and hashes its prompt.

        Args:
            is_resubmission: it was taken before and lost with its engine: exempt from bounds, limits and from the
                charge for what it has.

        Returns: the end of a waiting request that lost its place in the full queue to this one, or None.

        Raises: RequestRefused; nothing has changed then.
        """
        refuse_what_cannot_run(request, self.max_request_tokens)
        if request.request_id in self._state.requests:
            raise RequestRefused(f"request id {request.request_id!r} is in use", field="request_id")
        tenant = request.account = self._state.tenants.get(request.tenant)
        request.current_class = self._state.ageing.class_of(request, now_s) if self.config.is_fair else 0
        gives_way = None
        if not is_resubmission:
            num_others = len(self.running) + len(self.waiting) - tenant.num_waiting
            num_free_rows = self.config.max_num_seqs - num_others
            limits = self.config.queue_limits
            gives_way = find_place(request, self.waiting, self._state.tenants, limits, num_free_rows, now_s)
            if tenant.bucket is not None:
                tenant.bucket.take(request.num_prompt_tokens)
                request.num_rate_tokens = request.num_prompt_tokens
        displaced = self._displace(gives_way, tenant) if gives_way is not None else None
        request.is_resubmission = is_resubmission
        request.num_charged_tokens = request.num_prompt_tokens if is_resubmission else 0
        request.max_output_tokens = min(request.max_output_tokens, self.max_request_tokens - request.num_prompt_tokens)
        request.arrival, self._next_arrival = self._next_arrival, self._next_arrival + 1
        self._state.requests[request.request_id] = request
        self._state.tenants.join(tenant)
        self._set_order(request, now_s)
        self.waiting.add(request)
        self._state.tenants.note_alive(tenant)
        self.kv.hash_prompt(request)
        return displaced

    def _set_order(self, request: Request, now_s: float) -> None:
        """Give a new request its place within its tenant; watch its deadline and its age."""
        num_living = len(self._state.requests)
        if request.deadline_s is not None:
            self._deadlines.add(request.deadline_s, request, num_living)
        if not self.config.is_fair:
            request.order_key = (request.submitted_s, request.arrival)
            return
        due_s = request.submitted_s + self.config.patience_s
        if request.deadline_s is not None:
            due_s = min(due_s, request.deadline_s)
        request.order_key = (due_s, request.arrival)
        self._state.ageing.watch(request, num_living)

    def _displace(self, request: Request, newcomer: Tenant) -> RequestOutput:
        who = "a more urgent request" if newcomer is request.account else "a tenant with fewer requests in it"
        error = RequestRefused(
            f"the queue is full ({len(self.waiting)} requests wait), and {who} came",
            is_overload=True,
            reason="QUEUE_FULL",
        )
        self.stats.num_displaced += 1
        return self._finish(request, FinishReason.ERROR, error)

    # --- plan ---------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float = 0.0, *, admits_new: bool = True) -> SchedulerOutput | None:
        """Make the next plan and count it as in flight; None, and nothing is in flight, if no row can run now.

        Args:
            admits_new: requests that wait may begin to run; False while the executor is about to stop.
        """
        if self._state.suspects.isolated:
            return self._schedule_in_turn(now_s, admits_new)
        plan = self._planner.plan(self._next_step_id, now_s, admits_new=admits_new)
        return self._put_in_flight(plan) if plan.rows else None

    def _schedule_in_turn(self, now_s: float, admits_new: bool) -> SchedulerOutput | None:
        """Plans of isolated suspects, each alone in flight, and plans of all others take turns."""
        in_flight = self.plans_in_flight
        if in_flight and (self._is_trial_due or in_flight[-1].is_trial):
            return None
        plan = self._trial(now_s, admits_new) if self._is_trial_due else None
        if plan is None:
            plan = self._planner.plan(self._next_step_id, now_s, admits_new=admits_new)
            if not plan.rows and not in_flight:
                plan = self._trial(now_s, admits_new)
        if plan is None or not plan.rows:
            return None
        self._is_trial_due = not plan.is_trial
        return self._put_in_flight(plan)

    def _trial(self, now_s: float, admits_new: bool) -> SchedulerOutput | None:
        """A plan of the first group of suspects of which somebody can run; None if there is none."""
        suspects = self._state.suspects
        for _ in range(len(suspects.groups)):
            plan = self._planner.plan_trial(self._next_step_id, now_s, suspects.groups[0], admits_new=admits_new)
            if plan.rows:
                return plan
            suspects.postpone()
        return None

    def release_rows(self) -> SchedulerOutput | None:
        """A plan without rows that tells an idle executor which rows ended; None if it knows or is not idle."""
        if self.plans_in_flight or not self._state.released_row_ids:
            return None
        return self._put_in_flight(SchedulerOutput(self._next_step_id))

    def _put_in_flight(self, plan: SchedulerOutput) -> SchedulerOutput:
        state = self._state
        plan.finished_row_ids, state.released_row_ids = state.released_row_ids, []
        plan.preempted, state.preempted = state.preempted, []
        self.stats.num_computed_tokens += plan.num_scheduled_tokens
        self._next_step_id += 1
        self.plans_in_flight.append(plan)
        return plan

    # --- results ------------------------------------------------------------------------------------------------

    def update(self, output: ModelOutput) -> list[RequestOutput]:
        """Apply the result of the oldest plan in flight; returns what the requests' readers are to be told."""
        plan = self.plans_in_flight.popleft()
        assert plan.step_id == output.step_id, "results come in the order of the plans"
        if output.step_error is not None:
            return self._fail_step(plan, output.step_error)
        news = []
        errors, suspects, block_size = output.row_errors, self._state.suspects, self.config.block_size
        for row in plan.rows:
            request = row.request
            request.num_plans_in_flight -= 1
            if request.finish_reason is not None or request.is_row_void:
                self._drop_result(row)
                continue
            error = errors.get(row.row_id) if errors else None
            if error is not None:
                news.append(self._finish(request, FinishReason.ERROR, error))
                continue
            if request.row_id == row.row_id:
                request.num_confirmed_tokens += row.num_scheduled_tokens
                if suspects:
                    suspects.note_progress(request)
            told = self._apply(row, output)
            if request.num_confirmed_tokens >= (request.num_hashed_blocks + 1) * block_size:
                self._state.kv.name_full_blocks(request)
            if told is None:
                continue
            if told.finish_reason is not None and request.finish_reason is None:
                self._finish(request, told.finish_reason)
            news.append(told)
        return news

    def _drop_result(self, row: ScheduledRow) -> None:
        """A result came for a request that has ended, or began anew."""
        self.stats.num_wasted_rows += 1
        request = row.request
        if request.is_row_void:
            request.num_pending -= row.samples
            request.is_row_void = request.num_plans_in_flight > 0

    def _fail_step(self, plan: SchedulerOutput, error: Any) -> list[RequestOutput]:
        """A step failed as a whole: its rows start again and are suspects; who fails again and again alone, ends."""
        state = self._state
        quarantined = state.suspects.blame_for_failed_step(plan.rows)
        for row in plan.rows:
            request = row.request
            request.num_plans_in_flight -= 1
            if request.finish_reason is not None or request.is_row_void:
                self._drop_result(row)
                continue
            if request.status is RequestStatus.RUNNING:
                state.leave_running(request)
                request.status = RequestStatus.WAITING
                self.waiting.add(request)
            request.num_pending -= row.samples
            request.is_row_void = request.num_plans_in_flight > 0
        return [] if quarantined is None else [self._quarantine(quarantined, error)]

    def _apply(self, row: ScheduledRow, output: ModelOutput) -> RequestOutput | None:
        """Take over what a row sampled; returns the news. A reason to finish is told, and for the caller to act on."""
        request = row.request
        told = None
        if row.samples:
            sampled = output.sampled.get(row.row_id)
            if sampled is None:
                return self._finish(request, FinishReason.ERROR, "the executor sampled no token for this request")
            request.num_pending -= 1
            told = RequestOutput(request, len(request.output_token_ids), sampled.token_ids, sampled.logprobs)
            for token_id in sampled.token_ids:
                told.finish_reason = request.append_output(token_id)
            self._charge_output(request, len(sampled.token_ids))
        if output.prompt_logprobs and (run := output.prompt_logprobs.get(row.row_id)) is not None:
            run = run.since(request.num_prompt_logprobs_done)
            if run is not None:
                request.num_prompt_logprobs_done = run.end_position
                told = told or RequestOutput(request, len(request.output_token_ids))
                told.prompt_logprobs = run
        return told

    def _charge_output(self, request: Request, num_tokens: int) -> None:
        tenant = request.account
        self._state.tenants.serve(tenant, num_tokens, self._state.config.output_token_charge)
        if tenant.bucket is not None:
            tenant.bucket.take(num_tokens)
        if request.status is RequestStatus.WAITING:
            self._state.waiting.note_grown(request, num_tokens)

    # --- ends ---------------------------------------------------------------------------------------------------

    def finish(self, request_id: str, reason: FinishReason) -> RequestOutput | None:
        """End a request from outside (abort, stop string); None if it is not alive. Its blocks are free at once."""
        request = self._state.requests.get(request_id)
        return None if request is None else self._finish(request, reason)

    def expire(self, now_s: float) -> list[RequestOutput]:
        """End the requests whose deadline has come; to be called before a plan is made."""
        return [self._finish(request, FinishReason.DEADLINE) for request in self._deadlines.pop_due(now_s)]

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` has to be called next; None: no request has a deadline."""
        return self._deadlines.next_s

    def _finish(self, request: Request, reason: FinishReason, error: Any = None) -> RequestOutput:
        if request.status is RequestStatus.RUNNING:
            self._state.leave_running(request)
        else:
            self.waiting.remove(request)
            self._state.tenants.note_left_queue(request.account)
        self._state.suspects.forget(request)
        if request.account.bucket is not None and request.num_cached_tokens is None:
            request.account.bucket.take(-request.num_rate_tokens)  # nothing was computed for it
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._state.requests[request.request_id]
        self._state.tenants.note_ended(request.account)
        return RequestOutput(request, len(request.output_token_ids), finish_reason=reason, error=error)

    def reset(
        self, num_blocks: int, config: SchedulerConfig | None = None, *, is_crash: bool = True
    ) -> list[RequestOutput]:
        """The executor was lost: nothing in flight will come back and no block holds anything.

        Running requests go back to the queue, in their old order, and start again from the tokens they have. Those in
        flight are suspects; one that is quarantined ends with an `ExecutorCrash`.

        Args:
            num_blocks: blocks of the new executor; what no longer fits into them ends with an error.
            config: the limits that hold with it; None: the old ones.
            is_crash: False if the old one is lost for a reason that no request can be blamed for.
        """
        state = self._state
        in_flight = [row for plan in self.plans_in_flight for row in plan.rows]
        quarantined = state.suspects.blame_for_crash(in_flight) if is_crash else None
        self.plans_in_flight.clear()
        self._is_trial_due = False  # the others get a step before the next crash
        state.released_row_ids = []
        if config is not None and config.block_size != state.config.block_size:
            for request in state.requests.values():
                request.block_hashes = []
        state.config = config or state.config
        state.kv = KVCache(num_blocks, state.config.block_size)
        self._planner = Planner(state)
        for request in state.running:
            request.account.num_running -= 1
            request.account.num_held_blocks = 0
            request.status = RequestStatus.WAITING
            request.row_id = None
            request.block_ids = []
            request.num_hashed_blocks = 0
            request.num_computed_tokens = request.num_confirmed_tokens = 0
            self.waiting.add(request)
        state.running = []
        news = []
        if quarantined is not None:
            suspicion = state.suspects.suspicion(quarantined)
            assert suspicion is not None
            error = ExecutorCrash(suspicion.num_crashes, suspicion.num_crashes_alone)
            news.append(self._quarantine(quarantined, error))
        for request in list(self._state.requests.values()):
            request.num_plans_in_flight = request.num_pending = 0
            request.is_row_void = False
            if request.num_tokens >= self.max_request_tokens:
                refusal = RequestRefused(
                    f"the request has {request.num_tokens} tokens and needs room for one more; the engine came back "
                    f"with room for {self.max_request_tokens}"
                )
                news.append(self._finish(request, FinishReason.ERROR, refusal))
            else:
                request.max_output_tokens = min(
                    request.max_output_tokens, self.max_request_tokens - request.num_prompt_tokens
                )
        return news

    def _quarantine(self, request: Request, error: Any) -> RequestOutput:
        """End the request that kills the executor, or makes steps fail."""
        self.stats.num_quarantined += 1
        return self._finish(request, FinishReason.ERROR, error)
