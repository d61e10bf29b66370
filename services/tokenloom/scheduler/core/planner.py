"""Making a plan: who runs in the next step, with how many tokens and which blocks.

Running requests that lack one token (decodes) come first. Then prompts, running and waiting ones alike, in the order of
service: class, tenant's counter, deadline, arrival (waiting_queue.py). A long prompt, one that lacks more than half of
the budget, gets half of what is left of it, so that there is room for those behind it; what nobody used goes to the
prompts that were cut. A prompt alone that needs several steps gets half of the budget in each: whoever comes next waits
for the plans in flight, which are half as long then. Who finds no block, row or share makes others give way
(preemption.py).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenloom.scheduler.core.plan import Preemption, PreemptReason, ScheduledRow, SchedulerOutput
from tokenloom.scheduler.core.preemption import Preemptor, Shortage
from tokenloom.scheduler.core.request import Request, RequestStatus, WaitReason
from tokenloom.scheduler.core.state import BY_AGE, CoreState
from tokenloom.scheduler.core.tenants import Tenant
from tokenloom.scheduler.core.waiting_queue import Walk

# Waiting requests that a step may pass because they wait for a prefix or for their tenant's turn.
_MIN_PASSED = 512


@dataclass(slots=True, eq=False)
class _Draft:
    """A plan in the making.

    Args:
        chunks: its rows of prompts.
        cut: those that got less than they lack, to leave room for others.
        is_short_of_blocks: a running request found no free block: nobody is let in who has no right to push in.
        num_new_row_ids: token ids that its new rows bring.
        num_promised_blocks: blocks that running prompts, and suspects that wait, will still need for the tokens they
            have.
        promised_rows: rows that suspects who wait will need, by tenant; nobody else may take them.
        admits_new: requests that wait may begin to run.
    """

    plan: SchedulerOutput
    admits_new: bool = True
    chunks: dict[Request, ScheduledRow] = field(default_factory=dict)
    cut: list[ScheduledRow] = field(default_factory=list)
    num_new_row_ids: int = 0
    num_promised_blocks: int = 0
    promised_rows: Counter[Tenant] = field(default_factory=Counter)
    is_short_of_blocks: bool = False


class Planner:
    """Makes plans from the core's state, which it changes."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._preemptor = Preemptor(state.config, state.tenants, state.kv.pool)

    def plan(self, step_id: int, now_s: float, *, admits_new: bool = True) -> SchedulerOutput:
        """The next plan; without rows if no row can run now."""
        self._let_age(now_s)
        draft = _Draft(SchedulerOutput(step_id), admits_new)
        running: Sequence[Request] = tuple(self._state.running)
        if isolated := self._state.suspects.isolated:
            running = [request for request in running if request not in isolated]
            draft.promised_rows.update(r.account for r in isolated if r.status is RequestStatus.WAITING)
        prompts = self._plan_decodes(draft, running)
        self._plan_prompts(draft, prompts)
        return draft.plan

    def plan_trial(
        self, step_id: int, now_s: float, group: Sequence[Request], *, admits_new: bool = True
    ) -> SchedulerOutput:
        """A plan for a group of suspects only; without rows if none of them can run now."""
        self._let_age(now_s)
        draft = _Draft(SchedulerOutput(step_id, is_trial=True))
        prompts = self._plan_decodes(draft, [r for r in group if r.status is RequestStatus.RUNNING])
        waiting = [request for request in group if admits_new and request.status is RequestStatus.WAITING]
        lacking = [r for r in self._state.running if not r.needs_no_more_plans]
        draft.num_promised_blocks = sum(map(self._num_lacking_blocks, lacking))
        has_others = len(prompts) + len(waiting) > 1
        for request in prompts:
            if self._budget_left(draft.plan) and request.row_id is not None:
                self._plan_chunk(draft, request, has_others)
        for request in waiting:
            if self._budget_left(draft.plan):
                self._try_suspect(draft, request, has_others)
        self._give_the_rest(draft)
        return draft.plan

    def _try_suspect(self, draft: _Draft, request: Request, has_others: bool) -> None:
        """Let a suspect that waits run, if there is room."""
        if request.num_plans_in_flight or request.account.is_at_limit or self._is_too_long_for(draft, request):
            return
        found = self._state.kv.find_prefix(request)
        if found is None:
            request.wait_reason = WaitReason.PREFIX  # (rule 4)
            return
        request.wait_reason = WaitReason.CAPACITY
        shortage = self._shortage(draft, request, found)
        if shortage is None or self._make_room(draft, request, shortage):
            self._state.waiting.remove(request)
            self._admit(draft, request, found, has_others)

    def _let_age(self, now_s: float) -> None:
        due = self._state.ageing.pop_due(now_s)
        for request, new_class in due:
            is_waiting = request.status is RequestStatus.WAITING
            if is_waiting:
                self._state.waiting.remove(request)
            request.current_class = new_class
            if is_waiting:
                self._state.waiting.add(request)
            self._state.ageing.watch(request, len(self._state.requests))
        if due:
            self._state.running.sort(key=BY_AGE)

    def _plan_decodes(self, draft: _Draft, running: Sequence[Request]) -> list[Request]:
        """Plan those of these running requests that lack one token; returns those that lack more."""
        prompts = []
        plan, budget, block_size = draft.plan, self._state.config.max_num_batched_tokens, self._state.config.block_size
        for request in running:
            if request.row_id is None or request.needs_no_more_plans:
                continue  # it gave way to one before it, or length ends it
            num_computed = request.num_computed_tokens
            if len(request.token_ids) + request.num_pending - num_computed > 1:
                prompts.append(request)
                continue
            if plan.num_scheduled_tokens >= budget:
                break
            new_block_ids: list[int] | None = []
            if num_computed >= len(request.block_ids) * block_size:
                new_block_ids = self._allocate_or_preempt(draft, request, num_computed + 1)
            if new_block_ids is not None:
                self._plan_row(plan, request, 1, new_block_ids)
        return [request for request in prompts if request.row_id is not None]

    def _plan_prompts(self, draft: _Draft, prompts: list[Request]) -> None:
        """Give what the decodes leave to prompts, running and waiting ones, in the order of service."""
        service_key = self._state.waiting.service_key
        prompts.sort(key=service_key, reverse=True)
        draft.num_promised_blocks = sum(map(self._num_lacking_blocks, [*prompts, *self._state.suspects.isolated]))
        walk = self._state.waiting.walk(max_passed=max(_MIN_PASSED, self._state.config.max_num_seqs))
        while self._budget_left(draft.plan):
            head = walk.head if draft.admits_new else None
            if prompts and (head is None or service_key(prompts[-1]) <= service_key(head)):
                request = prompts.pop()
                if request.row_id is not None and request not in draft.chunks:
                    self._plan_chunk(draft, request, has_others=bool(prompts) or head is not None)
            elif head is not None:
                self._try_head(draft, walk, has_others=bool(prompts))
            else:
                break
        walk.end()
        self._give_the_rest(draft)

    def _plan_chunk(self, draft: _Draft, request: Request, has_others: bool) -> None:
        """Plan a part of a running prompt."""
        num_new = self._chunk(draft, request, has_others)
        draft.num_promised_blocks -= self._num_lacking_blocks(request)
        new_block_ids = self._allocate_or_preempt(draft, request, request.num_computed_tokens + num_new)
        if new_block_ids is not None:
            draft.num_promised_blocks += self._num_lacking_blocks(request)
            self._plan_prompt_row(draft, request, num_new, new_block_ids)

    def _try_head(self, draft: _Draft, walk: Walk, has_others: bool) -> None:
        """Let the head of the queue run, or pass it, or stop the walk if nobody behind it may run either."""
        request = walk.head
        assert request is not None
        if request in self._state.suspects.isolated:
            return walk.pass_request()
        if request.num_plans_in_flight:
            return walk.stop()  # (rule 2) the blocks it gave up are not for those behind it
        if (draft.is_short_of_blocks and not self._may_push_in(request)) or self._is_too_long_for(draft, request):
            return walk.stop()
        if request.account.is_at_limit_with(draft.promised_rows[request.account]):
            request.wait_reason = WaitReason.TENANT_LIMIT
            return walk.pass_tenant() if self._state.config.is_fair else walk.pass_request(is_counted=False)
        found = self._state.kv.find_prefix(request)
        if found is None:
            request.wait_reason = WaitReason.PREFIX  # (rule 4)
            return walk.pass_request()
        request.wait_reason = WaitReason.CAPACITY
        shortage = self._shortage(draft, request, found)
        if shortage is not None and not self._make_room(draft, request, shortage):
            return self._pass_without_room(walk, request, shortage)
        self._state.waiting.remove(request)
        walk.take()
        self._admit(draft, request, found, has_others or walk.head is not None)
        return None

    def _is_too_long_for(self, draft: _Draft, request: Request) -> bool:
        """The plan's new rows would bring too many ids with this one; the next plan takes it."""
        num_ids = draft.num_new_row_ids
        return num_ids > 0 and num_ids + request.num_tokens > self._state.config.max_new_row_ids

    def _may_push_in(self, request: Request) -> bool:
        """The request has a right to blocks although running requests had to give theirs: by its class or its share."""
        state = self._state
        is_more_urgent = bool(state.running) and state.running[-1].current_class > request.current_class
        return is_more_urgent or (
            state.tenants.num_alive > 1 and self._preemptor.is_within_share(request.account, self._num_blocks(request))
        )

    def _pass_without_room(self, walk: Walk, request: Request, shortage: Shortage) -> None:
        """Who lacks a row and has his share leaves it to tenants of the same class that have less; else all wait."""
        needed = self._num_blocks(request)
        if shortage.num_blocks > 0 or self._preemptor.is_within_share(request.account, needed):
            walk.stop()
        else:
            walk.pass_tenant(is_last_class=True)

    def _shortage(self, draft: _Draft, request: Request, found: list[int]) -> Shortage | None:
        """What the request lacks to run with all tokens it has, so that it is not preempted at once; None: nothing."""
        pool = self._state.kv.pool
        num_free = pool.num_free_blocks - pool.count_cached(found) - draft.num_promised_blocks
        num_blocks = self._num_blocks(request) - len(found) - num_free
        num_rows = len(self._state.running) + draft.promised_rows.total() + 1 - self._state.config.max_num_seqs
        return Shortage(num_rows, num_blocks, found) if num_rows > 0 or num_blocks > 0 else None

    def _make_room(self, draft: _Draft, request: Request, shortage: Shortage) -> bool:
        """Preempt others for a waiting request, if they may be and that suffices."""
        running, needed = self._state.running, self._num_blocks(request)
        victims = self._preemptor.victims_for(request, needed, shortage, running, kept=draft.chunks)
        for preemption in victims or ():
            self._preempt(draft, preemption)
        return victims is not None

    def _admit(self, draft: _Draft, request: Request, found: list[int], has_others: bool) -> None:
        self._state.kv.open_table(request, found)
        num_cached = len(found) * self._state.config.block_size
        request.status = RequestStatus.RUNNING
        request.row_id = self._state.take_row_id()
        draft.num_new_row_ids += request.num_tokens
        request.num_computed_tokens = request.num_confirmed_tokens = num_cached
        num_cached = min(num_cached, request.num_prompt_tokens)
        request.num_charged_tokens = max(request.num_charged_tokens, num_cached)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
            self._state.stats.num_prefix_queried_tokens += request.num_prompt_tokens
            self._state.stats.num_prefix_hit_tokens += num_cached
        bisect.insort(self._state.running, request, key=BY_AGE)
        request.account.num_running += 1
        self._state.tenants.note_left_queue(request.account)
        num_new = self._chunk(draft, request, has_others)
        new_block_ids = self._state.kv.allocate_slots(request, request.num_computed_tokens + num_new)
        assert new_block_ids is not None, "what fits can be allocated"
        draft.num_promised_blocks += self._num_lacking_blocks(request)
        self._plan_prompt_row(draft, request, num_new, found + new_block_ids, is_new=True)

    def _chunk(self, draft: _Draft, request: Request, has_others: bool) -> int:
        """Tokens of a prompt for this step: what it lacks; if it is long, half of what is left for it and others."""
        left, lacking = self._budget_left(draft.plan), request.num_lacking_tokens
        is_long = lacking > self._state.config.max_num_batched_tokens // 2
        if is_long and (has_others or (not draft.chunks and lacking > left)):
            left = max(left // 2, min(left, self._state.config.block_size))
        return min(lacking, left)

    def _give_the_rest(self, draft: _Draft) -> None:
        """Prompts that were cut get what nobody else wants, as far as blocks are free, unless one is alone."""
        for row in draft.cut if len(draft.chunks) > 1 else ():
            request, left = row.request, self._budget_left(draft.plan)
            more = min(left, request.num_lacking_tokens)
            if more <= 0 or row.request.row_id != row.row_id:
                continue
            added = self._state.kv.allocate_slots(request, request.num_computed_tokens + more)
            if added is None:
                continue
            row.new_block_ids += added
            row.num_scheduled_tokens += more
            row.samples = more == request.num_lacking_tokens
            self._count_planned(draft.plan, request, more, added, row.samples)

    def _num_blocks(self, request: Request) -> int:
        """Blocks that the request's known tokens need."""
        return self._state.kv.num_blocks_for(request.num_tokens)

    def _num_lacking_blocks(self, request: Request) -> int:
        return max(0, self._num_blocks(request) - len(request.block_ids))

    def _budget_left(self, plan: SchedulerOutput) -> int:
        return self._state.config.max_num_batched_tokens - plan.num_scheduled_tokens

    def _allocate_or_preempt(self, draft: _Draft, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for a running request, others' if need be; None if it had to give way itself."""
        while (new_block_ids := self._state.kv.allocate_slots(request, num_tokens)) is None:
            draft.is_short_of_blocks = True
            victim = self._preemptor.victim_for_block(self._state.running, kept=draft.chunks)
            self._preempt(draft, Preemption(victim, PreemptReason.BLOCKS))
            if victim is request:
                return None
        return new_block_ids

    def _plan_prompt_row(
        self, draft: _Draft, request: Request, num_new: int, new_block_ids: list[int], *, is_new: bool = False
    ) -> None:
        row = self._plan_row(draft.plan, request, num_new, new_block_ids, is_new=is_new)
        draft.chunks[request] = row
        if not row.samples:
            draft.cut.append(row)

    def _plan_row(
        self, plan: SchedulerOutput, request: Request, num_new: int, new_block_ids: list[int], *, is_new: bool = False
    ) -> ScheduledRow:
        assert request.row_id is not None
        start = request.num_computed_tokens
        samples = num_new == request.num_lacking_tokens
        feeds_back = samples and request.num_pending > 0
        row = ScheduledRow(request, request.row_id, num_new, start, new_block_ids, is_new, feeds_back, samples)
        plan.rows.append(row)
        request.num_plans_in_flight += 1
        self._count_planned(plan, request, num_new, new_block_ids, samples)
        return row

    def _count_planned(
        self, plan: SchedulerOutput, request: Request, num_new: int, new_block_ids: list[int], samples: bool
    ) -> None:
        plan.num_scheduled_tokens += num_new
        request.num_computed_tokens += num_new
        if samples:
            request.num_pending += 1
        tenant = request.account
        tenant.num_held_blocks += len(new_block_ids)
        if request.num_charged_tokens < len(request.prompt_token_ids):
            charged = min(request.num_computed_tokens, len(request.prompt_token_ids))
            if charged > request.num_charged_tokens:
                num_new_tokens = charged - request.num_charged_tokens
                self._state.tenants.serve(tenant, num_new_tokens, self._state.config.prompt_token_charge)
                request.num_charged_tokens = charged

    def _preempt(self, draft: _Draft, preemption: Preemption) -> None:
        request = preemption.request
        self._take_out_of(draft, request)
        self._state.leave_running(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        if preemption.reason is not PreemptReason.PRIORITY:
            request.num_gave_way += 1
        self._state.stats.num_preemptions_by_reason[preemption.reason] += 1
        self._state.waiting.add(request)
        self._state.preempted.append(preemption)

    def _take_out_of(self, draft: _Draft, request: Request) -> None:
        """Undo a decode's part in the plan in the making, if it has one; prompts in it are never preempted."""
        rows = draft.plan.rows
        index = next((i for i, row in enumerate(rows) if row.request is request), None)
        if index is None:
            return
        row = rows.pop(index)
        draft.plan.num_scheduled_tokens -= row.num_scheduled_tokens
        request.num_plans_in_flight -= 1
        request.num_pending -= 1
