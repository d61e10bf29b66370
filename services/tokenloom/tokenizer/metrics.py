"""Prometheus metrics of the tokenizer stage."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from tokenloom.common.metrics import REGISTRY, SECONDS_BUCKETS

REQUESTS = Counter(
    "tokenloom_tokenizer_requests_total",
    "Requests that ended, by kind (chat, complete) and outcome (completed, cancelled, or a gRPC status in lower case).",
    ["kind", "outcome"],
    registry=REGISTRY,
)
ACTIVE_REQUESTS = Gauge("tokenloom_tokenizer_active_requests", "Requests in flight.", registry=REGISTRY)
ACTIVE_CHOICES = Gauge("tokenloom_tokenizer_active_choices", "Choices in flight.", registry=REGISTRY)
PROMPT_TOKENS = Counter(
    "tokenloom_tokenizer_prompt_tokens_total", "Prompt tokens of accepted requests.", registry=REGISTRY
)
GENERATION_TOKENS = Counter(
    "tokenloom_tokenizer_generation_tokens_total", "Tokens taken from the engine.", registry=REGISTRY
)
ENCODE_SECONDS = Histogram(
    "tokenloom_tokenizer_encode_seconds",
    "Time to encode one batch of texts.",
    buckets=SECONDS_BUCKETS,
    registry=REGISTRY,
)
RENDER_SECONDS = Histogram(
    "tokenloom_tokenizer_render_seconds",
    "Time to render one conversation.",
    buckets=SECONDS_BUCKETS,
    registry=REGISTRY,
)
ENGINE_CONNECTED = Gauge(
    "tokenloom_tokenizer_engine_connected", "1 while the session to the scheduler is up.", registry=REGISTRY
)
ENGINE_RUNNING = Gauge(
    "tokenloom_tokenizer_engine_running_requests",
    "Requests that the engine runs, of all its sessions, as it said last; 0 without a session.",
    registry=REGISTRY,
)
ENGINE_WAITING = Gauge(
    "tokenloom_tokenizer_engine_waiting_requests",
    "Requests that wait in the engine, of all its sessions, as it said last; 0 without a session.",
    registry=REGISTRY,
)
ENGINE_SESSIONS = Counter(
    "tokenloom_tokenizer_engine_sessions_total", "Sessions to the scheduler that were opened.", registry=REGISTRY
)
RESUBMISSIONS = Counter(
    "tokenloom_tokenizer_resubmitted_choices_total",
    "Choices sent again because the session to the scheduler was lost.",
    registry=REGISTRY,
)
