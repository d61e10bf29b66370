"""When an executor counts as lost: rules of the judge, with time handed in."""

from __future__ import annotations

import pytest

from tokenloom.scheduler.stall import StallJudge, StepTimes

STALL_S = 15.0
STEP_S = 120.0


def judge_of(times: StepTimes | None = None, *, sends_heartbeats: bool = False) -> StallJudge:
    return StallJudge(STALL_S, STEP_S, times or StepTimes(), sends_heartbeats=sends_heartbeats)


def seconds_until_lost(judge: StallJudge, limit_s: float = 1000.0, *, progress: int | None = None) -> float:
    """Let time pass in half seconds, with a heartbeat in each if `progress` is given."""
    passed_s = 0.0
    while passed_s < limit_s:
        if progress is not None:
            judge.on_heartbeat(progress)
        passed_s += 0.5
        if judge.pass_time(0.5):
            return passed_s
    return float("inf")


def test_an_executor_that_sends_heartbeats_is_lost_when_they_cease_with_and_without_plans() -> None:
    judge = judge_of()
    judge.on_heartbeat(1)
    assert STALL_S <= seconds_until_lost(judge) <= STALL_S + 1
    judge = judge_of(sends_heartbeats=True)
    judge.on_plan(5)
    assert seconds_until_lost(judge) == STALL_S, "it is known to send them"


def test_one_that_sends_none_and_has_no_plans_may_be_silent_for_ever() -> None:
    judge = judge_of()
    judge.on_plan(5)
    judge.on_result()
    assert seconds_until_lost(judge) == float("inf")


def test_results_are_signs_of_life_too() -> None:
    judge = judge_of(sends_heartbeats=True)
    for _ in range(100):
        judge.on_plan(5)
        assert not judge.pass_time(10.0)
        judge.on_result()
        assert not judge.pass_time(1.0)


def test_a_plan_that_does_not_move_is_lost_although_heartbeats_come() -> None:
    times = StepTimes()
    times.add(512, 2.0)
    judge = judge_of(times)
    judge.on_plan(512)
    assert seconds_until_lost(judge, progress=7) == pytest.approx(20.0, abs=1.0)


def test_a_long_step_that_makes_progress_is_never_lost() -> None:
    judge = judge_of()
    judge.on_plan(512)
    for progress in range(200):
        judge.on_heartbeat(progress)
        assert not judge.pass_time(14.0)


def test_without_measurements_the_limit_of_a_step_is_the_setting() -> None:
    judge = judge_of()
    judge.on_plan(512)
    assert seconds_until_lost(judge, progress=7) == pytest.approx(STEP_S, abs=1.0)


def test_quick_steps_of_its_size_make_the_stall_timeout_the_limit() -> None:
    times = StepTimes()
    times.add(1, 0.01)
    judge = judge_of(times)
    judge.on_plan(1)
    assert seconds_until_lost(judge, progress=7) == pytest.approx(STALL_S, abs=1.0)
    judge = judge_of(times)
    judge.on_plan(512)  # steps of one token say nothing of a prompt
    assert seconds_until_lost(judge, progress=7) == pytest.approx(STEP_S, abs=1.0)


def test_a_plan_that_was_given_up_has_twice_the_time_when_it_comes_again() -> None:
    times = StepTimes()
    times.add(64, 0.1)
    waited = []
    for _ in range(4):
        judge = judge_of(times)
        judge.on_plan(64)
        waited.append(seconds_until_lost(judge))
    assert waited == pytest.approx([15.0, 30.0, 60.0, 120.0], abs=1.0)


def test_step_times_are_measured_from_the_result_before_and_forget_slowly() -> None:
    times = StepTimes()
    judge = judge_of(times)
    judge.on_plan(64)
    judge.on_plan(64)
    judge.pass_time(3.0)
    judge.on_result()
    assert times.expected_s(64) == 3.0
    judge.pass_time(1.0)
    judge.on_result()
    assert times.expected_s(64) == pytest.approx(2.85)
    judge.on_plan(0)  # rows that ended: no step
    judge.on_result()
    assert times.expected_s(64) == pytest.approx(2.85)
    assert times.expected_s(3) == pytest.approx(2.85), "no more than a larger one"
    assert times.expected_s(128) is None


def test_an_idle_time_before_a_plan_is_no_part_of_its_step() -> None:
    times = StepTimes()
    judge = judge_of(times)
    judge.pass_time(100.0)
    judge.on_plan(8)
    judge.pass_time(1.0)
    judge.on_result()
    assert times.expected_s(8) == 1.0
