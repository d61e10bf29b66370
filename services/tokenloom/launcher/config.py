"""Settings of `tokenloom serve`.

Only what a user of the whole stack sets is a flag here. Every other setting of a stage can be set by its `TOKENLOOM_*`
variable, which the stages inherit.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.common.config import (
    non_negative_int,
    non_negative_seconds,
    optional_port_number,
    parse_api_key,
    port_number,
    positive_seconds,
    setting,
)
from tokenloom.common.model_files import EMBEDDED


@dataclass(frozen=True)
class ServeSettings:
    """All settings of `tokenloom serve`."""

    host: str = setting("127.0.0.1", "Address of the HTTP server.")
    port: int = setting(8000, "Port of the HTTP server.", parse=port_number)
    grpc_port: int = setting(0, "Port of the public gRPC API on the same address; 0: none.", parse=optional_port_number)
    model: str = setting(EMBEDDED, "Folder (safetensors or one GGUF), GGUF file, hub id, or the word embedded.")
    api_key: tuple[str, ...] = setting(
        (), "Key that callers must send; none: open to everybody.", parse=parse_api_key, secret=True
    )
    keys_file: str = setting(
        "", "TOML file with digests of keys, their tenants, limits, classes and scopes; empty: none."
    )
    dtype: str = setting(
        "", "Number format of weights and KV: bfloat16, float32 or auto; empty: the executor's default."
    )
    device: str = setting("", "Where the model runs: cpu, cuda or auto; empty: the executor's default.")
    kv_cache_bytes: str = setting("", "KV memory, for example 2GiB; empty: the executor's default.")
    max_model_len: int = setting(0, "Longest sequence in tokens; 0: the model's.", parse=non_negative_int)
    max_num_seqs: int = setting(0, "Most requests that run at once; 0: the default.", parse=non_negative_int)
    max_num_batched_tokens: int = setting(0, "Token budget of a step; 0: the default.", parse=non_negative_int)
    log_level: str = setting(
        "warning", "Least severe messages that stages log.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting("console", "How log lines are written.", choices=("console", "json"))
    otlp_endpoint: str = setting("", "OpenTelemetry collector (gRPC, http://host:4317); empty: no export.")
    grace_s: float = setting(
        30.0, "Seconds that running requests get to finish when the stack is stopped.", parse=non_negative_seconds
    )
    hang_limit_s: float = setting(
        20.0,
        "Seconds without a sign of life after which a stage is killed and started again; 0: never.",
        parse=non_negative_seconds,
    )
    start_timeout_s: float = setting(
        600.0, "Seconds that all stages together may take to become ready.", parse=positive_seconds
    )
