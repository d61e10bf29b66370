"""The whole engine core against plain models, on a shadow executor.

Tiny pools, blocks of 1 to 4 tokens and a vocabulary of two tokens, so that prefixes collide, blocks run out and
requests are preempted all the time; up to three plans in flight whose results come late. What each request generates is
compared with the same request served alone, and what each row reads with its own prefix (`ShadowExecutor`).
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.property.profiles import LONG
from tests.shadow_engine import WANTS_PROMPT_LOGPROBS, ShadowEngine, coin, generate_alone
from tokenloom.scheduler.core.plan import SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request, RequestRefused, RequestStatus
from tokenloom.scheduler.core.scheduler import SchedulerConfig
from tokenloom.scheduler.core.waiting_queue import order_of

# Few different prompts with long common prefixes.
PROMPTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
    st.integers(1, 14).map(lambda n: [0] * n),
    st.tuples(st.integers(1, 6), st.integers(0, 3)).map(lambda n: [0, 1] * n[0] + [1] * n[1]),
)
CONFIGS = st.builds(
    SchedulerConfig,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([1, 2, 3, 5, 8, 12, 20]),
    max_num_waiting=st.integers(2, 12),
    max_model_len=st.integers(8, 60),
    block_size=st.integers(1, 4),
)
BY_ITSELF = (FinishReason.STOP_TOKEN, FinishReason.LENGTH)


def block_names(salt: str, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Names of the full blocks of these tokens, by the text of the scheme."""
    salt_bytes = salt.encode()
    parent = hashlib.sha256(b"tokenloom/1" + struct.pack("<I", len(salt_bytes)) + salt_bytes + struct.pack("<I", 0))
    names = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = struct.pack(f"<{block_size}I", *token_ids[start : start + block_size])
        parent = hashlib.sha256(parent.digest() + block)
        names.append(parent.digest())
    return names


@dataclass
class Expected:
    """What the machine knows of a request without asking the core."""

    request: Request
    resumed: list[int]
    max_output_tokens: int

    def output(self) -> list[int]:
        """All that the request generates if nobody ends it."""
        return alone(self.request, self.max_output_tokens, self.resumed)

    def ends_with_stop_token(self) -> bool:
        """A stop token ends it, perhaps as the last token that fits."""
        output, request = self.output(), self.request
        return output[-1] in request.stop_token_ids and len(output) >= request.min_output_tokens


def alone(request: Request, max_output_tokens: int, resumed: Sequence[int] = ()) -> list[int]:
    """What the request generates, one token after the other, nobody else there."""
    return generate_alone(
        request.prompt_token_ids,
        max_output_tokens,
        next_token=coin,
        stop_token_ids=request.stop_token_ids,
        min_output_tokens=request.min_output_tokens,
        resumed=resumed,
    )


def requests() -> st.SearchStrategy[Request]:
    """Requests without a name; the machine names them and turns deadlines into times."""
    return st.builds(
        Request,
        request_id=st.just(""),
        prompt_token_ids=PROMPTS,
        max_output_tokens=st.integers(1, 16),
        stop_token_ids=st.sampled_from([frozenset[int](), frozenset[int](), frozenset({0}), frozenset({1})]),
        min_output_tokens=st.integers(0, 8),
        priority_class=st.integers(0, 2),
        cache_salt=st.sampled_from(["", "", "", "blue"]),
        deadline_s=st.sampled_from([None, None, None, None, 3.0]),
        payload=st.sampled_from([None, None, None, None, WANTS_PROMPT_LOGPROBS]),
    )


