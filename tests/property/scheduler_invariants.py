"""What always holds of the engine core, after whatever happened to it; checked by the machine after every rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis.stateful import RuleBasedStateMachine, invariant

from tests.property.ledger import CacheMirror, ChargeLedger, block_names
from tests.property.reference import Answer, ReferenceScheduler, Task
from tests.shadow_engine import WANTS_PROMPT_LOGPROBS, ShadowEngine, coin
from tokenloom.scheduler.core.request import FinishReason, Request, RequestStatus
from tokenloom.scheduler.core.scheduler import Scheduler

BY_ITSELF = (FinishReason.STOP_TOKEN, FinishReason.LENGTH)
REFERENCE = ReferenceScheduler(coin)


@dataclass
class Expected:
    """What the machine knows of a request without asking the core."""

    request: Request
    task: Task

    def answer(self) -> Answer:
        """All that the request generates if nobody ends it."""
        return REFERENCE.answer(self.task)


class SchedulerInvariants(RuleBasedStateMachine):
    """The invariants; a machine sets the attributes and moves the core."""

    engine: ShadowEngine
    core: Scheduler
    expected: dict[str, Expected]
    ledger: ChargeLedger
    counters: dict[str, float]
    num_preemptions: int
    num_displaced: int
    charged_early: set[Request]
    mirror: CacheMirror | None

    def alive(self) -> Iterable[Request]:
        return (expected.request for expected in self.expected.values() if not expected.request.is_finished)

    @invariant()
    def requests_are_counted(self) -> None:
        rows = [row for plan in self.core.plans_in_flight for row in plan.rows]
        waiting, running = list(self.core.waiting), self.core.running
        assert len(self.core.plans_in_flight) <= self.engine.depth
        assert len(waiting) == len(self.core.waiting) == len(set(waiting))
        assert running == sorted(running, key=lambda request: (request.current_class, request.arrival))
        assert self.core.num_requests == len(running) + len(waiting)
        assert self.core.num_waiting_tokens == sum(request.num_tokens for request in waiting)
        assert sum(self.core.count_waiting().values()) == len(waiting)
        for expected in self.expected.values():
            request = expected.request
            assert (request.request_id in self.engine.finish_reasons) == request.is_finished
            if request.is_finished:
                continue
            assert (request in running) == (request.status is RequestStatus.RUNNING)
            assert (request in waiting) == (request.status is RequestStatus.WAITING)
            own = [row for row in rows if row.request is request]
            assert request.num_plans_in_flight == len(own)
            assert request.num_pending == sum(row.samples for row in own)
            assert request.num_confirmed_tokens <= request.num_computed_tokens
            assert request.num_computed_tokens <= request.num_tokens + request.num_pending
            assert len(request.block_ids) == -(-request.num_computed_tokens // self.core.config.block_size)

    @invariant()
    def tenants_are_counted_and_charged(self) -> None:
        core = self.core
        running = Counter(request.tenant for request in core.running)
        waiting = Counter(request.tenant for request in core.waiting)
        assert {request.tenant for request in self.alive()} <= core.tenants.keys()
        for name, tenant in core.tenants.items():
            assert tenant.name == name
            assert (tenant.num_running, tenant.num_waiting) == (running[name], waiting[name])
            held = sum(len(request.block_ids) for request in core.running if request.tenant == name)
            assert tenant.num_held_blocks == held
            early = sum(request.tenant == name for request in self.charged_early)
            assert 0 <= tenant.num_served_tokens - self.ledger.num_tokens(name) <= early
            assert tenant.counter >= self.counters.get(name, 0.0), "counters only rise"
            self.counters[name] = tenant.counter
        stats = core.stats
        assert stats.num_preemptions == sum(stats.num_preemptions_by_reason.values()) == self.num_preemptions
        assert stats.num_computed_tokens == self.ledger.num_computed_tokens
        assert stats.num_displaced == self.num_displaced

    @invariant()
    def tables_share_equal_prefixes_only(self) -> None:
        pool, block_size = self.core.kv.pool, self.core.config.block_size
        counts: Counter[int] = Counter()
        prefix_in: dict[int, tuple[str, list[int]]] = {}
        for request in self.core.running:
            counts.update(request.block_ids)
            for i, block_id in enumerate(request.block_ids):
                prefix = (request.cache_salt, request.token_ids[: (i + 1) * block_size])
                assert prefix_in.setdefault(block_id, prefix) == prefix
                assert counts[block_id] == 1 or len(prefix[1]) == (i + 1) * block_size, "a partial block is shared"
        assert 0 not in counts, "the null block is in a table"
        assert all(pool.ref_count(block_id) == counts[block_id] for block_id in range(pool.num_blocks))
        assert pool.num_held_blocks == len(counts)
        assert pool.num_held_blocks + pool.num_free_blocks == pool.num_blocks - 1
        assert all(not request.block_ids for request in self.core.waiting)

    @invariant()
    def named_blocks_hold_what_their_name_says(self) -> None:
        named = dict(self.core.kv.pool.snapshot())
        for expected in self.expected.values():
            if not named:
                return
            request = expected.request
            block_size = self.core.config.block_size
            for i, (name, parent) in enumerate(
                block_names(request.cache_salt, tuple(request.token_ids), block_size), start=1
            ):
                if named.pop(name, parent) != parent:
                    raise AssertionError("a block was told with the wrong parent")
                block_id = self.core.kv.pool.find(name)
                if block_id is not None:
                    prefix = request.token_ids[: i * block_size]
                    assert self.engine.executor.holds(block_id, request.cache_salt, prefix)
        assert not named, "a block has a name that no request has"

    @invariant()
    def events_tell_what_the_cache_holds(self) -> None:
        if self.mirror is not None:
            self.mirror.follow()

    @invariant()
    def readers_hear_what_each_request_generates_alone(self) -> None:
        for request_id, expected in self.expected.items():
            told = self.engine.told[request_id]
            answer = expected.answer()
            assert tuple(told) == answer.token_ids[: len(told)]
            assert told == expected.request.output_token_ids
            positions = self.engine.told_prompt_positions[request_id]
            assert positions == list(range(1, len(positions) + 1))
            reason = self.engine.finish_reasons.get(request_id)
            if reason in BY_ITSELF:
                assert Answer(tuple(told), reason) == answer
                if expected.request.payload == WANTS_PROMPT_LOGPROBS:
                    assert len(positions) == expected.request.num_prompt_tokens - 1
