"""The flood and the light tenant: who sends what, and what is made of what they saw."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.bench.steps import MODELLED_COST, StepCost
from loadtest.report import percentile

FLOOD, LIGHT = "flood", "light"


@dataclass(frozen=True)
class Workload:
    """Two tenants of equal weight on one engine.

    Args:
        flood_burst: requests that the flood sends at once; then it keeps `flood_outstanding` of them alive.
        light_every_s: mean time between the light tenant's requests, which come whether or not earlier ones ended.
        duration_s: from the burst on.
        cost: the executor's steps.
    """

    duration_s: float = 60.0
    flood_burst: int = 200
    flood_outstanding: int = 96
    flood_prompt_tokens: int = 256
    flood_output_tokens: int = 128
    light_every_s: float = 0.3
    light_prompt_tokens: int = 128
    light_output_tokens: int = 32
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    num_blocks: int = 4096
    plans_in_flight: int = 2
    cost: StepCost = MODELLED_COST
    seed: int = 0

    def light_times_s(self) -> list[float]:
        """When the light tenant sends, from the burst on: half to one and a half times the mean apart."""
        chance, times, time_s = random.Random(self.seed), [], 0.0
        while (time_s := time_s + self.light_every_s * (0.5 + chance.random())) < self.duration_s:
            times.append(time_s)
        return times

    def prompt(self, tenant: str, number: int) -> list[int]:
        """Prompt `number` of a tenant; no two begin alike, so none is found in the prefix cache."""
        length = self.flood_prompt_tokens if tenant == FLOOD else self.light_prompt_tokens
        return [number % 40_000, 1 if tenant == FLOOD else 2, number // 40_000, *range(10, 7 + length)]

    def output_tokens(self, tenant: str) -> int:
        """Tokens that a tenant's requests generate."""
        return self.flood_output_tokens if tenant == FLOOD else self.light_output_tokens


@dataclass
class Observed:
    """What came of one run.

    Args:
        light_ttft_s: of each light request; for one that had no token at the end, the time that it had waited.
        num_light_unserved: how many of those there were.
        step_s: durations of the steps.
        num_tokens: prompt and output tokens served: a prompt counts when its first token is there.
        duration_s: in which they were served.
    """

    light_ttft_s: list[float] = field(default_factory=list)
    num_light_unserved: int = 0
    step_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    duration_s: float = 0.0
    num_preemptions: int = 0

    def figures(self) -> dict[str, object]:
        """The run in numbers; None where nothing was seen."""
        return {
            "light_ttft_ms_p50": _ms(self.light_ttft_s, 50),
            "light_ttft_ms_p95": _ms(self.light_ttft_s, 95),
            "num_light": len(self.light_ttft_s),
            "num_light_unserved": self.num_light_unserved,
            "step_ms_p50": _ms(self.step_s, 50),
            "step_ms_p95": _ms(self.step_s, 95),
            "tokens_per_s": self.num_tokens / self.duration_s if self.duration_s else None,
            "num_preemptions": self.num_preemptions,
        }


def _ms(seconds: Sequence[float], percent: float) -> float | None:
    return 1e3 * percentile(seconds, percent) if seconds else None


def verdict(solo: Observed, fair: Observed, fcfs: Observed) -> dict[str, object]:
    """The runs side by side, and what fair queueing promises.

    Returns: `solo`, `fair`, `fcfs` (figures of each run), `bound_ms` (solo p95 and three times the p95 step under the
        flood), `is_within_bound`, `throughput_ratio` (FAIR to FCFS).
    """
    bound_ms = 1e3 * (percentile(solo.light_ttft_s, 95) + 3 * percentile(fair.step_s, 95))
    return {
        "solo": solo.figures(),
        "fair": fair.figures(),
        "fcfs": fcfs.figures(),
        "bound_ms": bound_ms,
        "is_within_bound": 1e3 * percentile(fair.light_ttft_s, 95) <= bound_ms,
        "throughput_ratio": (fair.num_tokens / fair.duration_s) / (fcfs.num_tokens / fcfs.duration_s),
    }
