"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.common.config import ProcessSettings, parse_api_key, parse_bytes, positive_int, positive_seconds, setting
from tokenloom.common.silence import STALL_TIMEOUT_S


@dataclass(frozen=True)
class GatewayConfig:
    """What the gateway is told at start."""

    process: ProcessSettings
    listen: str = setting("127.0.0.1:8000", "Where to serve HTTP: host:port or unix:PATH.")
    tokenizer: tuple[str, ...] = setting(
        ("127.0.0.1:50051",), "Addresses of tokenizer stages, host:port or unix:PATH; several may be comma separated."
    )
    api_key: tuple[str, ...] = setting(
        (), "Key that callers of /v1 must send; none: open.", parse=parse_api_key, secret=True
    )
    keys_file: str = setting(
        "", "TOML file with digests of keys, their tenants, limits, classes and scopes; empty: none."
    )
    metrics_from: tuple[str, ...] = setting((), "Metrics addresses of other stages, whose pages /metrics appends.")
    max_body_bytes: int = setting(16 << 20, "Largest request body, e.g. 16MiB.", parse=parse_bytes)
    max_total_body_bytes: int = setting(
        256 << 20, "Bodies of all requests in flight together; beyond it they are answered 429.", parse=parse_bytes
    )
    body_timeout_s: float = setting(60.0, "Seconds in which a request's body must have arrived.")
    max_num_requests: int = setting(4096, "Requests in flight; more are answered 429.", parse=positive_int)
    max_buffered_bytes: int = setting(
        256 << 10,
        "Text held for a client that reads slowly; beyond it, one that took nothing for 5 s loses its request.",
        parse=parse_bytes,
    )
    max_connections: int = setting(
        8192,
        "HTTP connections; beyond it the longest idle one is closed, or a new one answered 503. "
        "Never more than the limit of open files allows.",
        parse=positive_int,
    )
    head_timeout_s: float = setting(
        30.0, "Seconds in which a request's head must have arrived.", parse=positive_seconds
    )
    keep_alive_s: int = setting(75, "Seconds that a connection may wait for another request.", parse=positive_int)
    write_timeout_s: float = setting(
        60.0,
        "Seconds in which a client must take 64 KiB of what waits for it, or all; it is cut otherwise.",
        parse=positive_seconds,
    )
    max_total_buffered_bytes: int = setting(
        256 << 20,
        "Text held for all slow clients together; beyond it, those for whom most waits lose their requests.",
        parse=parse_bytes,
    )
    takeover_limit_s: float = setting(
        30.0, "Seconds that requests wait for a tokenizer when none is left, before they fail."
    )
    stall_timeout_s: float = setting(
        STALL_TIMEOUT_S,
        "Seconds of silence after which a tokenizer's session counts as lost.",
        parse=positive_seconds,
    )
    request_timeout_s: float = setting(3600.0, "Longest time that one request may take, in seconds.")

    @property
    def tokenizer_addresses(self) -> tuple[str, ...]:
        """Each tokenizer's address, in the order given."""
        return tuple(part.strip() for text in self.tokenizer for part in text.split(",") if part.strip())
