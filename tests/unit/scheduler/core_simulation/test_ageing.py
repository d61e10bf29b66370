"""Classes: urgent requests come first and take what they need from lower ones, but starve nobody."""

import pytest

from tests.unit.scheduler.core_simulation.simulation import Simulation
from tokenloom.scheduler.core.plan import PreemptReason
from tokenloom.scheduler.core.request import FinishReason
from tokenloom.scheduler.core.scheduler import SchedulerConfig

AGEING_S = 2.0
NUM_CLASSES = 4
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, num_priority_classes=NUM_CLASSES, ageing_s=AGEING_S)
BOUND_S = 2 * AGEING_S * NUM_CLASSES


def seconds_to_end(simulation: Simulation, num_output_tokens: int = 8) -> float:
    """How long a request of the lowest class takes."""
    life = simulation.submit("low", 16, num_output_tokens, tenant="low", priority_class=NUM_CLASSES - 1)
    simulation.run_until(life, max_steps=2 * int(BOUND_S / simulation.step_s))
    assert life.reason is FinishReason.LENGTH
    return life.steps_to_end * simulation.step_s


@pytest.mark.parametrize("tenants", [("low",), ("high",), ("high", "low", "third")], ids="-".join)
@pytest.mark.parametrize("deadline_s", [None, 1000.0, 3.0], ids=["no deadline", "far deadline", "near deadline"])
@pytest.mark.parametrize("num_blocks", [10_000, 16], ids=["many blocks", "few blocks"])
def test_lowest_class_ends_in_bounded_time_under_endless_urgent_arrivals(
    tenants: tuple[str, ...], deadline_s: float | None, num_blocks: int
) -> None:
    simulation = Simulation(CONFIG, num_blocks)
    for tenant in tenants:
        simulation.keep_waiting(tenant, 12, 16, 16, deadline_s=deadline_s)
    simulation.run(50)
    assert seconds_to_end(simulation) <= BOUND_S


def test_lowest_class_waits_for_ever_without_ageing_so_the_test_above_can_fail() -> None:
    simulation = Simulation(SchedulerConfig(4, 32, ageing_s=0.0))
    simulation.keep_waiting("high", 12)
    simulation.run(50)
    life = simulation.submit("low", 16, 8, tenant="low", priority_class=3)
    simulation.run(1000)
    assert life.first_token_step is None


@pytest.mark.parametrize("priority_class", [0, 1, 2])
def test_request_without_deadline_is_not_starved_by_endless_deadlines_of_its_own_tenant(priority_class: int) -> None:
    simulation = Simulation(CONFIG)
    simulation.keep_waiting("one", 12, 16, 16, deadline_s=5.0, priority_class=priority_class)
    simulation.run(50)
    life = simulation.submit("patient", 16, 8, tenant="one", priority_class=priority_class)
    simulation.run_until(life, max_steps=int(BOUND_S / simulation.step_s))
    assert life.reason is FinishReason.LENGTH


def test_age_counts_from_the_first_submission() -> None:
    simulation = Simulation(CONFIG)
    simulation.run(400)
    simulation.keep_waiting("high", 12)
    simulation.run(50)
    old = simulation.submit("old", 16, 8, tenant="low", priority_class=3, age_s=NUM_CLASSES * AGEING_S, resumed=2)
    assert old.request.current_class == 0
    young = simulation.submit("young", 16, 8, tenant="low", priority_class=3, age_s=AGEING_S)
    assert young.request.current_class == 2
    assert simulation.run_until(old).steps_to_end <= 40
    assert simulation.run_until(young).steps_to_end > 40


def test_request_rises_one_class_per_ageing_time_also_after_a_long_pause() -> None:
    simulation = Simulation(CONFIG, step_s=0.1)
    simulation.keep_waiting("high", 12, 8, 100)
    life = simulation.submit("low", tenant="low", priority_class=3)
    classes = []
    for _ in range(45):
        simulation.step()
        classes.append(life.request.current_class)
    assert classes == sorted(classes, reverse=True)
    assert classes[18] == 3
    assert classes[22] == 2
    assert classes[38] == 2
    assert classes[42] == 1
    other = simulation.submit("other", tenant="low", priority_class=3)
    simulation.now_s += 100.0
    simulation.step()
    assert (life.request.current_class, other.request.current_class) == (0, 0)


def test_requests_that_rise_while_they_run_may_end_in_any_order() -> None:
    simulation = Simulation(CONFIG)
    simulation.submit("low-and-old", 8, 500, priority_class=2)
    simulation.submit("middle", 8, 500, priority_class=1)
    simulation.run(2 * int(AGEING_S / simulation.step_s) + 5)
    assert [request.request_id for request in simulation.core.running] == ["low-and-old", "middle"]
    for name in ("low-and-old", "middle"):
        simulation.core.finish(name, FinishReason.ABORTED)
    assert not simulation.core.running


def test_class_beyond_the_last_counts_as_the_last() -> None:
    simulation = Simulation(CONFIG)
    assert simulation.submit("low", priority_class=1000).request.current_class == NUM_CLASSES - 1


@pytest.mark.parametrize("num_blocks", [10_000, 14], ids=["no row left", "no block left"])
def test_urgent_request_takes_its_place_from_the_newest_of_the_lowest_class(num_blocks: int) -> None:
    config = SchedulerConfig(max_num_seqs=4 if num_blocks > 14 else 64, max_num_batched_tokens=64, ageing_s=0.0)
    simulation = Simulation(config, num_blocks, depth=1)
    lives = [
        simulation.submit(name, 40, 8, tenant="one", priority_class=number)
        for name, number in [("middle-old", 1), ("low-old", 2), ("low-young", 2), ("middle-young", 1)]
    ]
    simulation.run(4)
    urgent = simulation.submit("urgent", 40, 8, tenant="one")
    simulation.step()
    (preemption,) = [one for plan in simulation.plans for one in plan.preempted]
    assert preemption.request.request_id == "low-young"
    assert preemption.reason is PreemptReason.PRIORITY
    assert urgent.first_row_step == 4
    simulation.run_until_idle()
    assert all(life.tokens == 8 for life in lives)


def test_equals_never_preempt_each_other_for_a_place() -> None:
    simulation = Simulation(CONFIG)
    for i in range(12):
        simulation.submit(str(i), 16, 50, tenant="one", priority_class=2)
    simulation.run_until_idle()
    assert simulation.core.stats.num_preemptions == 0


def test_classes_run_in_order_whatever_their_tenants_were_served() -> None:
    simulation = Simulation(SchedulerConfig(max_num_seqs=1, ageing_s=0.0))
    for name, number in [("c", 2), ("b", 1), ("a", 0)]:
        for i in range(3):
            simulation.submit(f"{name}-{i}", tenant=name, priority_class=number)
    simulation.run_until_idle()
    ends = [simulation.lives[f"{name}-{i}"].end_step for name in "abc" for i in range(3)]
    assert ends == sorted(end for end in ends if end is not None)
