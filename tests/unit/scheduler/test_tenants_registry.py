"""Tenants: counters, shares, token buckets."""

import pytest

from tokenloom.scheduler.core.tenants import Tenant, TenantPolicy, Tenants, TokenBucket


def with_requests(tenants: Tenants, name: str, *, num_running: int = 0, num_waiting: int = 0) -> Tenant:
    tenant = tenants.get(name)
    tenants.join(tenant)
    tenant.num_running, tenant.num_waiting = num_running, num_waiting
    tenants.note_alive(tenant)
    return tenant


def test_counter_rises_by_charge_over_weight() -> None:
    tenants = Tenants()
    tenants.define("a", TenantPolicy(weight=4.0))
    tenant = tenants.get("a")
    tenants.serve(tenant, 10, charge=2.0)
    assert (tenant.counter, tenant.num_served_tokens) == (5.0, 10)


def test_tenant_that_joins_the_queue_is_lifted_to_the_lowest_counter_in_it() -> None:
    tenants = Tenants()
    for name, counter in (("a", 70.0), ("b", 50.0)):
        with_requests(tenants, name, num_waiting=1).counter = counter
    assert with_requests(tenants, "c", num_waiting=1).counter == 50.0


def test_tenant_with_a_higher_counter_than_that_keeps_it() -> None:
    tenants = Tenants()
    with_requests(tenants, "a", num_waiting=1).counter = 50.0
    tenants.get("b").counter = 80.0
    assert with_requests(tenants, "b", num_waiting=1).counter == 80.0


def test_tenant_that_waits_already_is_not_lifted() -> None:
    tenants = Tenants()
    with_requests(tenants, "a", num_waiting=1).counter = 50.0
    late = tenants.get("b")
    late.num_waiting = 1
    tenants.join(late)
    assert late.counter == 0.0


def test_with_an_empty_queue_the_present_counter_of_who_left_it_last_counts() -> None:
    tenants = Tenants()
    first = with_requests(tenants, "a", num_running=1)
    tenants.note_left_queue(first)
    tenants.serve(first, 100, charge=2.0)
    assert with_requests(tenants, "b", num_waiting=1).counter == 200.0


def test_stream_of_new_tenants_does_not_hold_back_one_that_is_ahead() -> None:
    tenants = Tenants()
    ahead = with_requests(tenants, "ahead", num_waiting=1)
    ahead.counter = 1000.0
    for i in range(1000):
        fresh = with_requests(tenants, f"fresh-{i}", num_waiting=1)
        if fresh.counter > ahead.counter:
            return
        tenants.serve(fresh, 5, charge=2.0)
        fresh.num_waiting = 0
        tenants.note_left_queue(fresh)
        tenants.note_ended(fresh)
    raise AssertionError("the tenant that is ahead never comes first")


def test_share_is_by_weight_among_those_alive_and_at_least_one() -> None:
    tenants = Tenants()
    tenants.define("heavy", TenantPolicy(weight=3.0))
    heavy = with_requests(tenants, "heavy", num_running=1)
    light = with_requests(tenants, "light", num_running=1)
    assert (tenants.share(heavy, 100), tenants.share(light, 100)) == (75.0, 25.0)
    assert tenants.share(light, 2) == 1.0
    newcomer = tenants.get("new")
    assert tenants.share(newcomer, 100, newcomer) == 20.0
    light.num_running = 0
    tenants.note_ended(light)
    assert tenants.share(heavy, 100) == 100.0


def test_a_new_weight_counts_at_once() -> None:
    tenants = Tenants()
    a, b = with_requests(tenants, "a", num_running=1), with_requests(tenants, "b", num_running=1)
    tenants.define("a", TenantPolicy(weight=9.0))
    assert (tenants.share(a, 100), tenants.share(b, 100)) == (90.0, 10.0)


def test_over_share_takes_the_worse_of_rows_and_blocks_and_nobody_is_over_it_alone() -> None:
    tenants = Tenants()
    a = with_requests(tenants, "a", num_running=4)
    a.num_held_blocks = 90
    assert tenants.over_share(a, 4, 100) == 0.0
    with_requests(tenants, "b", num_waiting=1)
    assert tenants.over_share(a, 16, 100) == pytest.approx(1.8)
    assert tenants.over_share(a, 4, 1000) == pytest.approx(2.0)
    assert tenants.over_share(a, 16, 1000) == 0.0


def test_bucket_starts_full_and_fills_evenly_up_to_a_minute() -> None:
    bucket = TokenBucket(60, 60.0, updated_s=100.0)
    assert bucket.wait_s(60, 100.0) == 0.0
    bucket.take(60)
    assert bucket.wait_s(15, 100.0) == pytest.approx(15.0)
    assert bucket.wait_s(15, 110.0) == pytest.approx(5.0)
    assert bucket.wait_s(15, 115.0) == 0.0
    assert bucket.wait_s(60, 100_000.0) == 0.0
    bucket.take(90)
    assert bucket.wait_s(1, 100_000.0) == pytest.approx(31.0), "no more than a minute's worth is saved, debts are paid"


def test_more_than_a_full_bucket_may_be_taken_from_a_full_one() -> None:
    bucket = TokenBucket(60, 60.0, updated_s=0.0)
    assert bucket.wait_s(1000, 0.0) == 0.0
    bucket.take(1000)
    assert bucket.wait_s(1000, 0.0) == pytest.approx(1000.0)


def test_time_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(60, 0.0, updated_s=100.0)
    assert bucket.wait_s(1, 50.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 100.5) == pytest.approx(0.5)


def test_policy_without_a_new_rate_keeps_the_bucket() -> None:
    tenants = Tenants()
    tenants.define("a", TenantPolicy(max_tokens_per_minute=60))
    bucket = tenants.bucket_of(tenants.get("a"), 0.0)
    assert bucket is not None
    bucket.take(60)
    tenants.define("a", TenantPolicy(weight=2.0, max_tokens_per_minute=60))
    assert tenants.bucket_of(tenants.get("a"), 0.0) is bucket
    tenants.define("a", TenantPolicy(max_tokens_per_minute=120))
    assert bucket.wait_s(60, 0.0) == pytest.approx(30.0), "a higher limit fills it faster, not at once"
    tenants.define("a", TenantPolicy(max_tokens_per_minute=30))
    assert bucket.wait_s(30, 1000.0) == 0.0
    assert bucket.level == 30.0


def test_idle_tenants_are_forgotten_but_not_defined_or_living_ones() -> None:
    tenants = Tenants()
    tenants.define("defined", TenantPolicy(weight=2.0))
    alive = with_requests(tenants, "alive", num_waiting=1)
    for i in range(20_000):
        tenants.get(f"passer-by-{i}")
    assert len(tenants.by_name) < 5_000
    assert tenants.get("alive") is alive
    assert tenants.get("defined").policy.weight == 2.0
