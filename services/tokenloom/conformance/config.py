"""Settings of `tokenloom conformance`."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.common.config import non_negative_seconds, positive_seconds, setting


@dataclass(frozen=True)
class ConformanceSettings:
    """All settings of `tokenloom conformance`."""

    executor: str = setting("127.0.0.1:50053", "The executor's address; it must have no other scheduler.")
    cluster_token: str = setting("", "Credential between stages.", secret=True)
    only: tuple[str, ...] = setting((), "Run this check alone.")
    list: bool = setting(False, "Print the checks and their rules, and run none.")
    timeout_s: float = setting(30.0, "Seconds to wait for any answer.", parse=positive_seconds)
    near_tie: float = setting(
        0.001,
        "Difference of the logprobs of the two most likely tokens below which an executor that is not batch invariant "
        "may choose either.",
        parse=non_negative_seconds,
    )
    json: bool = setting(False, "Print the outcomes as JSON.")
