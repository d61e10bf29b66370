"""A full queue is shared; refusals say why and when to come back."""

import pytest

from tests.unit.scheduler.core_simulation.simulation import Simulation
from tokenloom.scheduler.core.request import FinishReason, RequestRefused
from tokenloom.scheduler.core.scheduler import SchedulerConfig, SchedulingPolicy
from tokenloom.scheduler.core.tenants import TenantPolicy


def full_queue(policy: SchedulingPolicy = SchedulingPolicy.FAIR, max_num_waiting: int = 6) -> Simulation:
    """Two requests of `flood` run and `max_num_waiting` wait."""
    simulation = Simulation(SchedulerConfig(2, 64, max_num_waiting=max_num_waiting, policy=policy))
    for i in range(2):
        simulation.submit(f"running-{i}", 8, 100, tenant="flood")
    simulation.step()
    for i in range(max_num_waiting):
        simulation.submit(f"flood-{i}", 8, 8, tenant="flood")
    return simulation


def refusal(
    simulation: Simulation, name: str = "refused", num_prompt_tokens: int = 8, **options: str
) -> RequestRefused:
    """Why a request is refused, which changes nothing."""
    core = simulation.core

    def counts() -> list[object]:
        return [core.num_requests, len(core.waiting), core.num_waiting_tokens, dict(core.count_waiting())]

    before = counts()
    with pytest.raises(RequestRefused) as refused:
        simulation.submit(name, num_prompt_tokens, **options)  # type: ignore[arg-type]
    assert counts() == before
    assert refused.value.is_overload
    return refused.value


def test_full_queue_refuses_the_tenant_that_fills_it() -> None:
    refused = refusal(full_queue(), tenant="flood")
    assert refused.reason == "QUEUE_FULL"
    assert refused.retry_after_s is None or refused.retry_after_s > 0


def test_light_tenant_takes_the_place_of_the_newest_request_of_the_flood() -> None:
    simulation = full_queue()
    light = simulation.submit("light", tenant="light")
    displaced = simulation.lives["flood-5"]
    assert displaced.reason is FinishReason.ERROR
    assert isinstance(displaced.error, RequestRefused)
    assert displaced.error.is_overload
    assert displaced.error.reason
    assert simulation.core.stats.num_displaced == 1
    assert len(simulation.core.waiting) == 6
    simulation.run_until_idle()
    assert light.reason is FinishReason.LENGTH
    others = [life for name, life in simulation.lives.items() if name != "flood-5"]
    assert all(life.reason is FinishReason.LENGTH for life in others)


def test_tenants_that_arrive_one_after_the_other_all_get_their_share_of_the_queue() -> None:
    simulation = full_queue(max_num_waiting=8)
    for tenant in "abc":
        for i in range(2):
            simulation.submit(f"{tenant}-{i}", tenant=tenant)
    assert [simulation.num_waiting_of(tenant) for tenant in ("flood", "a", "b", "c")] == [2, 2, 2, 2]
    assert refusal(simulation, tenant="a").reason == "QUEUE_FULL"


def test_request_that_began_or_was_submitted_again_is_never_displaced() -> None:
    simulation = Simulation(SchedulerConfig(4, 64, max_num_waiting=4, block_size=4), num_blocks=13, depth=1)
    for i in range(4):
        simulation.submit(f"began-{i}", 8, 40, tenant="flood")
    while not len(simulation.core.waiting):
        simulation.step()
    for i in range(3):
        simulation.submit(f"again-{i}", 8, 40, tenant="flood", age_s=1.0, resumed=2)
    num_waiting = len(simulation.core.waiting)
    assert num_waiting >= 4
    assert refusal(simulation, tenant="light").reason == "QUEUE_FULL"
    simulation.run_until_idle()
    assert all(life.reason is FinishReason.LENGTH for life in simulation.lives.values())


def test_plain_fcfs_displaces_nobody() -> None:
    assert refusal(full_queue(SchedulingPolicy.FCFS), tenant="light").reason == "QUEUE_FULL"


