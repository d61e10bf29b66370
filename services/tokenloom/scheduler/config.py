"""Settings of the scheduler stage."""

from __future__ import annotations

import math
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
from tokenloom.common.errors import SetupError
from tokenloom.common.silence import MAX_HEARTBEAT_S, STALL_TIMEOUT_S

_MAX_PLANS_IN_FLIGHT = 3


def _plans_in_flight(text: str) -> int:
    if not 1 <= (value := int(text)) <= _MAX_PLANS_IN_FLIGHT:
        raise ValueError
    return value


def _charge(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise ValueError
    return value


@dataclass(frozen=True)
class SchedulerSettings:
    """All settings of `tokenloom scheduler`.

    Raises: SetupError if values that are fine alone do not go together.
    """

    process: ProcessSettings
    listen: str = setting("127.0.0.1:50052", "Where tokenizers connect: host:port or unix:PATH.")
    executor: str = setting("127.0.0.1:50053", "The executor's address.")
    max_num_seqs: int = setting(
        64,
        "Most requests that run at once; no more than the token budget, and the executor's own limit may be lower.",
        parse=positive_int,
    )
    max_num_batched_tokens: int = setting(
        512, "Token budget of a step; the executor's own limit may be lower.", parse=positive_int
    )
    max_num_waiting: int = setting(1024, "Most requests that wait; more are refused at once.", parse=positive_int)
    max_num_waiting_tokens: int = setting(
        1_000_000, "Most tokens of all requests that wait; more are refused at once.", parse=positive_int
    )
    scheduling_policy: str = setting(
        "fair", "Order of service: by class, tenant and deadline, or plainly by arrival.", choices=("fair", "fcfs")
    )
    num_priority_classes: int = setting(
        4, "Classes of requests; 0 is the most urgent, what is above the last one counts as that.", parse=positive_int
    )
    ageing_s: float = setting(
        30.0, "Seconds of age after which a request moves up one class; 0: never.", parse=non_negative_seconds
    )
    prompt_token_charge: float = setting(
        1.0,
        "What a tenant pays for a prompt token that was not cached, in virtual tokens.",
        parse=_charge,
        form="a number of at least 0",
    )
    output_token_charge: float = setting(
        2.0, "What a tenant pays for an output token.", parse=_charge, form="a number of at least 0"
    )
    max_metric_tenants: int = setting(
        0,
        "Tenants that have metrics of their own; the others are summed as `other`. 0: no metrics by tenant.",
        parse=non_negative_int,
    )
    num_blocks: int = setting(
        0, "KV blocks to use, the null block included; 0: all that the executor has.", parse=non_negative_int
    )
    plans_in_flight: int = setting(
        2, "Plans that the executor has at a time, 1 to 3.", parse=_plans_in_flight, form="1, 2 or 3"
    )
    takeover_s: float = setting(
        10.0, "Seconds that requests of a lost session wait for a new one.", parse=non_negative_seconds
    )
    stall_timeout_s: float = setting(
        STALL_TIMEOUT_S,
        "Seconds without a sign of life, or without progress of a plan, after which the executor counts as lost.",
        parse=positive_seconds,
    )
    heartbeat_s: float = setting(
        MAX_HEARTBEAT_S,
        "Longest silence on sessions, and the one that executors are asked for; at most a third of a stall timeout.",
        parse=positive_seconds,
    )
    resumable_s: float = setting(
        60.0,
        "Seconds that resumable requests go on without a reader, and that what they generated is kept after their end.",
        parse=non_negative_seconds,
    )
    resumable_bytes: int = setting(
        64 << 20, "Most memory for what resumable requests that ended had generated.", parse=parse_bytes
    )
    step_timeout_s: float = setting(
        120.0,
        "Seconds that a plan may go without progress while no step of its size was measured; then 10 times that.",
        parse=positive_seconds,
    )
    executor_wait_s: float = setting(
        60.0,
        "Seconds that requests wait for a lost executor; then they fail, and new ones are refused until it is back.",
        parse=positive_seconds,
    )
    record_steps: int = setting(
        256, "Steps that the flight recorder keeps in memory; 0: it is off.", parse=non_negative_int
    )
    record_bytes: int = setting(32 << 20, "Most memory that it keeps them in.", parse=parse_bytes)
    record_file: str = setting("", "Record all steps into this file; prompts and outputs are in it. Empty: none.")
    record_dir: str = setting(
        "", "Save the recorder's steps into this folder when the executor is lost or a step fails. Empty: nowhere."
    )

    def __post_init__(self) -> None:
        if not 1 <= self.plans_in_flight <= _MAX_PLANS_IN_FLIGHT:
            raise SetupError(f"--plans-in-flight: {self.plans_in_flight} is not accepted; expected 1, 2 or 3")
        if self.prompt_token_charge == self.output_token_charge == 0:
            raise SetupError("--prompt-token-charge and --output-token-charge are both 0; one must be above 0")
