"""An executor's steps: how long it worked and how long it waited between them.

Times are seconds on CLOCK_MONOTONIC, which all processes of a Linux machine share, so that the driver's window can be
laid over the executor's records.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.report import percentile


@dataclass(frozen=True, slots=True)
class StepCost:
    """How long a step takes, in milliseconds: a base, and something for each row and each token."""

    base_ms: float
    row_ms: float = 0.0
    token_ms: float = 0.0

    def seconds(self, num_rows: int, num_tokens: int) -> float:
        """Duration of a step."""
        return (self.base_ms + self.row_ms * num_rows + self.token_ms * num_tokens) / 1000


# A small model on a large GPU, roughly; a step of 64 rows takes 6.5 ms, one of 512 prompt tokens 12 ms.
MODELLED_COST = StepCost(base_ms=2.0, row_ms=0.05, token_ms=0.02)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an executor.

    Args:
        num_carried: rows of earlier plans that were alive when this one began: with 0 nobody waited for the step
            between the end of the last one and the arrival of this one.
    """

    step_id: int
    start_s: float
    end_s: float
    num_rows: int
    num_tokens: int
    num_carried: int


@dataclass(frozen=True, slots=True)
class Idleness:
    """What an executor did with its time.

    Args:
        idle_pct: time between the end of a step and the start of the next while a request ran, of all time in which one
            ran; None without any step.
        gap_us: p50, p99 and maximum of those gaps.
        step_ms: p50 and p95 of the steps' durations.
    """

    idle_pct: float | None
    num_steps: int
    gap_us: tuple[float, float, float] | None
    step_ms: tuple[float, float] | None


def idleness(records: Sequence[StepRecord], from_s: float, to_s: float) -> Idleness:
    """Account for the steps that began and ended between two times; gaps lie between two such steps."""
    inside = [record for record in records if record.start_s >= from_s and record.end_s <= to_s]
    if not inside:
        return Idleness(None, 0, None, None)
    durations = [record.end_s - record.start_s for record in inside]
    gaps = [later.start_s - earlier.end_s for earlier, later in _neighbours(inside) if later.num_carried]
    busy_s, idle_s = sum(durations), sum(gaps)
    return Idleness(
        idle_pct=100 * idle_s / (busy_s + idle_s),
        num_steps=len(inside),
        gap_us=(1e6 * percentile(gaps, 50), 1e6 * percentile(gaps, 99), 1e6 * max(gaps)) if gaps else None,
        step_ms=(1e3 * percentile(durations, 50), 1e3 * percentile(durations, 95)),
    )


def _neighbours(records: Sequence[StepRecord]) -> list[tuple[StepRecord, StepRecord]]:
    return list(itertools.pairwise(records))


def num_steps_ended(records: Sequence[StepRecord], after_s: float, until_s: float) -> int:
    """Steps whose end lies in (after_s, until_s]. The records are in the order of their ends."""
    ends = [record.end_s for record in records]
    return bisect.bisect_right(ends, until_s) - bisect.bisect_right(ends, after_s)
