"""Tenants: a flood of one does not hold up the others, and everybody is served by weight."""

import pytest

from tests.unit.scheduler.core_simulation.simulation import Simulation
from tokenloom.scheduler.core.plan import PreemptReason
from tokenloom.scheduler.core.scheduler import SchedulerConfig, SchedulingPolicy
from tokenloom.scheduler.core.tenants import TenantPolicy

SMALL = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)


def solo_steps(config: SchedulerConfig, num_blocks: int, depth: int) -> int:
    """Steps to the first token when nobody else is there."""
    alone = Simulation(config, num_blocks, depth)
    return alone.run_until(alone.submit("solo", 16, 8)).steps_to_first_token


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [10_000, 40], ids=["many blocks", "few blocks"])
@pytest.mark.parametrize("flood", [(32, 32), (4, 200), (200, 4)], ids=["even", "long outputs", "long prompts"])
def test_light_tenant_waits_three_steps_at_most_for_its_first_token_beside_a_flood(
    depth: int, num_blocks: int, flood: tuple[int, int]
) -> None:
    simulation = Simulation(SMALL, num_blocks, depth)
    simulation.keep_waiting("flood", 30, *flood)
    simulation.run(60)
    for i in range(20):
        simulation.submit(f"light-{i}", 16, 8, tenant="light")
        simulation.run(25)
    waits = sorted(life.steps_to_first_token for life in simulation.of("light-"))
    assert waits[-1] <= solo_steps(SMALL, num_blocks, depth) + 3
    assert len(simulation.of("light-")) == 20


def test_light_tenant_comes_back_every_few_steps_beside_very_long_outputs_and_never_waits_long() -> None:
    simulation = Simulation(SMALL)
    simulation.keep_waiting("flood", 30, 4, 1500)
    simulation.run(60)
    for i in range(100):
        simulation.submit(f"light-{i}", 16, 4, tenant="light")
        simulation.run(8)
    waits = [life.steps_to_first_token for life in simulation.of("light-")]
    assert max(waits) <= solo_steps(SMALL, 10_000, 2) + 3
    # What the flood had computed lies in the cache: it loses rows, not work.
    num_new = simulation.served("flood") + simulation.served("light")
    assert simulation.num_row_tokens <= 1.25 * num_new


