"""Settings of the tokenizer stage."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.common.config import ProcessSettings, parse_api_key, parse_bytes, positive_int, positive_seconds, setting
from tokenloom.common.model_files import EMBEDDED
from tokenloom.common.silence import MAX_HEARTBEAT_S, STALL_TIMEOUT_S


@dataclass(frozen=True)
class TokenizerConfig:
    """What the tokenizer stage is told; each field is a flag and a `TOKENLOOM_*` variable."""

    process: ProcessSettings
    model: str = setting(EMBEDDED, "Model folder, GGUF file, hub id, or `embedded`.")
    listen: str = setting("127.0.0.1:50051", "Where to serve: host:port or unix:PATH.")
    scheduler: str = setting("127.0.0.1:50052", "Address of the scheduler.")
    api_key: tuple[str, ...] = setting(
        (), "Key that clients must send; without keys the interface is open.", parse=parse_api_key, secret=True
    )
    keys_file: str = setting(
        "", "TOML file with digests of keys, their tenants, limits, classes and scopes; empty: none."
    )
    takeover_limit_s: float = setting(30.0, "Seconds that requests in flight wait for a lost scheduler to come back.")
    stall_timeout_s: float = setting(
        STALL_TIMEOUT_S,
        "Seconds of silence after which the scheduler's session counts as lost.",
        parse=positive_seconds,
    )
    heartbeat_s: float = setting(MAX_HEARTBEAT_S, "Longest silence on gateways' sessions.", parse=positive_seconds)
    max_active_choices: int = setting(4096, "Choices in flight before requests are refused.", parse=positive_int)
    max_text_bytes: int = setting(8 << 20, "Longest text to tokenise.", parse=parse_bytes)
    max_queued_text_bytes: int = setting(64 << 20, "Text that may wait to be tokenised.", parse=parse_bytes)
    encoding_cache_bytes: int = setting(32 << 20, "Memory for recent encodings.", parse=parse_bytes)
    session_outbox_bytes: int = setting(16 << 20, "Events that may wait for a slow gateway.", parse=parse_bytes)
    template_timeout_s: float = setting(5.0, "Seconds that rendering one conversation may take.")
    allow_special_tokens: bool = setting(False, "Let messages write special tokens by name; for trusted callers only.")