def test_queue_is_bounded_in_tokens() -> None:
    simulation = Simulation(SchedulerConfig(1, 64, max_num_waiting_tokens=100))
    simulation.submit("running", 8, 100)
    simulation.step()
    simulation.submit("first", 60)
    assert simulation.core.num_waiting_tokens == 60
    assert refusal(simulation, num_prompt_tokens=41).reason == "QUEUE_FULL"
    simulation.submit("second", 40)
    assert simulation.core.num_waiting_tokens == 100
    assert refusal(simulation, num_prompt_tokens=1).reason == "QUEUE_FULL"
    simulation.submit("again", 30, 8, age_s=1.0, resumed=3)
    assert simulation.core.num_waiting_tokens == 133
    simulation.run_until_idle()
    assert simulation.core.num_waiting_tokens == 0


def test_prompt_longer_than_the_bound_of_the_queue_is_taken_by_an_empty_one() -> None:
    simulation = Simulation(SchedulerConfig(1, 64, max_num_waiting_tokens=100))
    assert simulation.run_until(simulation.submit("long", 500)).reason is FinishReason.LENGTH


def test_tenant_has_a_queue_limit_of_its_own() -> None:
    simulation = Simulation(SchedulerConfig(1, 64))
    simulation.core.set_tenant("limited", TenantPolicy(max_num_waiting=2))
    simulation.submit("running", 8, 100, tenant="other")
    simulation.step()
    for i in range(2):
        simulation.submit(f"limited-{i}", tenant="limited")
    assert refusal(simulation, tenant="limited").reason == "TENANT_QUEUE_FULL"
    simulation.submit("again", tenant="limited", age_s=1.0)
    simulation.submit("other", tenant="other")
    simulation.run_until_idle()
    simulation.submit("limited-2", tenant="limited")


def test_limit_of_running_requests_lets_the_rest_wait() -> None:
    simulation = Simulation(SchedulerConfig(8, 64))
    simulation.core.set_tenant("limited", TenantPolicy(max_num_running=2))
    for i in range(5):
        simulation.submit(f"limited-{i}", 8, 10, tenant="limited")
    simulation.step()
    waiting = {reason.value: count for reason, count in simulation.core.count_waiting().items() if count}
    assert waiting == {"tenant_limit": 3}
    other = simulation.submit("other", 8, 4, tenant="other")
    assert simulation.run_until(other).steps_to_end <= 6
    simulation.run_until_idle()
    assert simulation.most_running["limited"] == 2
    assert all(life.reason is FinishReason.LENGTH for life in simulation.lives.values())


def test_limit_that_is_lowered_while_more_run_takes_effect_as_they_end() -> None:
    simulation = Simulation(SchedulerConfig(8, 64))
    for i in range(6):
        simulation.submit(f"limited-{i}", 8, 10 + 5 * i, tenant="limited")
    simulation.step()
    simulation.core.set_tenant("limited", TenantPolicy(max_num_running=1))
    late = simulation.submit("late", 8, 4, tenant="limited")
    simulation.run_until_idle()
    assert late.reason is FinishReason.LENGTH
    assert late.first_row_step is not None
    assert late.first_row_step >= 34, "all that ran have ended"


@pytest.mark.parametrize("order", ["fair", "fcfs"])
def test_ten_times_overload_is_answered_and_what_was_taken_ends(order: str) -> None:
    config = SchedulerConfig(4, 64, max_num_waiting=20, policy=SchedulingPolicy(order))
    simulation = Simulation(config)
    num_refused = 0
    for step in range(300):
        for tenant, num_requests in (("flood", 9), ("light", 1)):
            for i in range(num_requests if step % (1 if tenant == "flood" else 10) == 0 else 0):
                reason = simulation.try_submit(f"{tenant}-{step}-{i}", 8, 8, tenant)
                assert reason in ("", "QUEUE_FULL")
                num_refused += reason != ""
                assert not reason or tenant == "flood" or order == "fcfs"
        assert len(simulation.core.waiting) <= 20
        simulation.step()
    simulation.run_until_idle()
    assert num_refused > 1000
    displaced = [life for life in simulation.lives.values() if life.reason is FinishReason.ERROR]
    assert len(displaced) == simulation.core.stats.num_displaced
    assert all(life.request.tenant == "flood" and life.tokens == 0 for life in displaced)


def test_who_has_his_share_of_the_queue_displaces_nobody() -> None:
    simulation = full_queue(max_num_waiting=9)
    for i in range(4):
        simulation.submit(f"second-{i}", tenant="second")
    assert [simulation.num_waiting_of(tenant) for tenant in ("flood", "second")] == [5, 4]
    assert refusal(simulation, tenant="second").reason == "QUEUE_FULL"