def test_plain_fcfs_lets_the_light_tenant_wait_so_the_test_above_can_fail() -> None:
    simulation = Simulation(SchedulerConfig(8, 64, policy=SchedulingPolicy.FCFS))
    simulation.keep_waiting("flood", 30, 32, 32)
    simulation.run(60)
    assert simulation.run_until(simulation.submit("light", 16, 8, tenant="light")).steps_to_first_token > 50


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 1.0), (5.0, 1.0), (1.0, 0.5)])
@pytest.mark.parametrize(
    "shapes", [((16, 16), (16, 16)), ((60, 4), (4, 60)), ((8, 100), (8, 10))], ids=["equal", "opposite", "lengths"]
)
def test_tenants_with_a_backlog_are_served_by_weight(
    weights: tuple[float, float], shapes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    simulation = Simulation(SMALL)
    for name, weight, shape in zip("ab", weights, shapes, strict=True):
        simulation.core.set_tenant(name, TenantPolicy(weight))
        simulation.keep_waiting(name, 12, *shape)
    simulation.run(200)
    before = [simulation.core.tenants[name].counter for name in "ab"]
    simulation.run(2500)
    served = [simulation.core.tenants[name].counter - start for name, start in zip("ab", before, strict=True)]
    assert served[0] == pytest.approx(served[1], rel=0.05), "service over weight is equal"


def test_two_to_one_weights_give_two_to_one_tokens() -> None:
    simulation = Simulation(SMALL)
    simulation.core.set_tenant("two", TenantPolicy(2.0))
    simulation.keep_waiting("two", 10)
    simulation.keep_waiting("one", 10)
    simulation.run(3000)
    assert simulation.served("two") / simulation.served("one") == pytest.approx(2.0, rel=0.05)


def test_three_tenants_of_one_weight_get_a_third_each() -> None:
    simulation = Simulation(SMALL)
    for i, name in enumerate("abc"):
        simulation.keep_waiting(name, 10, 8 + 8 * i, 24 - 8 * i)
    simulation.run(3000)
    counters = [simulation.core.tenants[name].counter for name in "abc"]
    assert max(counters) <= 1.05 * min(counters)


@pytest.mark.parametrize("was_here_before", [True, False])
def test_idle_time_gives_no_credit(was_here_before: bool) -> None:
    simulation = Simulation(SMALL)
    if was_here_before:
        simulation.run_until(simulation.submit("early", 8, 8, tenant="late"))
    simulation.keep_waiting("steady", 10)
    simulation.run(1000)
    simulation.keep_waiting("late", 10)
    before = simulation.served("steady"), simulation.served("late")
    simulation.run(400)
    steady, late = simulation.served("steady") - before[0], simulation.served("late") - before[1]
    assert steady == pytest.approx(late, rel=0.1)


def test_time_in_which_others_ran_without_a_queue_gives_no_credit_either() -> None:
    simulation = Simulation(SMALL)
    for i in range(8):
        simulation.submit(f"steady-{i}", 8, 1000, tenant="steady")
    simulation.run(900)
    assert not len(simulation.core.waiting)
    simulation.keep_waiting("late", 10)
    simulation.run(1)
    steady, late = (simulation.core.tenants[name].counter for name in ("steady", "late"))
    assert late >= 0.95 * steady


def test_tenant_of_little_weight_has_everything_while_nobody_else_wants_it() -> None:
    simulation = Simulation(SMALL)
    simulation.core.set_tenant("alone", TenantPolicy(0.01))
    simulation.core.set_tenant("idle", TenantPolicy(100.0))
    simulation.run_until(simulation.submit("once", tenant="idle"))
    simulation.keep_waiting("alone", 20)
    simulation.run(20)
    start = simulation.num_rows
    simulation.run(200)
    # A request that needs no more plans has its row until its last result is applied: 17 steps for 16 tokens.
    assert simulation.num_rows - start >= 0.93 * 200 * SMALL.max_num_seqs
    assert simulation.core.stats.num_preemptions == 0


def test_rows_that_a_limited_tenant_may_not_use_go_to_the_others() -> None:
    simulation = Simulation(SMALL)
    simulation.core.set_tenant("limited", TenantPolicy(weight=100.0, max_num_running=2))
    simulation.keep_waiting("limited", 20)
    simulation.keep_waiting("other", 20)
    simulation.run(50)
    start = simulation.num_rows
    simulation.run(200)
    assert simulation.num_rows - start >= 0.9 * 200 * SMALL.max_num_seqs
    assert simulation.most_running["limited"] == 2
    assert max(sum(row.request.tenant == "limited" for row in plan.rows) for plan in simulation.plans) == 2


def test_tenant_over_its_share_gives_up_its_newest_requests_and_no_more_than_needed() -> None:
    simulation = Simulation(SMALL)
    flood = [simulation.submit(f"flood-{i}", 8, 400, tenant="flood") for i in range(8)]
    simulation.run(10)
    simulation.submit("light", 8, 100, tenant="light")
    simulation.run(3)
    preempted = [preemption for plan in simulation.plans for preemption in plan.preempted]
    assert [(one.request.request_id, one.reason) for one in preempted] == [("flood-7", PreemptReason.SHARE)]
    for i in range(6):
        simulation.submit(f"light-{i}", 8, 100, tenant="light")
    simulation.run(6)
    names = [one.request.request_id for plan in simulation.plans for one in plan.preempted]
    assert names == ["flood-7", "flood-6", "flood-5", "flood-4"], "half of eight rows is the share"
    assert all(one.request.tenant == "flood" for plan in simulation.plans for one in plan.preempted)
    simulation.run_until_idle()
    assert all(life.tokens == 400 for life in flood)


def test_rows_are_shared_by_weight() -> None:
    simulation = Simulation(SMALL)
    simulation.core.set_tenant("heavy", TenantPolicy(3.0))
    for i in range(8):
        simulation.submit(f"light-{i}", 8, 400, tenant="light")
    simulation.run(10)
    for i in range(8):
        simulation.submit(f"heavy-{i}", 8, 400, tenant="heavy")
    simulation.run(10)
    rows = {name: tenant.num_running for name, tenant in simulation.core.tenants.items()}
    assert rows == {"heavy": 6, "light": 2}


def flood_run(policy: SchedulingPolicy) -> Simulation:
    config = SchedulerConfig(8, 64, policy=policy)
    simulation = Simulation(config)
    simulation.keep_waiting("flood", 30, 32, 32)
    for i in range(40):
        simulation.submit(f"light-{i}", 16, 8, tenant="light")
        simulation.run(25)
    return simulation


def test_fairness_costs_five_per_cent_of_throughput_at_most() -> None:
    fair, fcfs = (flood_run(policy) for policy in (SchedulingPolicy.FAIR, SchedulingPolicy.FCFS))
    told = [sum(life.tokens for life in simulation.lives.values()) for simulation in (fair, fcfs)]
    assert told[0] >= 0.95 * told[1]
    useful = [sum(simulation.served(name) for name in ("flood", "light")) for simulation in (fair, fcfs)]
    assert useful[0] >= 0.95 * useful[1]
