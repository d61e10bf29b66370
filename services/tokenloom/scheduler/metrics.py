"""Prometheus metrics of the scheduler; meanings as those of vLLM's metrics of the same names."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from tokenloom.common.metrics import REGISTRY, SECONDS_BUCKETS
from tokenloom.scheduler.core.scheduler import Scheduler

PROMPT_TOKENS = Counter("tokenloom_prompt_tokens", "Prompt tokens of accepted requests.", registry=REGISTRY)
GENERATION_TOKENS = Counter("tokenloom_generation_tokens", "Tokens generated.", registry=REGISTRY)
PREEMPTIONS = Counter("tokenloom_num_preemptions", "Requests that lost their blocks.", registry=REGISTRY)
PREFIX_QUERIES = Counter("tokenloom_prefix_cache_queries", "Prompt tokens looked up.", registry=REGISTRY)
PREFIX_HITS = Counter("tokenloom_prefix_cache_hits", "Prompt tokens found in the cache.", registry=REGISTRY)
WASTED_ROWS = Counter("tokenloom_wasted_rows", "Rows computed for requests that had ended.", registry=REGISTRY)
FINISHED = Counter(
    "tokenloom_request_success", "Requests that ended, by reason.", ["finished_reason"], registry=REGISTRY
)
REFUSED = Counter("tokenloom_requests_refused", "Requests that were not taken.", registry=REGISTRY)
EXECUTOR_LOSSES = Counter("tokenloom_executor_losses", "Times the executor was lost.", registry=REGISTRY)
QUEUE_TIME = Histogram(
    "tokenloom_request_queue_time_seconds", "Submit to first step.", buckets=SECONDS_BUCKETS, registry=REGISTRY
)
TIME_TO_FIRST_TOKEN = Histogram(
    "tokenloom_engine_time_to_first_token_seconds",
    "Submit to first token, in the engine.",
    buckets=SECONDS_BUCKETS,
    registry=REGISTRY,
)
REQUEST_TIME = Histogram(
    "tokenloom_engine_e2e_request_latency_seconds",
    "Submit to end, in the engine.",
    buckets=SECONDS_BUCKETS,
    registry=REGISTRY,
)
STEP_TOKENS = Histogram(
    "tokenloom_iteration_tokens", "Tokens per step.", buckets=[2**i for i in range(14)], registry=REGISTRY
)
STEP_TIME = Histogram(
    "tokenloom_step_seconds", "Plan sent to result applied.", buckets=SECONDS_BUCKETS, registry=REGISTRY
)
_RUNNING = Gauge("tokenloom_num_requests_running", "Requests in the running set.", registry=REGISTRY)
_WAITING = Gauge("tokenloom_num_requests_waiting", "Requests that wait.", registry=REGISTRY)
_CACHE_USAGE = Gauge("tokenloom_kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.", registry=REGISTRY)


def watch_engine(core: Callable[[], Scheduler | None]) -> None:
    """Let the gauges read the core when they are scraped, so that they are right also when nothing steps."""

    def read(value: Callable[[Scheduler], float]) -> Callable[[], float]:
        return lambda: 0.0 if (now := core()) is None else value(now)

    _RUNNING.set_function(read(lambda now: len(now.running)))
    _WAITING.set_function(read(lambda now: len(now.waiting)))
    _CACHE_USAGE.set_function(read(lambda now: now.kv.pool.num_held_blocks / (now.kv.pool.num_blocks - 1)))
