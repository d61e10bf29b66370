"""Limits and rules of the engine core, and what it counts."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tokenloom.scheduler.core.admission import QueueLimits
from tokenloom.scheduler.core.plan import PreemptReason

_DEFAULT_PATIENCE_S = 120.0


class SchedulingPolicy(enum.Enum):
    """In which order requests run: class, fairness among tenants and deadlines; or plainly by arrival."""

    FAIR = "fair"
    FCFS = "fcfs"


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the batching plan.

    Args:
        max_num_seqs: most requests that run at once (rows of a plan).
        max_num_batched_tokens: token budget of a step.
        max_num_waiting: most requests that wait; more are refused.
        max_num_waiting_tokens: most tokens that wait; more are refused.
        max_model_len: longest sequence that the model takes, prompt and output, in tokens.
        block_size: tokens per KV block.
        policy: order of service.
        num_priority_classes: a request's class is below it.
        ageing_s: a request moves up one class per so many seconds of age; 0: never.
        prompt_token_charge, output_token_charge: virtual tokens that a tenant pays for a token.
        max_new_row_ids: most token ids that the new rows of a plan bring in its one message, unless one row has more.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 1024
    max_num_waiting_tokens: int = 1_000_000
    max_model_len: int = 8192
    block_size: int = 16
    policy: SchedulingPolicy = SchedulingPolicy.FAIR
    num_priority_classes: int = 4
    ageing_s: float = 30.0
    prompt_token_charge: float = 1.0
    output_token_charge: float = 2.0
    max_new_row_ids: int = 1 << 20

    @property
    def is_fair(self) -> bool:
        """Classes, tenants and deadlines count."""
        return self.policy is SchedulingPolicy.FAIR

    @property
    def queue_limits(self) -> QueueLimits:
        """Bounds of the queue."""
        return QueueLimits(self.max_num_waiting, self.max_num_waiting_tokens)

    @property
    def tolerated_charge(self) -> float:
        """Virtual tokens by which one tenant may be ahead of another and still claim its share: a step of prompts."""
        return self.max_num_batched_tokens * self.prompt_token_charge

    @property
    def patience_s(self) -> float:
        """A request without a deadline is served as if it had one so long after its submission."""
        return self.ageing_s * self.num_priority_classes or _DEFAULT_PATIENCE_S


def _no_preemptions() -> dict[PreemptReason, int]:
    return dict.fromkeys(PreemptReason, 0)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start.

    Args:
        num_computed_tokens: tokens planned, recomputed ones included.
        num_displaced: waiting requests that gave their place in a full queue to another tenant's.
        num_quarantined: requests that ended because they killed the executor, or made steps fail, again and again.
        num_wasted_rows: rows computed for requests that had ended.
    """

    num_preemptions_by_reason: dict[PreemptReason, int] = field(default_factory=_no_preemptions)
    num_computed_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_wasted_rows: int = 0
    num_displaced: int = 0
    num_quarantined: int = 0

    @property
    def num_preemptions(self) -> int:
        """For whatever reason."""
        return sum(self.num_preemptions_by_reason.values())
