"""What a scrape shows: bulk histograms, the core as it is now, tenants in a bounded number of labels."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.registry import Collector

from tokenloom.scheduler.core.config import SchedulerConfig
from tokenloom.scheduler.core.plan import ModelOutput, RowOutput
from tokenloom.scheduler.core.request import FinishReason, Request
from tokenloom.scheduler.core.scheduler import Scheduler
from tokenloom.scheduler.core.tenants import Tenant
from tokenloom.scheduler.engine_collector import EngineCollector, TenantLabels
from tokenloom.scheduler.metrics import BulkHistogram

Samples = dict[tuple[str, str], float]


def samples_of(collector: Collector) -> Samples:
    """Values by name and by the values of the labels."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }


@pytest.mark.parametrize("value", [-1.0, 0.0, 0.1, 0.11, 0.5, 2.0, 2.5])
def test_a_value_counted_in_bulk_looks_as_if_it_were_observed_one_by_one(value: float) -> None:
    plain_registry, bulk_registry, buckets = CollectorRegistry(), CollectorRegistry(), (0.1, 0.5, 2.0)
    plain = Histogram("x_seconds", "Text.", buckets=buckets, registry=plain_registry)
    bulk = BulkHistogram("x_seconds", "Text.", buckets, bulk_registry)
    for _ in range(300):
        plain.observe(value)
    bulk.observe(value, 299)
    bulk.observe(value)

    def lines(registry: CollectorRegistry) -> list[bytes]:
        page = generate_latest(registry).splitlines()
        return [line for line in page if b"_created" not in line and not line.startswith(b"x_seconds_sum")]

    assert lines(bulk_registry) == lines(plain_registry)
    total = bulk_registry.get_sample_value("x_seconds_sum")
    assert total == pytest.approx(plain_registry.get_sample_value("x_seconds_sum"))


def test_without_a_core_all_gauges_are_zero() -> None:
    samples = samples_of(EngineCollector())
    assert samples[("tokenloom_num_requests_running", "")] == 0
    assert samples[("tokenloom_num_requests_waiting_by_reason", "prefix")] == 0
    assert not any(samples.values())


def test_gauges_are_those_of_the_core_at_the_time_of_the_scrape() -> None:
    core = Scheduler(SchedulerConfig(max_num_seqs=2, block_size=4), num_blocks=11)
    collector = EngineCollector()
    collector.watch(lambda: core, max_tenants=0)
    for number, prompt in enumerate(([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [9])):
        core.add_request(Request(str(number), list(prompt), 4))
    plan = core.schedule()
    assert plan is not None
    before = samples_of(collector)
    assert before[("tokenloom_num_requests_running", "")] == 2
    assert before[("tokenloom_num_requests_waiting", "")] == 1
    assert before[("tokenloom_num_requests_waiting_by_reason", "prefix")] == 1, "it waits for the first one's block"
    assert before[("tokenloom_num_waiting_tokens", "")] == 5
    assert before[("tokenloom_kv_cache_usage_perc", "")] == 3 / 10
    assert before[("tokenloom_prefix_cache_queries_total", "")] == 6
    core.update(ModelOutput(plan.step_id, {row.row_id: RowOutput([7]) for row in plan.rows}))
    for number in range(3):
        core.finish(str(number), FinishReason.ABORTED)
    after = samples_of(collector)
    for name in ("num_requests_running", "num_requests_waiting", "num_waiting_tokens", "kv_cache_usage_perc"):
        assert after[(f"tokenloom_{name}", "")] == 0, name
    assert after[("tokenloom_computed_tokens_total", "")] == 6
    assert not any("tenant" in name for name, _ in after), "off by default"


def tenants(**numbers: tuple[int, int, int]) -> dict[str, Tenant]:
    made = {}
    for name, (num_served, num_running, num_waiting) in numbers.items():
        made[name] = tenant = Tenant(name)
        tenant.num_served_tokens, tenant.num_running, tenant.num_waiting = num_served, num_running, num_waiting
    return made


class _Shown(Collector):
    def __init__(self, labels: TenantLabels, now: dict[str, Tenant]) -> None:
        self._labels, self._now = labels, now

    def collect(self):  # type: ignore[no-untyped-def]
        return self._labels.families(self._now)


def shown(labels: TenantLabels, now: dict[str, Tenant]) -> dict[str, tuple[float, float, float]]:
    """Tokens served, running, waiting by label."""
    samples = samples_of(_Shown(labels, now))
    return {
        label: (
            value,
            samples[("tokenloom_tenant_requests_running", label)],
            samples[("tokenloom_tenant_requests_waiting", label)],
        )
        for (name, label), value in samples.items()
        if name == "tokenloom_tenant_tokens_total"
    }


def test_tenants_beyond_the_first_ones_are_summed() -> None:
    labels = TenantLabels(2)
    now = tenants(a=(10, 1, 0), b=(20, 2, 3), c=(5, 1, 1), d=(7, 0, 4))
    assert shown(labels, now) == {"a": (10, 1, 0), "b": (20, 2, 3), "other": (12, 1, 5)}


def test_ten_thousand_tenants_make_no_more_labels() -> None:
    labels = TenantLabels(3)
    for start in range(0, 10_000, 1000):
        now = tenants(**{f"t{number}": (1, 0, 0) for number in range(start, start + 1000)})
        assert len(shown(labels, now)) <= 4
    assert shown(labels, {}) == {"t0": (1, 0, 0), "t1": (1, 0, 0), "t2": (1, 0, 0), "other": (9997, 0, 0)}


def test_totals_never_fall_when_the_core_forgets_a_tenant_and_meets_it_again() -> None:
    labels = TenantLabels(1)
    assert shown(labels, tenants(a=(10, 1, 0), b=(4, 1, 0)))["other"] == (4, 1, 0)
    assert shown(labels, tenants(a=(12, 0, 0))) == {"a": (12, 0, 0), "other": (4, 0, 0)}
    assert shown(labels, tenants(b=(3, 0, 2))) == {"a": (12, 0, 0), "other": (7, 0, 2)}
    assert shown(labels, tenants(a=(1, 1, 0))) == {"a": (13, 1, 0), "other": (7, 0, 0)}


def test_names_that_mean_something_to_the_page_are_not_given_to_tenants() -> None:
    shown_now = shown(TenantLabels(5), {"": Tenant("", num_running=1), "other": Tenant("other", num_running=2)})
    assert shown_now == {"(none)": (0, 1, 0), "other": (0, 2, 0)}
