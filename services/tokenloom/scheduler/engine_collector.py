"""Metrics read from the core when the page is asked for: right also when nothing steps, at no cost to a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenloom.common.metrics import REGISTRY
from tokenloom.scheduler.core.plan import PreemptReason
from tokenloom.scheduler.core.request import WaitReason
from tokenloom.scheduler.core.scheduler import Scheduler
from tokenloom.scheduler.core.tenants import Tenant

OTHER_TENANTS = "other"
UNNAMED_TENANT = "(none)"
# Name, documentation, attribute of SchedulerStats.
_COUNTERS = (
    ("tokenloom_num_preemptions", "Requests that lost their blocks.", "num_preemptions"),
    ("tokenloom_prefix_cache_queries", "Prompt tokens looked up.", "num_prefix_queried_tokens"),
    ("tokenloom_prefix_cache_hits", "Prompt tokens found in the cache.", "num_prefix_hit_tokens"),
    ("tokenloom_computed_tokens", "Tokens computed, recomputed ones included.", "num_computed_tokens"),
    ("tokenloom_wasted_rows", "Rows computed for requests that had ended.", "num_wasted_rows"),
    ("tokenloom_requests_displaced", "Waiting requests that gave way in a full queue.", "num_displaced"),
    ("tokenloom_requests_quarantined", "Requests that killed the executor or made steps fail.", "num_quarantined"),
)


class TenantLabels:
    """Folds tenants into a bounded set of labels: the first ones seen by name, all others as "other".

    A label once given stays, and its total never falls, also when the core forgets a tenant and meets it again.

    Args:
        max_labels: tenants that are shown by name; 0: nothing is shown at all.
    """

    def __init__(self, max_labels: int) -> None:
        self._max_labels = max_labels
        self._named: set[str] = set()
        self._seen: dict[str, int] = {}
        self._served: dict[str, int] = {}

    def families(self, tenants: Mapping[str, Tenant]) -> Iterable[Metric]:
        """Tokens served, running and waiting requests by label, as of now."""
        if not self._max_labels:
            return
        served = CounterMetricFamily("tokenloom_tenant_tokens", "Tokens computed for a tenant.", labels=["tenant"])
        running = GaugeMetricFamily("tokenloom_tenant_requests_running", "Its running requests.", labels=["tenant"])
        waiting = GaugeMetricFamily("tokenloom_tenant_requests_waiting", "Its waiting requests.", labels=["tenant"])
        num_running: dict[str, int] = dict.fromkeys(self._served, 0)
        num_waiting = dict(num_running)
        for name, tenant in tenants.items():
            label = self._label_of(name)
            num_running[label] = num_running.get(label, 0) + tenant.num_running
            num_waiting[label] = num_waiting.get(label, 0) + tenant.num_waiting
            before = self._seen.get(name, 0)
            new = tenant.num_served_tokens - before if tenant.num_served_tokens >= before else tenant.num_served_tokens
            self._served[label] = self._served.get(label, 0) + new
        self._seen = {name: tenant.num_served_tokens for name, tenant in tenants.items()}
        for label, total in self._served.items():
            served.add_metric([label], total)
            running.add_metric([label], num_running[label])
            waiting.add_metric([label], num_waiting[label])
        yield from (served, running, waiting)

    def _label_of(self, name: str) -> str:
        label = name or UNNAMED_TENANT
        if label not in self._named and label != OTHER_TENANTS and len(self._named) < self._max_labels:
            self._named.add(label)
        return label if label in self._named else OTHER_TENANTS


class EngineCollector(Collector):
    """What a scrape reads from the engine core; zeros while there is none."""

    def __init__(self) -> None:
        self._core: Callable[[], Scheduler | None] = lambda: None
        self._tenants = TenantLabels(0)

    def watch(self, core: Callable[[], Scheduler | None], max_tenants: int) -> None:
        """Read this engine's core from now on; tenants beyond the first `max_tenants` are told as one."""
        self._core = core
        self._tenants = TenantLabels(max_tenants)

    def collect(self) -> Iterable[Metric]:
        """All metrics as of now."""
        core = self._core()
        yield from _gauges(core)
        yield from _counters(core)
        if core is not None:
            yield from self._tenants.families(core.tenants)


def _gauges(core: Scheduler | None) -> Iterable[Metric]:
    num_running, num_waiting = (0, 0) if core is None else (len(core.running), len(core.waiting))
    yield GaugeMetricFamily("tokenloom_num_requests_running", "Requests in the running set.", num_running)
    yield GaugeMetricFamily("tokenloom_num_requests_waiting", "Requests that wait.", num_waiting)
    by_reason = {} if core is None else core.count_waiting()
    waiting = GaugeMetricFamily(
        "tokenloom_num_requests_waiting_by_reason", "Requests that wait, by what for.", labels=["reason"]
    )
    for reason in WaitReason:
        waiting.add_metric([reason.value], by_reason.get(reason, 0))
    yield waiting
    num_waiting_tokens = 0 if core is None else core.num_waiting_tokens
    yield GaugeMetricFamily(
        "tokenloom_num_waiting_tokens", "Tokens, prompt and output so far, of requests that wait.", num_waiting_tokens
    )
    num_suspects = 0 if core is None else len(core.suspects)
    yield GaugeMetricFamily("tokenloom_num_suspects", "Requests that may have killed the executor.", num_suspects)
    usage = 0.0 if core is None else core.kv.pool.num_held_blocks / (core.kv.pool.num_blocks - 1)
    yield GaugeMetricFamily("tokenloom_kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.", usage)


def _counters(core: Scheduler | None) -> Iterable[Metric]:
    for name, documentation, attribute in _COUNTERS:
        yield CounterMetricFamily(name, documentation, 0 if core is None else getattr(core.stats, attribute))
    preemptions = CounterMetricFamily(
        "tokenloom_num_preemptions_by_reason", "Requests that lost their blocks, by what for.", labels=["reason"]
    )
    by_reason = {} if core is None else core.stats.num_preemptions_by_reason
    for reason in PreemptReason:
        preemptions.add_metric([reason.value], by_reason.get(reason, 0))
    yield preemptions


COLLECTOR = EngineCollector()
REGISTRY.register(COLLECTOR)
