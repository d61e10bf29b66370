"""Within a tenant the earliest deadline runs first; across tenants a deadline buys nothing."""

from tests.unit.scheduler.core_simulation.simulation import Simulation
from tokenloom.scheduler.core.request import FinishReason
from tokenloom.scheduler.core.scheduler import SchedulerConfig

ONE_AT_A_TIME = SchedulerConfig(max_num_seqs=1)


def test_earliest_deadline_runs_first_within_a_tenant() -> None:
    simulation = Simulation(ONE_AT_A_TIME)
    simulation.submit("running", 8, 20)
    simulation.step()
    for name, deadline_s in [("none", None), ("late", 25.0), ("soon", 10.0), ("middle", 15.0)]:
        simulation.submit(name, 8, 8, deadline_s=deadline_s)
    simulation.run_until_idle()
    order = sorted(simulation.lives.values(), key=lambda life: life.end_step or 0)
    assert [life.request.request_id for life in order] == ["running", "soon", "middle", "late", "none"]
    assert all(life.reason is FinishReason.LENGTH for life in order)


def test_equal_deadlines_run_by_arrival() -> None:
    simulation = Simulation(ONE_AT_A_TIME)
    for i in range(6):
        simulation.submit(str(i), 8, 4, deadline_s=100.0)
    simulation.run_until_idle()
    ends = [simulation.lives[str(i)].end_step or 0 for i in range(6)]
    assert ends == sorted(ends)


def test_far_deadline_is_no_worse_than_none() -> None:
    simulation = Simulation(ONE_AT_A_TIME)
    simulation.submit("running", 8, 20)
    simulation.step()
    far = simulation.submit("far", 8, 4, deadline_s=100_000.0)
    none = simulation.submit("none", 8, 4)
    simulation.run_until_idle()
    assert (far.end_step or 0) < (none.end_step or 0)


def test_deadlines_are_no_way_past_other_tenants() -> None:
    simulation = Simulation(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))
    simulation.keep_waiting("hasty", 10, deadline_s=20.0)
    simulation.keep_waiting("calm", 10)
    simulation.run(2000)
    calm, hasty = simulation.served("calm"), simulation.served("hasty")
    assert 0.95 * hasty <= calm <= 1.05 * hasty


def test_expired_requests_never_reach_a_step_and_free_their_blocks_within_two() -> None:
    simulation = Simulation(ONE_AT_A_TIME, step_s=0.125)
    running = simulation.submit("running", 8, 100, deadline_s=1.25)
    simulation.step()
    waiting = simulation.submit("waiting", 8, 8, deadline_s=0.5)
    simulation.run(8)
    assert waiting.reason is FinishReason.DEADLINE
    assert waiting.first_row_step is None
    assert running.reason is None
    simulation.run(3)
    assert running.reason is FinishReason.DEADLINE
    assert running.end_step == 10
    assert simulation.core.kv.pool.num_held_blocks == 0
    assert len(simulation.plans) <= 12