pytestmark = pytest.mark.timeout(1800)  # shrinking a failure takes minutes


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, plans, results, failures and ends in any order."""

    @initialize(config=CONFIGS, num_blocks=st.integers(4, 20), depth=st.integers(1, 3))
    def build(self, config: SchedulerConfig, num_blocks: int, depth: int) -> None:
        self.engine = ShadowEngine(config, num_blocks, depth=depth, next_token=coin)
        self.core = self.engine.core
        self.block_size = config.block_size
        self.expected: dict[str, Expected] = {}
        self.now_s = 0.0
        self.had_no_plan = False

    # --- what happens -------------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(requests(), min_size=1, max_size=4), num_resumed=st.sampled_from([0, 0, 0, 1, 5]))
    def arrive(self, arrivals: list[Request], num_resumed: int) -> None:
        for request in arrivals:
            self.arrive_one(request, num_resumed)

    def arrive_one(self, request: Request, num_resumed: int) -> None:
        room = self.max_request_tokens() - request.num_prompt_tokens
        max_output_tokens = min(request.max_output_tokens, room)
        resumed = alone(request, max_output_tokens)[:-1][:num_resumed]
        request = replace(
            request,
            request_id=f"r{len(self.expected)}",
            output_token_ids=list(resumed),
            reads_prefix_cache=request.payload != WANTS_PROMPT_LOGPROBS,
            deadline_s=None if request.deadline_s is None else self.now_s + request.deadline_s,
        )
        is_full = len(self.core.waiting) >= self.core.config.max_num_waiting
        if room < 1 or is_full:
            with pytest.raises(RequestRefused) as refused:
                self.engine.add(request)
            assert refused.value.is_overload == (room >= 1)
        else:
            self.engine.add(request)
            self.expected[request.request_id] = Expected(request, resumed, max_output_tokens)

    @rule()
    def plan(self) -> None:
        self.check_plan(self.engine.plan())

    @rule()
    def release_rows(self) -> None:
        is_idle = not self.core.plans_in_flight
        plan = self.engine.release_rows()
        assert plan is None or (is_idle and plan.finished_row_ids and not plan.rows)

    @rule()
    def execute(self) -> None:
        self.engine.execute()

    @rule()
    def apply(self) -> None:
        self.engine.apply()

    @rule(num_steps=st.integers(1, 12), passed_s=st.integers(0, 1))
    def go_on(self, num_steps: int, passed_s: int) -> None:
        self.pass_time(passed_s)
        for _ in range(num_steps):
            while self.check_plan(self.engine.plan()):
                pass
            self.engine.apply()
            self.requests_are_counted()
            self.tables_share_equal_prefixes_only()

    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORTED, FinishReason.STOP_STRING]))
    def finish_one(self, data: st.DataObject, reason: FinishReason) -> None:
        if self.expected:
            self.engine.finish(data.draw(st.sampled_from(sorted(self.expected))), reason)

    @rule(kind=st.sampled_from(["time", "row", "step", "flush", "executor"]), data=st.data())
    def disturb(self, kind: str, data: st.DataObject) -> None:
        if kind == "time":
            self.pass_time(data.draw(st.integers(0, 2)))
        elif kind == "row" and self.core.running:
            self.engine.executor.failing_request_ids.add(data.draw(st.sampled_from(self.core.running)).request_id)
        elif kind == "step" and self.engine.executor.plans:
            self.engine.executor.fails_next_step = True
        elif kind == "flush":
            self.core.kv.pool.flush()
        elif kind == "executor":
            self.lose_executor(data.draw(st.integers(2, 20)))

    def pass_time(self, passed_s: int) -> None:
        self.now_s += passed_s
        next_deadline_s = self.core.next_deadline_s
        news = self.core.expire(self.now_s)
        assert bool(news) == (next_deadline_s is not None and next_deadline_s <= self.now_s)
        assert all(told.finish_reason is FinishReason.DEADLINE for told in news)
        self.engine.hear(news)

    def lose_executor(self, num_blocks: int) -> None:
        alive = [expected for expected in self.expected.values() if not expected.request.is_finished]
        news = self.engine.lose_executor(num_blocks)
        room = self.max_request_tokens()
        no_longer_fit = [expected for expected in alive if expected.request.num_tokens >= room]
        assert {told.request.request_id for told in news} == {lost.request.request_id for lost in no_longer_fit}
        for expected in alive:
            if expected not in no_longer_fit:
                room_for_output = room - expected.request.num_prompt_tokens
                expected.max_output_tokens = min(expected.max_output_tokens, room_for_output)

    def teardown(self) -> None:
        """Every request ends, in a bounded number of steps, and gives everything back."""
        if not hasattr(self, "engine"):
            return
        self.engine.run_until_idle()
        self.engine.release_rows()
        self.engine.apply()
        assert self.engine.executor.num_rows == 0
        assert not self.core.running
        assert not self.core.waiting
        assert self.core.kv.pool.num_held_blocks == 0
        assert not self.core.kv._computing
        self.readers_hear_what_each_request_generates_alone()
        assert self.engine.finish_reasons.keys() == self.expected.keys()

    # --- what holds ---------------------------------------------------------------------------------------------

    def max_request_tokens(self) -> int:
        return min(self.core.config.max_model_len, (self.core.kv.pool.num_blocks - 1) * self.block_size)

    def check_plan(self, plan: SchedulerOutput | None) -> bool:
        """The limits of one plan; returns whether there was one."""
        config = self.core.config
        if plan is None:
            assert self.core.plans_in_flight or not self.core.num_requests, "nothing runs, nothing is planned"
            self.had_no_plan = True
            return False
        assert plan is self.core.plans_in_flight[-1]
        assert plan.num_scheduled_tokens == sum(row.num_scheduled_tokens for row in plan.rows)
        assert 1 <= plan.num_scheduled_tokens <= config.max_num_batched_tokens
        assert len(self.core.running) <= config.max_num_seqs
        assert len({row.request.request_id for row in plan.rows}) == len(plan.rows) <= config.max_num_seqs
        earlier = [row.request for sent in list(self.core.plans_in_flight)[:-1] for row in sent.rows]
        for row in plan.rows:
            request = row.request
            assert row.num_scheduled_tokens >= 1
            assert not request.is_finished
            assert request.row_id == row.row_id
            assert not (row.is_new and request in earlier), "rule 2"
            num_sampled = len(request.output_token_ids) + request.num_pending
            assert num_sampled <= request.max_output_tokens, "rule 5"
            if row.is_new:
                assert row.num_computed_tokens % self.block_size == 0
                assert row.num_computed_tokens == 0 or request.reads_prefix_cache, "rule 7"
            for victim in plan.preempted if not self.had_no_plan else ():
                assert order_of(request) < order_of(victim), "the one that shall run last is preempted first"
        self.had_no_plan = False
        return True

    @invariant()
    def requests_are_counted(self) -> None:
        rows = [row for plan in self.core.plans_in_flight for row in plan.rows]
        assert len(self.core.plans_in_flight) <= self.engine.depth
        assert self.core.running == sorted(self.core.running, key=order_of)
        assert list(self.core.waiting) == sorted(self.core.waiting, key=order_of)
        assert self.core.num_requests == len(self.core.running) + len(self.core.waiting)
        for expected in self.expected.values():
            request = expected.request
            assert (request.request_id in self.engine.finish_reasons) == request.is_finished
            if request.is_finished:
                continue
            assert (request in self.core.running) == (request.status is RequestStatus.RUNNING)
            own = [row for row in rows if row.request is request]
            assert request.num_plans_in_flight == len(own)
            assert request.num_pending == sum(row.samples for row in own)
            assert request.num_confirmed_tokens <= request.num_computed_tokens
            assert request.num_computed_tokens <= request.num_tokens + request.num_pending
            assert len(request.block_ids) == -(-request.num_computed_tokens // self.block_size)

    @invariant()
    def tables_share_equal_prefixes_only(self) -> None:
        pool = self.core.kv.pool
        counts: Counter[int] = Counter()
        prefix_in: dict[int, tuple[str, list[int]]] = {}
        for request in self.core.running:
            counts.update(request.block_ids)
            for i, block_id in enumerate(request.block_ids):
                prefix = (request.cache_salt, request.token_ids[: (i + 1) * self.block_size])
                assert prefix_in.setdefault(block_id, prefix) == prefix
                assert counts[block_id] == 1 or len(prefix[1]) == (i + 1) * self.block_size, "a partial block is shared"
        assert all(pool.ref_count(block_id) == counts[block_id] for block_id in range(pool.num_blocks))
        assert pool.num_held_blocks == len(counts)
        assert all(not request.block_ids for request in self.core.waiting)

    @invariant()
    def named_blocks_hold_what_their_name_says(self) -> None:
        for expected in self.expected.values():
            request = expected.request
            for i, name in enumerate(block_names(request.cache_salt, request.token_ids, self.block_size), start=1):
                block_id = self.core.kv.pool.find(name)
                if block_id is not None:
                    prefix = request.token_ids[: i * self.block_size]
                    assert self.engine.executor.holds(block_id, request.cache_salt, prefix)

    @invariant()
    def readers_hear_what_each_request_generates_alone(self) -> None:
        for request_id, expected in self.expected.items():
            told = self.engine.told[request_id]
            whole = expected.output()
            assert told == whole[: len(told)]
            assert told == expected.request.output_token_ids
            positions = self.engine.told_prompt_positions[request_id]
            assert positions == list(range(1, len(positions) + 1))
            reason = self.engine.finish_reasons.get(request_id)
            if reason in BY_ITSELF:
                assert told == whole
                assert (reason is FinishReason.STOP_TOKEN) == expected.ends_with_stop_token()
                if expected.request.payload == WANTS_PROMPT_LOGPROBS:
                    assert len(positions) == expected.request.num_prompt_tokens - 1


def test_requests_get_their_own_tokens_within_all_limits_whatever_happens() -> None:
    run_state_machine_as_test(SchedulerMachine)


@pytest.mark.slow
def test_requests_get_their_own_tokens_within_all_limits_whatever_happens_for_long() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=LONG)
