"""Figures of a load test, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from loadtest.client import Outcome
from loadtest.settings import Settings


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of a non-empty list."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def summarise(settings: Settings, outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """The figures. Only requests that ended well count for tokens and times; distributions are None without any."""
    good = [outcome for outcome in outcomes if not outcome.error]
    num_prompt_tokens = sum(outcome.num_prompt_tokens for outcome in good)
    num_output_tokens = sum(outcome.num_output_tokens for outcome in good)
    return {
        "settings": {name: value for name, value in asdict(settings).items() if name not in ("api_key", "json_path")},
        "duration_s": duration_s,
        "num_ok": len(good),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "num_prompt_tokens": num_prompt_tokens,
        "num_cached_tokens": sum(outcome.num_cached_tokens for outcome in good),
        "num_output_tokens": num_output_tokens,
        "output_tokens_per_s": num_output_tokens / duration_s,
        "total_tokens_per_s": (num_prompt_tokens + num_output_tokens) / duration_s,
        "time_to_first_token_ms": _distribution([outcome.first_chunk_s for outcome in good]),
        "gap_between_chunks_ms": _distribution([gap for outcome in good for gap in outcome.gaps_s]),
        "request_duration_ms": _distribution([outcome.ended_s - outcome.started_s for outcome in good]),
    }


def _distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    figures = {f"p{percent}": percentile(seconds, percent) for percent in (50, 90, 99)}
    return {name: value * 1000 for name, value in {**figures, "max": max(seconds)}.items()}


def to_text(figures: dict[str, Any]) -> str:
    """The figures for people."""
    settings = figures["settings"]
    lines = [
        f"{figures['num_ok']} of {settings['requests']} requests in {figures['duration_s']:.2f} s, "
        f"{settings['clients']} at a time, warm-up {settings['warmup']}",
        f"tokens           prompt {figures['num_prompt_tokens']} (cached {figures['num_cached_tokens']}), "
        f"output {figures['num_output_tokens']}",
        f"output tokens/s  {figures['output_tokens_per_s']:.1f}",
        f"total tokens/s   {figures['total_tokens_per_s']:.1f}",
        f"{'ms':<24}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
    ]
    for name in ("time_to_first_token", "gap_between_chunks", "request_duration"):
        distribution = figures[f"{name}_ms"]
        cells = (f"{value:>10.1f}" for value in distribution.values()) if distribution else ["         -"] * 4
        lines.append(f"{name.replace('_', ' '):<24}{''.join(cells)}")
    for kind, count in sorted(figures["errors"].items()):
        lines.append(f"error            {count} x {kind}")
    return "\n".join(lines)
