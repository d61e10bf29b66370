"""Settings of the scheduler stage."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.common.config import (
    ProcessSettings,
    non_negative_int,
    non_negative_seconds,
    parse_bytes,
    positive_int,
    positive_seconds,
    setting,
)


@dataclass(frozen=True)
class SchedulerSettings:
    """All settings of `tokenloom scheduler`."""

    process: ProcessSettings
    listen: str = setting("127.0.0.1:50052", "Where tokenizers connect: host:port or unix:PATH.")
    executor: str = setting("127.0.0.1:50053", "The executor's address.")
    max_num_seqs: int = setting(
        64, "Most requests that run at once; the executor's own limit may be lower.", parse=positive_int
    )
    max_num_batched_tokens: int = setting(
        512, "Token budget of a step; the executor's own limit may be lower.", parse=positive_int
    )
    max_num_waiting: int = setting(1024, "Most requests that wait; more are refused at once.", parse=positive_int)
    num_blocks: int = setting(
        0, "KV blocks to use, the null block included; 0: all that the executor has.", parse=non_negative_int
    )
    plans_in_flight: int = setting(2, "Plans that the executor has at a time, 1 to 3.", parse=positive_int)
    takeover_s: float = setting(
        10.0, "Seconds that requests of a lost session wait for a new one.", parse=non_negative_seconds
    )
    step_timeout_s: float = setting(
        120.0, "Seconds without a step's result after which the executor counts as lost.", parse=positive_seconds
    )
    record_steps: int = setting(
        256, "Steps that the flight recorder keeps in memory; 0: it is off.", parse=non_negative_int
    )
    record_bytes: int = setting(32 << 20, "Most memory that it keeps them in.", parse=parse_bytes)
    record_file: str = setting("", "Record all steps into this file; prompts and outputs are in it. Empty: none.")
    record_dir: str = setting(
        "", "Save the recorder's steps into this folder when the executor is lost or a step fails. Empty: nowhere."
    )
