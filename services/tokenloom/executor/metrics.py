"""Prometheus metrics of the executor stage."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from tokenloom.common.metrics import REGISTRY, SECONDS_BUCKETS

STEPS = Counter("tokenloom_executor_steps", "Plans executed.", registry=REGISTRY)
STEP_ERRORS = Counter("tokenloom_executor_step_errors", "Plans that failed as a whole.", registry=REGISTRY)
ROW_ERRORS = Counter("tokenloom_executor_row_errors", "Rows reported as failed.", registry=REGISTRY)
TOKENS = Counter("tokenloom_executor_tokens", "Tokens computed.", registry=REGISTRY)
SAMPLED_TOKENS = Counter("tokenloom_executor_sampled_tokens", "Tokens sampled.", registry=REGISTRY)
STEP_SECONDS = Histogram(
    "tokenloom_executor_step_seconds", "Time of a step.", buckets=SECONDS_BUCKETS, registry=REGISTRY
)
ROWS = Gauge("tokenloom_executor_rows", "Rows that are known.", registry=REGISTRY)
EPOCHS = Counter("tokenloom_executor_epochs", "Calls of Initialize.", registry=REGISTRY)
