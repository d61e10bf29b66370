"""The gateway's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from tokenloom.common.metrics import REGISTRY, SECONDS_BUCKETS

REQUESTS = Counter(
    "tokenloom_gateway_requests_total",
    "HTTP requests answered.",
    ["route", "status"],
    registry=REGISTRY,
)
IN_FLIGHT = Gauge(
    "tokenloom_gateway_requests_in_flight",
    "HTTP requests being answered, by route.",
    ["route"],
    registry=REGISTRY,
)
DURATION = Histogram(
    "tokenloom_gateway_request_duration_seconds",
    "From a request's head to the last byte of its answer.",
    ["route"],
    buckets=SECONDS_BUCKETS,
    registry=REGISTRY,
)
TIME_TO_FIRST_TOKEN = Histogram(
    "tokenloom_gateway_time_to_first_token_seconds",
    "From a request's head to its first generated text in the gateway.",
    ["route"],
    buckets=SECONDS_BUCKETS,
    registry=REGISTRY,
)
PROMPT_TOKENS = Counter(
    "tokenloom_gateway_prompt_tokens_total", "Prompt tokens of completed requests.", registry=REGISTRY
)
GENERATED_TOKENS = Counter(
    "tokenloom_gateway_generation_tokens_total", "Generated tokens of completed requests.", registry=REGISTRY
)
ENDED_EARLY = Counter(
    "tokenloom_gateway_requests_ended_early_total",
    "Generations that did not complete, by reason (lower-case reason of the error).",
    ["reason"],
    registry=REGISTRY,
)
CONNECTIONS = Gauge("tokenloom_gateway_connections", "HTTP connections that are open.", registry=REGISTRY)
CONNECTIONS_CUT = Counter(
    "tokenloom_gateway_connections_cut_total",
    "HTTP connections that the gateway ended, by reason: head_timeout, head_too_large, slow_reader (took nothing of "
    "what was written), idle (others needed the room), no_room (all were busy).",
    ["reason"],
    registry=REGISTRY,
)
SESSIONS = Gauge(
    "tokenloom_gateway_tokenizer_session",
    "1 while a session with this tokenizer is open.",
    ["address"],
    registry=REGISTRY,
)
RETURNS = Counter(
    "tokenloom_gateway_returns_total", "Resumable streams that clients asked for the rest of.", registry=REGISTRY
)
RESUBMISSIONS = Counter(
    "tokenloom_gateway_resubmissions_total", "Requests sent again after their session was lost.", registry=REGISTRY
)
