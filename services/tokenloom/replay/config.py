"""Settings of `tokenloom replay` and `tokenloom record`."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.common.config import non_negative_int, positive_seconds, setting


@dataclass(frozen=True)
class ReplaySettings:
    """All settings of `tokenloom replay`."""

    file: str = setting("", "The recording.", positional=True)
    executor: str = setting("127.0.0.1:50053", "The executor's address; it must have no other scheduler.")
    cluster_token: str = setting("", "Credential between stages.", secret=True)
    logprob_tolerance: float = setting(
        -1.0, "Compare logprobs, too, and accept so large a difference; below 0: do not."
    )
    max_mismatches: int = setting(20, "Most mismatches to print; all are counted.", parse=non_negative_int)
    timeout_s: float = setting(120.0, "Seconds to wait for a result.", parse=positive_seconds)
    json: bool = setting(False, "Print the summary as JSON.")


@dataclass(frozen=True)
class RecordSettings:
    """All settings of `tokenloom record`."""

    file: str = setting("", "Where to write the recording; prompts and outputs are in it.", positional=True)
    scheduler: str = setting("127.0.0.1:50052", "The scheduler's address.")
    cluster_token: str = setting("", "Credential between stages.", secret=True)
    timeout_s: float = setting(60.0, "Seconds that it may take.", parse=positive_seconds)
