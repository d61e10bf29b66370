"""Prometheus metrics of the scheduler; meanings as those of vLLM's metrics of the same names.

What the core counts anyway, and every gauge, is read when the page is asked for (engine_collector.py): that costs a
step nothing, and is right also when nothing steps. What happens to requests is counted here as it happens; what
happens to every row of every step is counted for all rows at once (`BulkHistogram`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from tokenloom.common.metrics import REGISTRY, SECONDS_BUCKETS


class BulkHistogram(Collector):
    """A histogram that takes many equal values in one call.

    Args:
        name, documentation: as in other metrics.
        buckets: upper bounds, rising; what is above the last one counts in +Inf.
    """

    def __init__(self, name: str, documentation: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value` so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The histogram as of now."""
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


def _seconds(name: str, documentation: str) -> Histogram:
    return Histogram(name, documentation, buckets=SECONDS_BUCKETS, registry=REGISTRY)


PROMPT_TOKENS = Counter("tokenloom_prompt_tokens", "Prompt tokens of requests that ran.", registry=REGISTRY)
GENERATION_TOKENS = Counter("tokenloom_generation_tokens", "Tokens generated.", registry=REGISTRY)
FINISHED = Counter(
    "tokenloom_request_success", "Requests that ended, by reason.", ["finished_reason"], registry=REGISTRY
)
REFUSED = Counter(
    "tokenloom_requests_refused", "Requests that were not taken, by reason.", ["reason"], registry=REGISTRY
)
EXECUTOR_LOSSES = Counter("tokenloom_executor_losses", "Times the executor was lost.", registry=REGISTRY)
KEPT_REQUESTS = Gauge(
    "tokenloom_num_finished_requests_kept", "Resumable requests that ended and can still be read.", registry=REGISTRY
)
KEPT_BYTES = Gauge("tokenloom_finished_requests_kept_bytes", "Memory that these take, roughly.", registry=REGISTRY)
QUEUE_TIME = _seconds("tokenloom_request_queue_time_seconds", "Taken to first step.")
TIME_TO_FIRST_TOKEN = _seconds("tokenloom_engine_time_to_first_token_seconds", "Submit to first token, in the engine.")
INTER_TOKEN_LATENCY = BulkHistogram(
    "tokenloom_engine_inter_token_latency_seconds",
    "Time between two tokens of a request, in the engine.",
    SECONDS_BUCKETS,
    REGISTRY,
)
TIME_PER_OUTPUT_TOKEN = _seconds(
    "tokenloom_engine_request_time_per_output_token_seconds", "Mean time between the tokens of a request that ended."
)
REQUEST_TIME = _seconds("tokenloom_engine_e2e_request_latency_seconds", "Submit to end, in the engine.")
STEP_TOKENS = Histogram(
    "tokenloom_iteration_tokens", "Tokens per step.", buckets=[2**i for i in range(14)], registry=REGISTRY
)
STEP_TIME = _seconds("tokenloom_step_seconds", "Plan sent to result applied.")
