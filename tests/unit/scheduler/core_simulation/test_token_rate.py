"""Tokens per minute: a tenant gets no more than its limit, and a refusal says truly when to come back."""

from collections import Counter
from itertools import count

import pytest

from tests.unit.scheduler.core_simulation.simulation import Simulation
from tokenloom.scheduler.core.request import FinishReason, RequestRefused
from tokenloom.scheduler.core.scheduler import SchedulerConfig
from tokenloom.scheduler.core.tenants import TenantPolicy

PER_MINUTE = 600


def limited(per_minute: int = PER_MINUTE, step_s: float = 0.25) -> Simulation:
    simulation = Simulation(SchedulerConfig(8, 256), step_s=step_s)
    simulation.core.set_tenant("limited", TenantPolicy(max_tokens_per_minute=per_minute))
    return simulation


def refused_for(simulation: Simulation, name: str, num_prompt_tokens: int = 50) -> float:
    """Seconds after which to come back."""
    with pytest.raises(RequestRefused) as refused:
        simulation.submit(name, num_prompt_tokens, 10, tenant="limited")
    assert refused.value.reason == "TOKEN_RATE"
    assert refused.value.is_overload
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s > 0
    return refused.value.retry_after_s


def use_up(simulation: Simulation, num_prompt_tokens: int = 50, num_output_tokens: int = 10) -> int:
    """Submit until one is refused and let them end; how many were taken."""
    num_taken = 0
    while not simulation.try_submit(f"used-{len(simulation.lives)}", num_prompt_tokens, num_output_tokens, "limited"):
        num_taken += 1
    simulation.run_until_idle()
    return num_taken


@pytest.mark.parametrize(("num_prompt_tokens", "num_output_tokens"), [(50, 10), (5, 60), (200, 1)])
def test_an_eager_tenant_gets_its_limit_and_not_more(num_prompt_tokens: int, num_output_tokens: int) -> None:
    simulation = limited()
    tokens_by_minute: Counter[int] = Counter()
    names = count()
    for _ in range(60 * 60 * 4):
        reason = simulation.try_submit(f"{next(names)}", num_prompt_tokens, num_output_tokens, "limited")
        assert reason in ("", "TOKEN_RATE")
        before = simulation.served("limited")
        simulation.step()
        tokens_by_minute[int(simulation.now_s // 60)] += simulation.served("limited") - before
    in_flight = 8 * num_output_tokens
    assert sum(tokens_by_minute.values()) <= 60 * PER_MINUTE + PER_MINUTE + in_flight
    assert sum(tokens_by_minute.values()) >= 0.95 * 60 * PER_MINUTE
    steady = [tokens for minute, tokens in tokens_by_minute.items() if 2 <= minute < 59]
    assert max(steady) <= PER_MINUTE + num_prompt_tokens + in_flight
    assert sum(steady) <= PER_MINUTE * len(steady) + num_prompt_tokens + in_flight


@pytest.mark.parametrize("num_prompt_tokens", [1, 50, 599, 600, 2000])
def test_a_refused_request_is_taken_after_the_time_told_and_not_before(num_prompt_tokens: int) -> None:
    simulation = limited()
    use_up(simulation)
    if num_prompt_tokens == 1:
        use_up(simulation, 1, 1)
    wait_s = refused_for(simulation, "again", num_prompt_tokens)
    simulation.now_s += wait_s * 0.98
    assert refused_for(simulation, "again", num_prompt_tokens) <= wait_s * 0.03
    simulation.now_s += wait_s * 0.02 + 1e-6
    life = simulation.submit("again", num_prompt_tokens, 10, tenant="limited")
    assert simulation.run_until(life).reason is FinishReason.LENGTH


def test_first_minute_is_there_at_once() -> None:
    assert use_up(limited(), num_prompt_tokens=100) == PER_MINUTE // 100


def test_others_and_resubmissions_are_not_limited() -> None:
    simulation = limited()
    use_up(simulation)
    refused_for(simulation, "refused")
    simulation.submit("other", 500, tenant="other")
    simulation.submit("again", 500, 10, tenant="limited", age_s=3.0, resumed=4)
    simulation.run_until_idle()
    assert simulation.lives["again"].reason is FinishReason.LENGTH


def test_waiting_for_long_saves_up_one_minute_only() -> None:
    simulation = limited()
    simulation.submit("first", tenant="limited")
    simulation.now_s += 3600.0
    assert use_up(simulation, num_prompt_tokens=100) == PER_MINUTE // 100


def test_requests_that_were_refused_displaced_or_aborted_before_they_ran_use_up_no_tokens() -> None:
    simulation = Simulation(SchedulerConfig(1, 256, max_num_waiting=2))
    simulation.core.set_tenant("limited", TenantPolicy(max_tokens_per_minute=PER_MINUTE))
    simulation.submit("running", 8, 400, tenant="other")
    simulation.step()
    for i in range(2):
        simulation.submit(f"limited-{i}", 100, tenant="limited")
    for i in range(20):
        with pytest.raises(RequestRefused) as refused:
            simulation.submit(f"refused-{i}", 100, tenant="limited")
        assert refused.value.reason == "QUEUE_FULL"
    simulation.submit("other", 8, 4, tenant="other")
    displaced = [life for life in simulation.of("limited-") if life.reason is FinishReason.ERROR]
    assert len(displaced) == 1
    simulation.core.finish("other", FinishReason.ABORTED)
    simulation.core.finish("limited-0", FinishReason.ABORTED)
    assert len(simulation.core.waiting) == 0
    simulation.submit("all of it", PER_MINUTE, tenant="limited")
    assert refused_for(simulation, "too much", 20) > 0


def test_a_new_limit_holds_from_then_on() -> None:
    simulation = limited()
    use_up(simulation)
    refused_for(simulation, "a", 100)
    simulation.core.set_tenant("limited", TenantPolicy())
    simulation.run_until(simulation.submit("b", 5000, tenant="limited"))
    simulation.core.set_tenant("limited", TenantPolicy(max_tokens_per_minute=100))
    simulation.now_s += 60.0
    simulation.submit("c", 100, 1, tenant="limited")
    refused_for(simulation, "d", 100)
