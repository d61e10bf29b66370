"""Short memory: preemptions cost something, but they end, and so do all requests."""

import pytest

from tests.unit.scheduler.core_simulation.simulation import Simulation
from tokenloom.scheduler.core.request import FinishReason
from tokenloom.scheduler.core.scheduler import SchedulerConfig
from tokenloom.scheduler.core.tenants import TenantPolicy

CONFIG = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=128, block_size=4)


@pytest.mark.parametrize("num_tenants", [1, 2, 5])
@pytest.mark.parametrize("num_classes", [1, 3])
@pytest.mark.parametrize("depth", [1, 3])
def test_preemption_storm_ends(num_tenants: int, num_classes: int, depth: int) -> None:
    simulation = Simulation(CONFIG, num_blocks=60, depth=depth)
    for i in range(60):
        simulation.submit(
            str(i), 10 + i % 7, 60 + i % 13, tenant=str(i % num_tenants), priority_class=i * 7 % num_classes
        )
    num_useful = sum(life.request.num_prompt_tokens + life.request.max_output_tokens for life in simulation.of(""))
    simulation.run_until_idle()
    assert all(life.reason is FinishReason.LENGTH for life in simulation.of(""))
    assert simulation.core.kv.pool.num_held_blocks == 0
    assert simulation.num_row_tokens <= 3 * num_useful
    assert simulation.core.stats.num_preemptions <= 6 * 60
    assert sum(simulation.core.stats.num_preemptions_by_reason.values()) == simulation.core.stats.num_preemptions


@pytest.mark.parametrize("num_blocks", [12, 30, 60])
def test_shares_of_a_full_memory_are_not_passed_to_and_fro(num_blocks: int) -> None:
    simulation = Simulation(CONFIG, num_blocks)
    simulation.core.set_tenant("heavy", TenantPolicy(3.0))
    for tenant in ("heavy", "light", "third"):
        simulation.keep_waiting(tenant, 4, 12, 30)
    simulation.run(1500)
    told = sum(life.tokens for life in simulation.of(""))
    computed = simulation.num_row_tokens
    ended = [life for life in simulation.of("") if life.reason is FinishReason.LENGTH]
    assert computed <= 2.5 * (told + sum(life.request.num_prompt_tokens for life in ended) + 100)
    oldest = max(simulation.num_steps - life.submitted_step for life in simulation.of("") if life.end_step is None)
    # One after the other: four of the light tenant wait, which has a fifth of the time, for some 35 steps each.
    assert oldest <= 5 * 5 * 35, "somebody is passed over all the time"


def test_counts_are_right_after_a_storm_of_aborts() -> None:
    simulation = Simulation(CONFIG, num_blocks=40)
    for i in range(80):
        simulation.submit(str(i), 10, 30, tenant=str(i % 3))
    simulation.run(20)
    for name in list(simulation.lives):
        simulation.core.finish(name, FinishReason.ABORTED)
    core = simulation.core
    assert (core.num_requests, len(core.waiting), len(core.running), core.num_waiting_tokens) == (0, 0, 0, 0)
    assert core.kv.pool.num_held_blocks == 0
    assert sum(core.count_waiting().values()) == 0
    for tenant in core.tenants.values():
        assert (tenant.num_running, tenant.num_waiting) == (0, 0)


def test_blocks_are_taken_from_the_tenant_that_holds_more_than_its_share_of_them() -> None:
    simulation = Simulation(SchedulerConfig(block_size=4), num_blocks=21, depth=1)
    simulation.submit("large-and-old", 40, 40, tenant="large")
    for i in range(2):
        simulation.submit(f"small-{i}", 8, 24, tenant="small")
    simulation.run(20)
    victims = {one.request.request_id for plan in simulation.plans for one in plan.preempted}
    assert victims == {"large-and-old"}
    simulation.run_until_idle()
    assert all(life.reason is FinishReason.LENGTH for life in simulation.of(""))


def test_blocks_that_a_running_prompt_will_need_are_promised_to_nobody_else() -> None:
    simulation = Simulation(SchedulerConfig(max_num_batched_tokens=16, block_size=4), num_blocks=21)
    simulation.submit("long", 60, 2)
    simulation.submit("behind", 40, 2)
    simulation.run_until_idle()
    assert simulation.core.stats.num_preemptions == 0
    assert simulation.num_row_tokens == 60 + 40 + 2


def test_large_request_is_not_passed_over_for_ever_by_small_ones_of_other_tenants() -> None:
    simulation = Simulation(SchedulerConfig(max_num_batched_tokens=64), num_blocks=40, depth=1)
    for tenant in "ab":
        simulation.keep_waiting(tenant, 10, 16, 40)
    simulation.run(50)
    large = simulation.submit("large", 480, 4, tenant="large")
    assert simulation.run_until(large, max_steps=400).reason is FinishReason.LENGTH


def test_oldest_request_of_a_tenant_is_sent_away_a_few_times_at_most() -> None:
    simulation = Simulation(SchedulerConfig(max_num_batched_tokens=64, block_size=4), num_blocks=21, depth=1)
    old = simulation.submit("old", 8, 60, tenant="old")
    for i in range(80):
        simulation.step()
        if i % 3 == 0:
            simulation.submit(f"new-{i}", 8, 8, tenant=f"tenant-{i % 7}")
    assert old.reason is FinishReason.LENGTH
    assert old.request.num_preemptions <= 3


def test_prompt_that_is_computed_again_is_not_charged_again() -> None:
    simulation = Simulation(SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, ageing_s=0.0), depth=1)
    low = simulation.submit("low", 400, 4, tenant="low", priority_class=2)
    simulation.run(8)
    urgent = simulation.submit("urgent", 8, 4, tenant="urgent")
    simulation.step()
    assert low.request.num_preemptions == 1
    simulation.core.kv.pool.flush()
    served = [simulation.served("low")]
    while low.end_step is None:
        simulation.step()
        served.append(simulation.served("low"))
    assert served == sorted(served)
    assert served[0] == 4 * 64
    assert served[-1] == 400 + 4
    assert simulation.core.stats.num_computed_tokens == 4 * 64 + 400 + 3 + 8 + 3
    assert urgent.reason is FinishReason.LENGTH
