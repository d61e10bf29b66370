"""The whole engine core against plain models, on a shadow executor.

Tiny pools, blocks of 1 to 4 tokens and a vocabulary of two tokens, so that prefixes collide, blocks run out and
requests are preempted all the time; tenants of random policies, classes that age, deadlines, full queues; up to three
plans in flight whose results come late, from executors that fail and come back smaller. What each request generates is
compared with a naive scheduler that runs it alone (`ReferenceScheduler`), what each row reads with its own prefix
(`ShadowExecutor`), what tenants are charged with a ledger, what the cache is said to hold with what it holds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import floor

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.property.arrivals import CONFIGS, POLICIES, TENANTS, requests
from tests.property.ledger import CacheMirror, ChargeLedger
from tests.property.profiles import LONG
from tests.property.reference import Task
from tests.property.scheduler_invariants import REFERENCE, Expected, SchedulerInvariants
from tests.shadow_engine import WANTS_PROMPT_LOGPROBS, ShadowEngine, coin
from tokenloom.scheduler.core.plan import Preemption, PreemptReason, RequestOutput, SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request, RequestRefused
from tokenloom.scheduler.core.scheduler import SchedulerConfig, SchedulingPolicy
from tokenloom.scheduler.core.tenants import TenantPolicy


@dataclass(frozen=True)
class Before:
    """What ran and waited before a plan was made."""

    row_ids: dict[Request, int | None]
    num_running: Counter[str]
    num_held_blocks: Counter[str]
    waiting: list[Request]
    lacked_one_prompt_token: set[Request]


pytestmark = pytest.mark.timeout(1800)  # shrinking a failure takes minutes


class SchedulerMachine(SchedulerInvariants):
    """Arrivals, plans, results, failures and ends in any order."""

    @initialize(
        config=CONFIGS,
        num_blocks=st.integers(4, 20),
        depth=st.integers(1, 3),
        policies=st.dictionaries(st.sampled_from(TENANTS), POLICIES, max_size=3),
        has_mirror=st.booleans(),
    )
    def build(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        depth: int,
        policies: dict[str, TenantPolicy],
        has_mirror: bool,
    ) -> None:
        self.engine = ShadowEngine(config, num_blocks, depth=depth, next_token=coin)
        self.core = self.engine.core
        self.expected: dict[str, Expected] = {}
        self.policies: dict[str, TenantPolicy] = {}
        self.ledger = ChargeLedger()
        self.counters: dict[str, float] = {}
        self.untold: list[Request] = []
        self.num_preemptions = 0
        self.num_displaced = 0
        self.charged_early: set[Request] = set()
        self.mirror = CacheMirror(self.core.kv.pool) if has_mirror else None
        for name, policy in policies.items():
            self.set_policy(name, policy)

    # --- what happens -------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(TENANTS), policy=POLICIES)
    def set_policy(self, name: str, policy: TenantPolicy) -> None:
        self.core.set_tenant(name, policy)
        self.policies[name] = policy

    @rule(arrivals=st.lists(requests(), min_size=1, max_size=4), num_resumed=st.sampled_from([0, 0, 0, 1, 5]))
    def arrive(self, arrivals: list[Request], num_resumed: int) -> None:
        for request in arrivals:
            self.arrive_one(request, num_resumed)

    @rule(arrival=requests(), num_resumed=st.integers(0, 6), age_s=st.integers(0, 12))
    def arrive_again(self, arrival: Request, num_resumed: int, age_s: int) -> None:
        self.arrive_one(arrival, num_resumed, age_s)

    @rule(data=st.data())
    def arrive_again_under_the_old_name(self, data: st.DataObject) -> None:
        """The caller of a request that failed or was aborted submits it again with what it was told."""
        ended = [
            expected
            for name, expected in sorted(self.expected.items())
            if self.engine.finish_reasons.get(name) in (FinishReason.ERROR, FinishReason.ABORTED)
        ]
        if ended:
            expected = data.draw(st.sampled_from(ended))
            old, told = expected.request, self.engine.told[expected.request.request_id]
            request = Request(
                "",
                list(old.prompt_token_ids),
                expected.task.max_output_tokens,
                old.stop_token_ids,
                old.min_output_tokens,
                tenant=old.tenant,
                priority_class=old.priority_class,
                cache_salt=old.cache_salt,
            )
            self.arrive_one(request, len(told), int(self.engine.now_s - old.submitted_s))

    def arrive_one(self, request: Request, num_resumed: int, age_s: int | None = None) -> None:
        room = self.max_request_tokens() - request.num_prompt_tokens
        task = Task(
            tuple(request.prompt_token_ids),
            max(1, min(request.max_output_tokens, room)),
            request.stop_token_ids,
            request.min_output_tokens,
        )
        task = replace(task, resumed=REFERENCE.answer(task).token_ids[:-1][:num_resumed])
        request = replace(
            request,
            request_id=f"r{len(self.expected)}",
            token_ids=[],
            output_token_ids=list(task.resumed),
            reads_prefix_cache=request.payload != WANTS_PROMPT_LOGPROBS,
            submitted_s=self.engine.now_s - (age_s or 0),
            deadline_s=None if request.deadline_s is None else self.engine.now_s + request.deadline_s,
        )
        fits = self.has_place(request) or age_s is not None
        before = self.state_of_queue()
        waiting = list(self.core.waiting)
        added = self.add(request, is_resubmission=age_s is not None)
        if isinstance(added, RequestRefused):
            assert self.state_of_queue() == before, "a refusal changes nothing"
            assert added.is_overload == (room >= 1)
            assert room < 1 or age_s is None
            assert room < 1 or self.is_reason(added, request, fits)
            return
        assert room >= 1
        assert (added is None) == fits or self.has_own_lower(request, waiting)
        self.ledger.join(request, is_resubmission=age_s is not None)
        self.expected[request.request_id] = Expected(request, task)
        if added is not None:
            self.check_displaced(added, request, waiting)

    def add(self, request: Request, is_resubmission: bool) -> RequestOutput | RequestRefused | None:
        try:
            return self.engine.add(request, is_resubmission=is_resubmission)
        except RequestRefused as refused:
            return refused

    def has_place(self, request: Request) -> bool:
        config, waiting = self.core.config, list(self.core.waiting)
        num_tokens = sum(other.num_tokens for other in waiting) + request.num_tokens
        return not waiting or (len(waiting) < config.max_num_waiting and num_tokens <= config.max_num_waiting_tokens)

    def state_of_queue(self) -> list[object]:
        core = self.core
        return [core.num_requests, len(core.waiting), core.num_waiting_tokens, core.next_deadline_s, list(core.waiting)]

    def is_reason(self, refused: RequestRefused, request: Request, has_place: bool) -> bool:
        """The reason that is given is one that holds."""
        policy = self.policies.get(request.tenant, TenantPolicy())
        num_waiting = sum(other.tenant == request.tenant for other in self.core.waiting)
        if refused.reason == "TENANT_QUEUE_FULL":
            return policy.max_num_waiting is not None and num_waiting >= policy.max_num_waiting
        if refused.reason == "TOKEN_RATE":
            return policy.max_tokens_per_minute is not None and (refused.retry_after_s or 0.0) > 0.0
        return refused.reason == "QUEUE_FULL" and not has_place

    def check_displaced(self, displaced: RequestOutput, newcomer: Request, waiting: list[Request]) -> None:
        victim = displaced.request
        self.num_displaced += 1
        assert self.core.config.policy is SchedulingPolicy.FAIR
        assert displaced.finish_reason is FinishReason.ERROR
        assert isinstance(displaced.error, RequestRefused)
        assert displaced.error.is_overload
        assert victim in waiting
        assert not victim.is_resubmission
        assert self.engine.told[victim.request_id] == list(self.expected[victim.request_id].task.resumed)
        assert victim.current_class >= newcomer.current_class
        assert self.has_place_now(), "it makes room"
        if victim.tenant == newcomer.tenant:
            assert victim.current_class > newcomer.current_class, "only who is less urgent gives way within a tenant"
            return
        config = self.core.config
        names = {*(other.tenant for other in self.alive()), newcomer.tenant, victim.tenant}
        part = self.weight(victim.tenant) / sum(map(self.weight, names))
        own = [other for other in waiting if other.tenant == victim.tenant]
        num_tokens = sum(other.num_tokens for other in own)
        assert len(own) > part * config.max_num_waiting or num_tokens > part * config.max_num_waiting_tokens
        own = [other for other in waiting if other.tenant == newcomer.tenant]
        part = self.weight(newcomer.tenant) / sum(map(self.weight, names))
        assert len(own) + 1 <= max(1.0, part * config.max_num_waiting), "who has his share displaces nobody"

    def has_own_lower(self, newcomer: Request, waiting: list[Request]) -> bool:
        """A request of the same tenant waits that may give way to a more urgent one at the tenant's own limit."""
        limit = self.policies.get(newcomer.tenant, TenantPolicy()).max_num_waiting
        own = [other for other in waiting if other.tenant == newcomer.tenant]
        return limit is not None and any(other.current_class > newcomer.current_class for other in own)

    def has_place_now(self) -> bool:
        config = self.core.config
        return len(self.core.waiting) <= config.max_num_waiting and (
            len(self.core.waiting) == 1 or self.core.num_waiting_tokens <= config.max_num_waiting_tokens
        )

    def weight(self, tenant: str) -> float:
        return self.policies.get(tenant, TenantPolicy()).weight

    @rule()
    def plan(self) -> None:
        self.plan_once()

    @rule()
    def release_rows(self) -> None:
        is_idle = not self.core.plans_in_flight
        plan = self.engine.release_rows()
        assert plan is None or (is_idle and plan.finished_row_ids and not plan.rows)
        self.tell_preempted(plan)

    @rule()
    def execute(self) -> None:
        self.engine.execute()

    @rule()
    def apply(self) -> None:
        self.ledger.told(self.engine.apply())

    @rule(num_steps=st.integers(1, 12), passed_s=st.integers(0, 1))
    def go_on(self, num_steps: int, passed_s: int) -> None:
        for step in range(num_steps):
            if step % 3 == 0:
                self.pass_time(passed_s)
            while self.plan_once():
                pass
            self.apply()
            self.requests_are_counted()
            self.tables_share_equal_prefixes_only()

    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORTED, FinishReason.STOP_STRING]))
    def finish_one(self, data: st.DataObject, reason: FinishReason) -> None:
        if self.expected:
            self.engine.finish(data.draw(st.sampled_from(sorted(self.expected))), reason)

    @rule(kind=st.sampled_from(["time", "row", "step", "flush"]), data=st.data())
    def disturb(self, kind: str, data: st.DataObject) -> None:
        if kind == "time":
            self.pass_time(data.draw(st.sampled_from([1, 2, 3, 10])))
        elif kind == "row" and self.core.running:
            self.engine.executor.failing_request_ids.add(data.draw(st.sampled_from(self.core.running)).request_id)
        elif kind == "step" and self.engine.executor.plans:
            self.engine.executor.fails_next_step = True
        elif kind == "flush":
            self.core.kv.pool.flush()

    @rule(num_blocks=st.integers(2, 20), config=CONFIGS, takes_new_config=st.booleans(), has_mirror=st.booleans())
    def lose_executor(self, num_blocks: int, config: SchedulerConfig, takes_new_config: bool, has_mirror: bool) -> None:
        """It comes back empty, with other limits; settings of the scheduler itself stay."""
        old = self.core.config
        new = replace(
            old, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
        )  # fmt: skip
        alive = [self.expected[request.request_id] for request in self.alive()]
        news = self.engine.lose_executor(num_blocks, new if takes_new_config else None)
        room = self.max_request_tokens()
        no_longer_fit = [expected for expected in alive if expected.request.num_tokens >= room]
        assert {told.request.request_id for told in news} == {lost.request.request_id for lost in no_longer_fit}
        for expected in alive:
            if expected not in no_longer_fit:
                room_for_output = room - expected.request.num_prompt_tokens
                shorter = min(expected.task.max_output_tokens, room_for_output)
                expected.task = replace(expected.task, max_output_tokens=shorter)
        self.mirror = CacheMirror(self.core.kv.pool) if has_mirror else None

    @rule(is_patient=st.booleans(), num_blocks=st.integers(2, 20))
    def executor_drains(self, is_patient: bool, num_blocks: int) -> None:
        """It says that it is about to stop: nothing new begins, and all that runs ends in a bounded number of steps."""
        self.engine.is_executor_draining = True
        running = {request.request_id for request in self.core.running}
        limit = 20 + 3 * sum(request.num_tokens + request.max_output_tokens for request in self.core.running)
        while self.core.running and (is_patient or limit % 4):
            assert limit > 0, "what runs does not end"
            limit -= 1
            while self.plan_once():
                pass
            assert {request.request_id for request in self.core.running} <= running, "nothing new begins"
            self.apply()
        if is_patient:
            while self.core.plans_in_flight:
                self.apply()
            assert self.engine.plan() is None
        num_suspects = len(self.core.suspects)
        self.lose_executor(num_blocks, self.core.config, takes_new_config=False, has_mirror=self.mirror is not None)
        assert len(self.core.suspects) <= num_suspects, "nobody is to blame"

    @precondition(lambda self: self.mirror is not None)
    @rule()
    def stop_events(self) -> None:
        self.core.kv.pool.stop_events()
        assert self.core.kv.pool.take_events() is None
        self.mirror = None

    def pass_time(self, passed_s: int) -> None:
        due = {r.request_id for r in self.alive() if (r.deadline_s or 1e9) <= self.engine.now_s + passed_s}
        news = self.engine.pass_time(passed_s)
        assert {told.request.request_id for told in news} == due
        assert all(told.finish_reason is FinishReason.DEADLINE for told in news)

    def teardown(self) -> None:
        """Every request ends, in a bounded number of steps though the clock stands still, and gives everything back."""
        if not hasattr(self, "engine"):
            return
        # Each alone in the engine, a token per step, every token computed three times.
        limit = 20 + 3 * sum(
            request.num_tokens + request.max_output_tokens - len(request.output_token_ids) for request in self.alive()
        )
        while self.core.num_requests:
            assert limit > 0, "requests do not end"
            limit -= 1
            while self.plan_once():
                pass
            self.apply()
        while self.core.plans_in_flight:
            self.apply()
        self.engine.release_rows()
        self.engine.apply()
        assert self.engine.executor.num_rows == 0
        assert not self.core.running
        assert not self.core.waiting
        assert self.core.num_waiting_tokens == 0
        assert self.core.next_deadline_s is None
        assert self.core.kv.pool.num_held_blocks == 0
        assert not self.core.kv._computing
        self.readers_hear_what_each_request_generates_alone()
        self.tenants_are_counted_and_charged()
        assert self.engine.finish_reasons.keys() == self.expected.keys()

    # --- what holds for a plan ----------------------------------------------------------------------------------

    def max_request_tokens(self) -> int:
        config = self.core.config
        return min(config.max_model_len, (self.core.kv.pool.num_blocks - 1) * config.block_size)

    def plan_once(self) -> bool:
        """Make a plan if one more may be in flight, and check it; returns whether there was one."""
        if len(self.core.plans_in_flight) >= self.engine.depth:
            return False
        running = list(self.core.running)
        held: Counter[str] = Counter()
        for request in running:
            held[request.tenant] += len(request.block_ids)
        before = Before(
            {request: request.row_id for request in running},
            Counter(request.tenant for request in running),
            held,
            list(self.core.waiting),
            {
                request
                for request in running
                if request.num_lacking_tokens == 1 and request.num_computed_tokens < request.num_prompt_tokens
            },
        )
        plan = self.engine.plan()
        victims = [request for request, row_id in before.row_ids.items() if request.row_id != row_id]
        self.num_preemptions += len(victims)
        self.charged_early |= before.lacked_one_prompt_token & set(victims)
        self.untold += sorted(victims, key=lambda request: request.request_id)
        if plan is None:
            assert self.core.plans_in_flight or not self.core.num_requests, "nothing runs, nothing is planned"
            return False
        preemptions = self.tell_preempted(plan)
        self.check_limits(plan, before)
        self.check_rows(plan)
        for preemption in preemptions:
            if preemption.request in victims:
                self.check_preemption(preemption, plan, before, victims)
        self.ledger.planned(plan)
        return True

    def tell_preempted(self, plan: SchedulerOutput | None) -> list[Preemption]:
        """Each preemption stands in exactly one plan."""
        if plan is None:
            return []
        told = sorted((preemption.request for preemption in plan.preempted), key=lambda request: request.request_id)
        assert told == sorted(self.untold, key=lambda request: request.request_id)
        self.untold.clear()
        return plan.preempted

    def check_limits(self, plan: SchedulerOutput, before: Before) -> None:
        config = self.core.config
        assert plan is self.core.plans_in_flight[-1]
        assert plan.num_scheduled_tokens == sum(row.num_scheduled_tokens for row in plan.rows)
        assert 1 <= plan.num_scheduled_tokens <= config.max_num_batched_tokens
        assert len(self.core.running) <= max(config.max_num_seqs, 0)
        assert len({row.request.request_id for row in plan.rows}) == len(plan.rows) <= config.max_num_seqs
        running = Counter(request.tenant for request in self.core.running)
        for tenant, policy in self.policies.items():
            if policy.max_num_running is not None:
                assert running[tenant] <= max(policy.max_num_running, before.num_running[tenant])
                admitted = sum(row.is_new and row.request.tenant == tenant for row in plan.rows)
                assert not admitted or running[tenant] <= policy.max_num_running

    def check_rows(self, plan: SchedulerOutput) -> None:
        block_size, config, now_s = self.core.config.block_size, self.core.config, self.engine.now_s
        earlier = [row.request for sent in list(self.core.plans_in_flight)[:-1] for row in sent.rows]
        for row in plan.rows:
            request = row.request
            assert row.num_scheduled_tokens >= 1
            assert not request.is_finished
            assert request.row_id == row.row_id
            assert request.deadline_s is None or request.deadline_s > now_s, "expired requests never reach a step"
            assert not (row.is_new and request in earlier), "rule 2"
            num_sampled = len(request.output_token_ids) + request.num_pending
            assert num_sampled <= request.max_output_tokens, "rule 5"
            if row.is_new:
                assert row.num_computed_tokens % block_size == 0
                assert row.num_computed_tokens == 0 or request.reads_prefix_cache, "rule 7"
            if config.policy is SchedulingPolicy.FAIR:
                last_class = config.num_priority_classes - 1
                risen = floor((now_s - request.submitted_s) / config.ageing_s) if config.ageing_s else 0
                assert request.current_class == max(0, min(request.priority_class, last_class) - risen)

    def check_preemption(
        self, preemption: Preemption, plan: SchedulerOutput, before: Before, victims: list[Request]
    ) -> None:
        """Why it was this request and no other; of one that was preempted while this plan was made."""
        victim, reason = preemption.request, preemption.reason
        admitted = [row.request for row in plan.rows if row.is_new]
        is_fair = self.core.config.policy is SchedulingPolicy.FAIR
        assert is_fair or reason is PreemptReason.BLOCKS
        # For blocks it may be: what it computed beside another one is shared with that one when it comes back.
        assert victim not in admitted or reason is PreemptReason.BLOCKS, "sent away and taken back in one plan"
        beneficiaries = [row.request for row in plan.rows]
        if reason is PreemptReason.PRIORITY:
            assert any(request.current_class < victim.current_class for request in admitted)
        if reason is not PreemptReason.PRIORITY and is_fair:
            assert min(request.current_class for request in beneficiaries) <= victim.current_class
        if reason is PreemptReason.SHARE:
            assert any(
                request.tenant != victim.tenant and request.current_class == victim.current_class
                for request in admitted
            )
            assert self.was_over_share(victim.tenant, before, admitted), "only who holds more than his share gives way"

    def was_over_share(self, tenant: str, before: Before, admitted: list[Request]) -> bool:
        names = {request.tenant for request in (*before.row_ids, *before.waiting)}
        part = self.weight(tenant) / sum(self.weight(name) for name in names)
        came = [request for request in admitted if request.tenant == tenant]
        num_rows = before.num_running[tenant] + len(came)
        # A running request takes at most a block more before others are let in.
        grown = before.num_held_blocks[tenant] + before.num_running[tenant]
        num_blocks = grown + sum(len(request.block_ids) for request in came)
        has_more_rows = num_rows > part * self.core.config.max_num_seqs
        return has_more_rows or num_blocks > part * (self.core.kv.pool.num_blocks - 1)


def test_requests_get_their_own_tokens_within_all_limits_whatever_happens() -> None:
    run_state_machine_as_test(SchedulerMachine)


@pytest.mark.slow
def test_requests_get_their_own_tokens_within_all_limits_whatever_happens_for_long() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=LONG)
