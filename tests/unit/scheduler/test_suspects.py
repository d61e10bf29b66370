"""A request that kills the executor is found and ends alone; its neighbours go on; kills from outside fail nobody."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.shadow_engine import ShadowEngine
from tokenloom.scheduler.core.plan import RequestOutput, ScheduledRow, SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request
from tokenloom.scheduler.core.scheduler import SchedulerConfig
from tokenloom.scheduler.core.suspects import (
    MIN_CRASHES,
    MIN_CRASHES_ALONE,
    MIN_FAILED_STEPS_ALONE,
    ExecutorCrash,
    Suspects,
    Suspicion,
)
from tokenloom.scheduler.core.tenants import TenantPolicy


@dataclass
class FragileEngine:
    """An engine whose executor dies of some requests, whenever they compute a certain position or any at all.

    Args:
        deadly: position by request id; None: any.
        only_fails_steps: the executor lives and reports a failed step.
    """

    engine: ShadowEngine
    deadly: dict[str, int | None]
    only_fails_steps: bool = False
    num_blocks: int = 600
    num_crashes: int = 0
    ends: list[RequestOutput] = field(default_factory=list)
    trials: list[list[str]] = field(default_factory=list)

    def step(self) -> None:
        core = self.engine.core
        while (plan := self.engine.plan()) is not None:
            if plan.is_trial:
                assert len(core.plans_in_flight) == 1, "a trial is alone in flight"
                self.trials.append([row.request.request_id for row in plan.rows])
        if core.plans_in_flight and self.is_deadly(core.plans_in_flight[0]):
            self.num_crashes += 1
            if not self.only_fails_steps:
                self.ends += self.engine.lose_executor(self.num_blocks)
                return
            self.engine.executor.fails_next_step = True
        self.ends += [told for told in self.engine.apply() if told.error is not None]

    def is_deadly(self, plan: SchedulerOutput) -> bool:
        return any(self.is_deadly_row(row) for row in plan.rows if not row.request.is_row_void)

    def is_deadly_row(self, row: ScheduledRow) -> bool:
        if row.request.request_id not in self.deadly:
            return False
        position = self.deadly[row.request.request_id]
        return position is None or 0 <= position - row.num_computed_tokens < row.num_scheduled_tokens

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.engine.core.num_requests:
                return
            self.step()
        raise AssertionError("requests do not end")


def fragile(
    deadly: dict[str, int | None],
    *,
    depth: int = 2,
    num_blocks: int = 600,
    only_fails_steps: bool = False,
    budget: int = 256,
    max_num_seqs: int = 64,
) -> FragileEngine:
    config = SchedulerConfig(block_size=4, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    engine = ShadowEngine(config, num_blocks, depth=depth)
    return FragileEngine(engine, deadly, only_fails_steps, num_blocks)


def prompt_of(number: int, num_tokens: int = 5) -> list[int]:
    return list(range(1000 * number, 1000 * number + num_tokens))


def add(engine: ShadowEngine, number: int, num_output: int = 6, num_tokens: int = 5, **fields: object) -> Request:
    request = Request(str(number), prompt_of(number, num_tokens), num_output, **fields)  # type: ignore[arg-type]
    engine.add(request)
    return request


def expected(number: int, num_output: int = 6, num_tokens: int = 5) -> list[int]:
    return [1000 * number + num_tokens + i for i in range(num_output)]


def assert_only_fail(engine: FragileEngine, failing: Sequence[int], numbers: Sequence[int]) -> None:
    for number in numbers:
        if number in failing:
            assert engine.engine.finish_reasons[str(number)] is FinishReason.ERROR
        else:
            assert engine.engine.told[str(number)] == expected(number), f"neighbour {number} got all its tokens"
    assert [told.request.request_id for told in engine.ends] == [str(number) for number in failing]
    core = engine.engine.core
    assert len(core.suspects) == 0
    assert core.stats.num_quarantined == len(failing)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("position", [None, 0, 3, 4, 7], ids=["any", "first", "prefill", "first token", "decode"])
def test_the_deadly_one_of_64_fails_alone_and_is_found_by_halving(depth: int, position: int | None) -> None:
    engine = fragile({"37": position}, depth=depth)
    for number in range(64):
        add(engine.engine, number)
    engine.run()
    assert_only_fail(engine, [37], range(64))
    # One more where the first crash met a decode that the second one, recomputing, does not reach again.
    assert engine.num_crashes <= 4 + math.log2(64) + 1
    assert isinstance(engine.ends[0].error, ExecutorCrash)
    assert engine.ends[0].error.num_crashes >= MIN_CRASHES


@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 16, 64])
def test_number_of_crashes_that_finding_takes(num_requests: int) -> None:
    engine = fragile({"0": 3})
    for number in range(num_requests):
        add(engine.engine, number)
    engine.run()
    assert_only_fail(engine, [0], range(num_requests))
    assert engine.num_crashes == max(MIN_CRASHES, 4 + math.ceil(math.log2(num_requests)))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_two_deadly_ones_fail_and_nobody_else(depth: int) -> None:
    engine = fragile({"5": 3, "44": 8}, depth=depth)
    for number in range(64):
        add(engine.engine, number)
    engine.run()
    assert_only_fail(engine, [int(told.request.request_id) for told in engine.ends], range(64))
    assert {told.request.request_id for told in engine.ends} == {"5", "44"}


def test_a_deadly_prompt_of_many_chunks_is_found_though_its_first_chunks_succeed() -> None:
    engine = fragile({"0": 150}, budget=32)
    add(engine.engine, 0, num_tokens=200)
    for number in range(1, 9):
        add(engine.engine, number)
    engine.run()
    assert_only_fail(engine, [0], range(9))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_requests", [1, 2, 64])
def test_five_kills_from_outside_without_a_step_between_fail_nobody(depth: int, num_requests: int) -> None:
    engine = fragile({}, depth=depth)
    for number in range(num_requests):
        add(engine.engine, number)
    for _ in range(5):
        while engine.engine.plan() is not None:
            pass
        assert engine.engine.lose_executor(600) == []
    engine.run()
    assert_only_fail(engine, [], range(num_requests))


def test_kills_from_outside_with_steps_between_never_fail_anybody() -> None:
    engine = fragile({}, budget=32)
    for number in range(8):
        add(engine.engine, number)
    for kill in range(100):
        for _ in range(5 + kill % 5):
            engine.step()
        while engine.engine.plan() is not None:
            pass
        assert engine.engine.lose_executor(600) == []
    engine.run()
    assert_only_fail(engine, [], range(8))


def test_who_got_through_what_was_in_flight_is_no_suspect_any_more() -> None:
    engine = fragile({})
    request = add(engine.engine, 0)
    suspects = engine.engine.core.suspects
    engine.engine.plan()
    engine.engine.lose_executor(600)
    assert suspicion_of(suspects, request).num_crashes == 1
    engine.engine.step()
    assert len(suspects) == 0


def test_a_deadly_request_that_its_caller_aborts_takes_nobody_with_it() -> None:
    engine = fragile({"0": None})
    for number in range(4):
        add(engine.engine, number)
    while engine.num_crashes < 3:
        engine.step()
    engine.engine.finish("0", FinishReason.ABORTED)
    engine.run()
    assert engine.ends == []
    assert all(engine.engine.told[str(number)] == expected(number) for number in range(1, 4))


def test_new_requests_go_on_while_suspects_are_tried() -> None:
    engine = fragile({"3": 2}, max_num_seqs=16)
    for number in range(8):
        add(engine.engine, number)
    while not engine.engine.core.suspects.isolated:
        engine.step()
    add(engine.engine, 100, num_output=3)
    crashes_before = engine.num_crashes
    for _ in range(8):
        engine.step()
    assert engine.engine.told["100"], "an unsuspected request is not held up by the trials"
    assert engine.num_crashes - crashes_before <= 5
    engine.run()
    assert {told.request.request_id for told in engine.ends} == {"3"}


def test_a_stream_of_new_requests_does_not_starve_suspects() -> None:
    engine = fragile({"3": 2}, max_num_seqs=8, num_blocks=40)
    for number in range(8):
        add(engine.engine, number)
    while not engine.engine.core.suspects.isolated:
        engine.step()
    for number in range(100, 400):
        add(engine.engine, number, num_output=20)
    for _ in range(120):
        engine.step()
    assert all(str(number) in engine.engine.finish_reasons for number in range(8))
    engine.run(20_000)
    assert {told.request.request_id for told in engine.ends} == {"3"}


def test_requests_that_wait_for_the_prefix_of_a_deadly_one_get_through() -> None:
    engine = fragile({"deadly": 12}, budget=8)
    shared = prompt_of(1, 12)
    for i, name in enumerate(("deadly", "same", "third")):
        engine.engine.add(Request(name, [*shared, 7 + i], 4))
    engine.run()
    assert engine.engine.finish_reasons["deadly"] is FinishReason.ERROR
    assert engine.engine.told["same"] == [9, 10, 11, 12]
    assert engine.engine.told["third"] == [10, 11, 12, 13]


def test_a_tenants_limit_holds_while_its_suspects_are_tried() -> None:
    engine = fragile({"1": 2})
    engine.engine.core.set_tenant("t", TenantPolicy(max_num_running=2))
    for number in range(6):
        add(engine.engine, number, tenant="t")
    while engine.engine.core.num_requests:
        engine.step()
        assert sum(request.tenant == "t" for request in engine.engine.core.running) <= 2
    assert_only_fail(engine, [1], range(6))


def test_suspects_in_a_tiny_pool_are_found_though_they_preempt_each_other() -> None:
    engine = fragile({"2": 7}, num_blocks=12, depth=2)
    for number in range(6):
        add(engine.engine, number)
    engine.run()
    assert_only_fail(engine, [2], range(6))


def test_deadlines_hold_while_suspects_are_tried() -> None:
    engine = fragile({"0": None})
    add(engine.engine, 0)
    add(engine.engine, 1, deadline_s=5.0)
    for _ in range(2):
        engine.step()
    engine.engine.pass_time(6.0)
    assert engine.engine.finish_reasons["1"] is FinishReason.DEADLINE
    engine.run()
    assert engine.engine.finish_reasons["0"] is FinishReason.ERROR


# --- steps that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("position", [None, 3, 7], ids=["any", "prefill", "decode"])
def test_who_makes_steps_fail_fails_alone_with_the_executors_error(depth: int, position: int | None) -> None:
    engine = fragile({"11": position}, depth=depth, only_fails_steps=True)
    for number in range(16):
        add(engine.engine, number)
    engine.run()
    assert_only_fail(engine, [11], range(16))
    assert engine.ends[0].error == "the step failed"
    assert engine.engine.executor.num_rows <= 64


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_failed_step_fails_nobody(depth: int) -> None:
    for failing_step in range(1, 12):
        engine = fragile({}, depth=depth)
        for number in range(4):
            add(engine.engine, number)
        for _ in range(failing_step):
            engine.step()
        engine.engine.executor.fails_next_step = True
        engine.run()
        assert_only_fail(engine, [], range(4))


def test_a_result_of_a_row_that_began_anew_does_not_count() -> None:
    engine = fragile({}, depth=3).engine
    request = add(engine, 0)
    while engine.plan() is not None:
        pass
    engine.executor.fails_next_step = True
    engine.apply()
    assert request.is_row_void
    assert request.num_plans_in_flight == 2
    assert engine.apply() == []
    assert engine.apply() == []
    assert not request.is_row_void
    engine.run_until_idle()
    assert engine.told["0"] == expected(0)


# --- the bookkeeping ------------------------------------------------------------------------------------------------


def row_of(request: Request, start: int, num_tokens: int) -> ScheduledRow:
    return ScheduledRow(request, 1, num_tokens, start, [], False, False, True)


def suspicion_of(suspects: Suspects, request: Request) -> Suspicion:
    known = suspects.suspicion(request)
    assert known is not None
    return known


def test_crashes_at_other_tokens_begin_the_count_anew() -> None:
    suspects, request = Suspects(), Request("a", [1], 1)
    for _ in range(MIN_CRASHES - 1):
        assert suspects.blame_for_crash([row_of(request, 0, 8)]) is None
    assert suspects.blame_for_crash([row_of(request, 8, 8)]) is None
    assert suspicion_of(suspects, request).num_crashes == 1


def test_crashes_do_not_count_as_failed_steps_nor_the_other_way_round() -> None:
    suspects, request = Suspects(), Request("a", [1], 1)
    rows = [row_of(request, 0, 1)]
    for _ in range(MIN_CRASHES - 1):
        assert suspects.blame_for_crash(rows) is None
    for _ in range(MIN_FAILED_STEPS_ALONE - 1):
        assert suspects.blame_for_failed_step(rows) is None
    assert suspects.blame_for_failed_step(rows) is request


def test_only_who_was_alone_is_quarantined() -> None:
    suspects = Suspects()
    a, b = Request("a", [1], 1), Request("b", [2], 1)
    for _ in range(2 * MIN_CRASHES):
        assert suspects.blame_for_crash([row_of(a, 0, 1), row_of(b, 0, 1)]) is None
    b.finish_reason = FinishReason.ABORTED
    assert suspects.blame_for_crash([row_of(a, 0, 1), row_of(b, 0, 1)]) is None, "b was there as well"
    for _ in range(MIN_CRASHES_ALONE - 1):
        assert suspects.blame_for_crash([row_of(a, 0, 1)]) is None
    assert suspects.blame_for_crash([row_of(a, 0, 1)]) is a


def test_a_group_that_was_in_flight_is_halved_and_tried_next() -> None:
    suspects = Suspects()
    requests = [Request(str(i), [i], 1) for i in range(5)]
    rows = [row_of(request, 0, 1) for request in requests]
    suspects.blame_for_failed_step(rows)
    assert not suspects.isolated
    suspects.blame_for_failed_step(rows)
    assert [len(group) for group in suspects.groups] == [3, 2]
    suspects.blame_for_failed_step(rows[:3])
    assert [len(group) for group in suspects.groups] == [2, 1, 2]
    suspects.forget(requests[0])
    assert [len(group) for group in suspects.groups] == [1, 1, 2]
    assert len(suspects) == 4
