"""The benchmarks of the scheduler stage, in short: that they run, and the bounds that hold on any machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import uvloop

from loadtest.bench.session import Session, SessionLost, Work
from loadtest.bench.stack import StackFailed, StackSettings, running_stack
from loadtest.bench.steps import MODELLED_COST, StepCost
from loadtest.fairness.real_run import run_for_real
from loadtest.fairness.workload import Workload
from loadtest.scheduler.__main__ import main
from loadtest.scheduler.admission import AdmissionSettings, admission_tables, measure_admission
from loadtest.scheduler.overlap import OverlapSettings, measure_overlap, overlap_table
from loadtest.scheduler.split import SplitSettings, measure_split, split_table


def number(row: dict[str, object], name: str) -> float:
    value = row[name]
    assert isinstance(value, int | float), (name, value)
    return value


def test_the_executor_is_busier_with_two_plans_in_flight_and_little_is_computed_in_vain() -> None:
    """Steps of 10 ms: a busy machine has time for the scheduler's part within one."""
    settings = OverlapSettings(
        step_ms=10.0,
        num_running=16,
        depths=(1, 2),
        warmup_s=0.3,
        measure_s=1.0,
        num_stops=6,
        num_long=1,
        output_tokens=64,
    )
    one, two = rows = measure_overlap(settings)
    assert number(two, "executor_idle_pct") < 25
    assert number(two, "executor_idle_pct") < 0.7 * number(one, "executor_idle_pct")
    assert number(one, "wasted_rows_stop_token_max") == 0, "a stop token wastes depth - 1 rows at most"
    assert number(two, "wasted_rows_stop_token_max") <= 1, "a stop token wastes depth - 1 rows at most"
    for row in rows:
        assert row["wasted_rows_finish_over_bound"] == 0, "Finish wastes depth - 1 and its session round trip at most"
        assert number(row, "session_round_trip_steps_mean") < 8, "a session's round trip takes milliseconds"
        assert row["tokens_after_end"] == 0, "no wasted token is told"
    assert len(overlap_table(rows).splitlines()) == 3


def test_the_split_is_measured_hop_by_hop() -> None:
    settings = SplitSettings(sizes=(1, 8), depths=(2,), warmup_s=0.05, slice_s=0.05, num_slices=3)
    rows = measure_split(settings)
    assert [(row["arrangement"], row["num_rows"]) for row in rows] == [
        (arrangement, size) for arrangement in ("local", "execute", "session") for size in (1, 8)
    ]
    assert all(number(row, "us_per_step") > 0 and number(row, "scheduler_cpu_us_per_step") > 0 for row in rows)
    local, execute = rows[0], rows[2]
    assert number(local, "us_per_step") < number(execute, "us_per_step"), "a hop costs something"
    assert "hop adds" in split_table(rows)


def test_overload_is_answered_at_once_and_a_short_request_waits_for_few_chunks() -> None:
    settings = AdmissionSettings(overload_s=1.0, max_num_waiting=16, num_short=4, cost=MODELLED_COST)
    figures = measure_admission(settings)
    overload, long_prompt = figures["overload"], figures["long_prompt"]
    assert isinstance(overload, dict)
    assert isinstance(long_prompt, dict)
    assert overload["num_refused"] > 0.5 * settings.overload_s * overload["offered_per_s"]
    assert overload["refusal_ms_p50"] < 50
    assert long_prompt["extra_chunks_p50"] < 6, "16 chunks of the long prompt do not come first"
    assert len(admission_tables(figures).splitlines()) == 5


def test_the_light_tenant_is_served_during_a_real_flood() -> None:
    workload = Workload(duration_s=2.0, flood_burst=120)
    runs = run_for_real(workload, solo_s=1.0)
    assert all(run.light_ttft_s and run.step_s for run in runs.values())
    fair, fcfs = runs["fair"], runs["fcfs"]
    assert fair.num_light_unserved <= 1, "one may have come just before the end"
    assert sorted(fair.light_ttft_s)[len(fair.light_ttft_s) // 2] < max(fcfs.light_ttft_s)


def test_the_result_file_has_its_keys_and_null_for_what_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "build" / "bench.json"
    assert main(["cost", "--quick", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert list(figures["schedule_update_ms"]) == ["16", "64", "256", "1024"]
    assert all(value > 0 for value in figures["schedule_update_ms"].values())
    assert figures["machine"]["num_cores"] >= 1
    assert figures["is_quick"] is True
    assert len(figures["cost"]["steps"]) == 11
    assert len(figures["cost"]["long_prompt"]) == 5
    assert [figures[part] for part in ("executor_idle_pct", "overlap", "split", "admission")] == [None] * 4


def test_an_engine_that_ends_nothing_is_told_and_not_waited_for_for_ever() -> None:
    async def measure() -> None:
        async with (
            running_stack(StackSettings(StepCost(1.0))) as stack,
            Session.open(stack.scheduler) as session,
        ):
            call = session.submit(Work([1, 2, 3], max_tokens=100_000))
            await session.wait_for([call], limit_s=0.3)

    with pytest.raises(SessionLost, match="1 requests have not ended"):
        uvloop.run(measure())


def test_a_stage_that_does_not_come_up_is_told() -> None:
    async def measure() -> None:
        async with running_stack(StackSettings(StepCost(1.0), ["--no-such-flag", "1"])):
            pass

    with pytest.raises(StackFailed, match=r"scheduler\.sock"):
        uvloop.run(measure())
