"""What the gateway knows about an HTTP request while it is answered."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from dataclasses import dataclass, field

from opentelemetry import trace
from starlette.types import Scope

from tokenloom.common.errors import TokenloomError
from tokenloom.gateway import metrics

HEX_ID = re.compile(r"[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}", re.ASCII)
"""What `new_hex_id` makes."""
_KEY = "request_info"


@dataclass(slots=True)
class RequestInfo:
    """One HTTP request.

    Attributes:
        hex_id: unique; the completion's id is made from it, so it is found in every stage's log. That of the first
            request, if its client is back for the rest of its stream.
        public_id: value of the x-request-id response header: the caller's own, else `hex_id`.
        span: the request's server span.
        started_s: `time.perf_counter` at the request's head.
        key_digest: SHA-256 of the caller's key; empty if it sent none.
        status: HTTP status of the answer; 0 before it started.
        first_token_s: seconds from the start to the first token; None before it.
        error: what ended a generation early.
    """

    hex_id: str
    public_id: str
    span: trace.Span
    started_s: float = field(default_factory=time.perf_counter)
    key_digest: bytes = b""
    status: int = 0
    first_token_s: float | None = None
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: TokenloomError | None = None
    route: str = "unknown"

    def elapsed_s(self) -> float:
        """Seconds since the request's head."""
        return time.perf_counter() - self.started_s

    def mark_first_token(self) -> None:
        """The first token is here."""
        self.first_token_s = self.elapsed_s()
        metrics.TIME_TO_FIRST_TOKEN.labels(self.route).observe(self.first_token_s)


def new_hex_id() -> str:
    """32 hexadecimal digits that nobody had before, and that tell when that was.

    Source: UUIDv7, RFC 9562, section 5.7.
    """
    time_ms = time.time_ns() // 1_000_000
    value = time_ms << 80 | 0x7 << 76 | secrets.randbits(12) << 64 | 0b10 << 62 | secrets.randbits(62)
    return f"{value:032x}"


def created_s_of(hex_id: str) -> int:
    """When an id was made, in seconds since the epoch; the same at every gateway."""
    return int(hex_id[:12], 16) // 1000


def seed_of(request_id: str) -> int:
    """The seed of a request that names none, a function of its id: 63 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") >> 1


def attach(scope: Scope, info: RequestInfo) -> None:
    """Make `info` that of the request."""
    scope.setdefault("state", {})[_KEY] = info


def info_of(scope: Scope) -> RequestInfo:
    """The request's info."""
    info = scope["state"][_KEY]
    assert isinstance(info, RequestInfo)
    return info
