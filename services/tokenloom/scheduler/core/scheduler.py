"""Continuous batching: which request computes how many tokens in the next step, and with which blocks.

One loop for prefill and decode: a step gives each request the tokens it lacks, `num_tokens + num_pending -
num_computed_tokens`, under one token budget; running requests first, then waiting ones while budget, rows and blocks
last. Prompts go in chunks of what the budget leaves. A request that finds no block preempts the request that shall run
last; preempted requests start again from their prefix, with the tokens they have (recompute, nothing is copied).

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
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from tokenloom.scheduler.core.deadlines import Deadlines
from tokenloom.scheduler.core.kv_cache import KVCache
from tokenloom.scheduler.core.plan import ModelOutput, RequestOutput, ScheduledRow, SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request, RequestRefused, RequestStatus
from tokenloom.scheduler.core.waiting_queue import WaitingQueue, order_of


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the batching plan.

    Args:
        max_num_seqs: most requests that run at once (rows of a plan).
        max_num_batched_tokens: token budget of a step.
        max_num_waiting: most requests that wait; more are refused.
        max_model_len: longest sequence that the model takes, prompt and output, in tokens.
        block_size: tokens per KV block.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 1024
    max_model_len: int = 8192
    block_size: int = 16


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_preemptions: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_wasted_rows: int = 0


class Scheduler:
    """The engine core.

    Args:
        config: limits.
        num_blocks: blocks of the executor, the null block included.
    """

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        self.config = config
        self.kv = KVCache(num_blocks, config.block_size)
        self.stats = SchedulerStats()
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.plans_in_flight: deque[SchedulerOutput] = deque()
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._released_row_ids: list[int] = []
        self._preempted: list[Request] = []
        self._next_arrival = 0
        self._next_row_id = 1
        self._next_step_id = 1

    @property
    def max_request_tokens(self) -> int:
        """Longest request, prompt and output: what context and KV memory hold."""
        return min(self.config.max_model_len, self.kv.max_tokens)

    @property
    def num_requests(self) -> int:
        """Requests alive."""
        return len(self._requests)

    def find(self, request_id: str) -> Request | None:
        """A living request."""
        return self._requests.get(request_id)

    def add_request(self, request: Request, *, is_resubmission: bool = False) -> None:
        """Take a request into the queue; lowers its `max_output_tokens` to what fits.

        Args:
            is_resubmission: it was taken before and lost with its engine: exempt from the queue's bound.

        Raises: RequestRefused; nothing has changed then.
        """
        self._refuse_what_cannot_run(request)
        if len(self.waiting) >= self.config.max_num_waiting and not is_resubmission:
            raise RequestRefused(
                f"{len(self.waiting)} requests wait already; the most is {self.config.max_num_waiting}",
                is_overload=True,
            )
        request.max_output_tokens = min(request.max_output_tokens, self._room_for_output(request))
        request.arrival, self._next_arrival = self._next_arrival, self._next_arrival + 1
        self._requests[request.request_id] = request
        self.waiting.add(request)
        self._deadlines.add(request, num_living=len(self._requests))

    def _room_for_output(self, request: Request) -> int:
        return self.max_request_tokens - request.num_prompt_tokens

    def _refuse_what_cannot_run(self, request: Request) -> None:
        room, num_output = self._room_for_output(request), len(request.output_token_ids)
        if request.num_prompt_tokens == 0:
            raise RequestRefused("the prompt is empty; it needs at least one token", field="prompt")
        if room < 1:
            raise RequestRefused(
                f"the prompt has {request.num_prompt_tokens} tokens and leaves no room for output: prompt and output "
                f"together can have {self.max_request_tokens}",
                field="prompt",
            )
        if request.max_output_tokens < 1:
            raise RequestRefused(
                f"max_tokens is {request.max_output_tokens}; at least 1 token is generated", field="max_tokens"
            )
        if num_output >= min(room, request.max_output_tokens):
            raise RequestRefused(
                f"the resumed output has {num_output} tokens and may have {min(room, request.max_output_tokens)}: "
                "nothing is left to generate",
                field="resume_token_ids",
            )
        if num_output >= max(1, request.min_output_tokens) and request.output_token_ids[-1] in request.stop_token_ids:
            raise RequestRefused("the resumed output ends with a stop token already", field="resume_token_ids")
        if request.request_id in self._requests:
            raise RequestRefused(f"request id {request.request_id!r} is in use", field="request_id")

    # --- plan ---------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Make the next plan and count it as in flight; None, and nothing is in flight, if no row can run now."""
        plan = SchedulerOutput(self._next_step_id)
        num_preempted = len(self._preempted)
        self._schedule_running(plan)
        if len(self._preempted) == num_preempted:
            self._admit_waiting(plan)
        if not plan.rows:
            return None
        return self._put_in_flight(plan)

    def release_rows(self) -> SchedulerOutput | None:
        """A plan without rows that tells an idle executor which rows ended; None if it knows or is not idle."""
        if self.plans_in_flight or not self._released_row_ids:
            return None
        return self._put_in_flight(SchedulerOutput(self._next_step_id))

    def _put_in_flight(self, plan: SchedulerOutput) -> SchedulerOutput:
        plan.finished_row_ids, self._released_row_ids = self._released_row_ids, []
        plan.preempted, self._preempted = self._preempted, []
        self._next_step_id += 1
        self.plans_in_flight.append(plan)
        return plan

    def _schedule_running(self, plan: SchedulerOutput) -> None:
        index = 0
        while index < len(self.running) and (budget_left := self._budget_left(plan)):
            request = self.running[index]
            index += 1
            if request.needs_no_more_plans:
                continue
            num_new = self._chunk(request, budget_left, num_others_waiting=len(self.waiting))
            new_block_ids = self._allocate_or_preempt(request, request.num_computed_tokens + num_new)
            if new_block_ids is None:
                return  # the request itself was preempted; it was the last one
            self._plan_row(plan, request, num_new, new_block_ids)

    def _admit_waiting(self, plan: SchedulerOutput) -> None:
        admitted: list[Request] = []
        num_skipped = 0
        for request in self.waiting:
            if len(self.running) + len(admitted) >= self.config.max_num_seqs:
                break
            if plan.num_scheduled_tokens >= self.config.max_num_batched_tokens or request.num_plans_in_flight:
                break  # (rule 2) the blocks it gave up are not for those behind it
            found = self.kv.find_prefix(request)
            if found is None:
                num_skipped += 1  # (rule 4)
                if num_skipped >= self.config.max_num_seqs:
                    break  # a step's cost does not grow with the queue
                continue
            if not self._fits(request, found):
                break
            self._admit(plan, request, found)
            admitted.append(request)
        if admitted:
            for request in admitted:
                self.waiting.remove(request)
            self.running += admitted
            self.running.sort(key=order_of)

    def _admit(self, plan: SchedulerOutput, request: Request, found: list[int]) -> None:
        self.kv.open_table(request, found)
        num_cached = len(found) * self.config.block_size
        request.status = RequestStatus.RUNNING
        request.row_id, self._next_row_id = self._next_row_id, self._next_row_id + 1
        request.num_computed_tokens = request.num_confirmed_tokens = num_cached
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            self.stats.num_prefix_queried_tokens += request.num_prompt_tokens
            self.stats.num_prefix_hit_tokens += request.num_cached_tokens
        num_new = self._chunk(request, self._budget_left(plan), num_others_waiting=len(self.waiting) - 1)
        new_block_ids = self.kv.allocate_slots(request, num_cached + num_new)
        assert new_block_ids is not None, "what fits can be allocated"
        self._plan_row(plan, request, num_new, found + new_block_ids, is_new=True)

    def _fits(self, request: Request, found: list[int]) -> bool:
        """The blocks for all known tokens are free, so that the request is not preempted at once."""
        needed = self.kv.num_blocks_for(request.num_tokens) - len(found)
        return needed + self.kv.pool.count_cached(found) <= self.kv.pool.num_free_blocks

    def _chunk(self, request: Request, budget_left: int, num_others_waiting: int) -> int:
        """Tokens of `request` for this step: what it lacks, but while other prompts want to run half of the budget."""
        budget = self.config.max_num_batched_tokens
        half = max(1, budget // 2)
        num_new = min(request.num_lacking_tokens, budget_left)
        if num_new <= half:
            return num_new
        others = [other for other in self.running if other is not request]
        if num_others_waiting or any(other.num_lacking_tokens > 1 for other in others):
            return half
        return min(num_new, max(half, budget - len(others)))  # each of the others decodes one token

    def _budget_left(self, plan: SchedulerOutput) -> int:
        return self.config.max_num_batched_tokens - plan.num_scheduled_tokens

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for `request`, from the last running ones if need be; None if it had to be preempted itself."""
        while (new_block_ids := self.kv.allocate_slots(request, num_tokens)) is None:
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None
        return new_block_ids

    def _plan_row(
        self, plan: SchedulerOutput, request: Request, num_new: int, new_block_ids: list[int], *, is_new: bool = False
    ) -> None:
        assert request.row_id is not None
        start, num_pending = request.num_computed_tokens, request.num_pending
        samples = num_new == request.num_lacking_tokens
        feeds_back = samples and num_pending > 0
        plan.rows.append(
            ScheduledRow(request, request.row_id, num_new, start, new_block_ids, is_new, feeds_back, samples)
        )
        plan.num_scheduled_tokens += num_new
        request.num_computed_tokens = start + num_new
        request.num_plans_in_flight += 1
        if samples:
            request.num_pending = num_pending + 1

    def _preempt(self, request: Request) -> None:
        self._leave_running(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.add(request)
        self._preempted.append(request)

    def _leave_running(self, request: Request) -> None:
        assert request.row_id is not None
        self._released_row_ids.append(request.row_id)
        request.row_id = None
        request.num_computed_tokens = request.num_confirmed_tokens = 0
        self.kv.close_table(request)

    # --- results ------------------------------------------------------------------------------------------------

    def update(self, output: ModelOutput) -> list[RequestOutput]:
        """Apply the result of the oldest plan in flight; returns what the requests' readers are to be told."""
        plan = self.plans_in_flight.popleft()
        assert plan.step_id == output.step_id, "results come in the order of the plans"
        news = []
        for row in plan.rows:
            row.request.num_plans_in_flight -= 1
            if row.request.is_finished:
                self.stats.num_wasted_rows += 1
                continue
            error = output.step_error or output.row_errors.get(row.row_id)
            if error is not None:
                news.append(self._finish(row.request, FinishReason.ERROR, error))
            elif (told := self._apply(row, output)) is not None:
                news.append(told)
        return news

    def _apply(self, row: ScheduledRow, output: ModelOutput) -> RequestOutput | None:
        request = row.request
        told = RequestOutput(request, first_token_index=len(request.output_token_ids))
        is_current = request.row_id == row.row_id
        if is_current:
            request.num_confirmed_tokens += row.num_scheduled_tokens
        reason = None
        if row.samples:
            sampled = output.sampled.get(row.row_id)
            if sampled is None:
                return self._finish(request, FinishReason.ERROR, "the executor sampled no token for this request")
            request.num_pending -= 1
            told.token_ids, told.logprobs = sampled.token_ids, sampled.logprobs
            for token_id in sampled.token_ids:
                reason = request.append_output(token_id)
        run = output.prompt_logprobs.get(row.row_id)
        if run is not None and (run := run.since(request.num_prompt_logprobs_done)) is not None:
            request.num_prompt_logprobs_done = run.end_position
            told.prompt_logprobs = run
        if is_current:
            self.kv.name_full_blocks(request)
        if reason is not None:
            self._finish(request, reason)
            told.finish_reason = reason
        return told if told.token_ids or told.prompt_logprobs is not None else None

    # --- ends ---------------------------------------------------------------------------------------------------

    def finish(self, request_id: str, reason: FinishReason) -> RequestOutput | None:
        """End a request from outside (abort, stop string); None if it is not alive. Its blocks are free at once."""
        request = self._requests.get(request_id)
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
            self.running.remove(request)
            self._leave_running(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        return RequestOutput(request, len(request.output_token_ids), finish_reason=reason, error=error)

    def reset(self, num_blocks: int, config: SchedulerConfig | None = None) -> list[RequestOutput]:
        """The executor was lost: nothing in flight will come back and no block holds anything.

        Running requests go back to the queue, in their old order, and start again from the tokens they have.

        Args:
            num_blocks: blocks of the new executor; what no longer fits into them ends with an error.
            config: the limits that hold with it; None: the old ones.
        """
        self.config = config or self.config
        self.plans_in_flight.clear()
        self._released_row_ids = []
        self.kv = KVCache(num_blocks, self.config.block_size)
        for request in self.running:
            request.status = RequestStatus.WAITING
            request.row_id = None
            request.block_ids = []
            request.num_hashed_blocks = 0
            request.num_computed_tokens = request.num_confirmed_tokens = 0
            self.waiting.add(request)
        self.running = []
        news = []
        for request in list(self._requests.values()):
            request.num_plans_in_flight = request.num_pending = 0
            if request.num_tokens >= self.max_request_tokens:
                error = RequestRefused(
                    f"the request has {request.num_tokens} tokens and needs room for one more; the engine came back "
                    f"with room for {self.max_request_tokens}"
                )
                news.append(self._finish(request, FinishReason.ERROR, error))
            else:
                request.max_output_tokens = min(
                    request.max_output_tokens, self.max_request_tokens - request.num_prompt_tokens
                )
        return news
