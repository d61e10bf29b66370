"""The fairness benchmark: its simulation is deterministic, so that its promises are tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.fairness.__main__ import fairness_table
from loadtest.fairness.simulation import Simulation, simulate
from loadtest.fairness.workload import FLOOD, LIGHT, Observed, Workload, verdict
from tokenloom.scheduler.core.scheduler import SchedulingPolicy

SHORT = Workload(duration_s=12.0)


def test_under_a_flood_the_light_tenant_keeps_its_time_to_first_token_and_the_engine_its_throughput() -> None:
    runs = simulate(SHORT)
    figures = verdict(runs["solo"], runs["fair"], runs["fcfs"])
    assert figures["is_within_bound"], figures
    assert 0.95 <= float(str(figures["throughput_ratio"])) <= 1.05
    assert runs["fair"].num_light_unserved == 0
    fair, fcfs = figures["fair"], figures["fcfs"]
    assert isinstance(fair, dict)
    assert isinstance(fcfs, dict)
    assert fcfs["light_ttft_ms_p95"] > 5 * fair["light_ttft_ms_p95"], "the flood is one that FCFS does not withstand"


def test_a_simulation_gives_the_same_figures_each_time() -> None:
    workload = replace(SHORT, duration_s=2.0)
    first, second = (Simulation(workload, SchedulingPolicy.FAIR, has_flood=True).run() for _ in range(2))
    assert first == second


def test_alone_a_request_has_its_first_token_after_the_one_step_of_its_prompt() -> None:
    workload = replace(SHORT, duration_s=2.0, light_output_tokens=1)
    solo = Simulation(workload, SchedulingPolicy.FAIR, has_flood=False).run()
    assert solo.light_ttft_s == pytest.approx([workload.cost.seconds(1, 128)] * len(workload.light_times_s()))
    assert solo.num_tokens == 129 * len(solo.light_ttft_s)


def test_a_request_without_a_token_at_the_end_counts_with_the_time_it_waited() -> None:
    workload = replace(SHORT, duration_s=1.0, max_num_seqs=4, flood_output_tokens=1000)
    fcfs = Simulation(workload, SchedulingPolicy.FCFS, has_flood=True).run()
    assert fcfs.num_light_unserved == len(fcfs.light_ttft_s) == len(workload.light_times_s())
    assert max(fcfs.light_ttft_s) == pytest.approx(1.0 - workload.light_times_s()[0])


def test_prompts_are_as_long_as_was_said_and_no_two_begin_alike() -> None:
    prompts = [SHORT.prompt(tenant, number) for tenant in (FLOOD, LIGHT) for number in (0, 1, 40_000)]
    assert {len(prompt) for prompt in prompts} == {256, 128}
    assert len({tuple(prompt[:3]) for prompt in prompts}) == len(prompts)


def test_the_bound_is_the_time_alone_and_three_steps() -> None:
    solo = Observed([0.010] * 20, step_s=[0.002], num_tokens=100, duration_s=1.0)
    fair = Observed([0.040] * 20, step_s=[0.010] * 20, num_tokens=190, duration_s=2.0)
    fcfs = Observed([0.500] * 20, step_s=[0.010] * 20, num_tokens=100, duration_s=1.0)
    figures = verdict(solo, fair, fcfs)
    assert figures["bound_ms"] == pytest.approx(40.0)
    assert figures["is_within_bound"]
    assert figures["throughput_ratio"] == pytest.approx(0.95)
    late = verdict(solo, replace(fair, light_ttft_s=[0.041] * 20), fcfs)
    assert not late["is_within_bound"]
    assert "NOT KEPT" in fairness_table({"simulation": late})
    assert "bound (solo p95 + 3 x p95 step) 40.0 ms: kept" in fairness_table({"simulation": figures})
