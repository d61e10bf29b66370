"""`python -m loadtest.scheduler`: see `--help`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from loadtest.bench.machine import machine_facts
from loadtest.bench.options import chosen_parts, parser_of, print_head, print_part, write_json
from loadtest.bench.over_http import http_settings, measure_refusals
from loadtest.scheduler.admission import AdmissionSettings, admission_tables, measure_admission
from loadtest.scheduler.cost import cost_tables, loads, measure_load, measure_long_prompt
from loadtest.scheduler.overlap import OverlapSettings, measure_overlap, overlap_table
from loadtest.scheduler.split import SplitSettings, measure_split, split_table

PARTS = ("cost", "overlap", "split", "admission")
_DEFAULT_DEPTH = 2


def main(argv: Sequence[str]) -> int:
    """Measure, print tables, write the JSON file. Returns: 0."""
    parser = parser_of(
        "python -m loadtest.scheduler",
        "Benchmarks of the engine core: what it costs, how busy it keeps an executor, what the split into programs "
        "costs, how it answers under overload.",
        PARTS,
        "build/bench-scheduler.json",
    )
    parser.add_argument(
        "--clients", type=int, default=16, help="clients at --url: as many requests as it takes at once"
    )
    parser.add_argument("--api-key", default="", help="key to send to --url")
    given = parser.parse_args(argv)
    parts = chosen_parts(parser, given.parts, PARTS)
    started_s = time.monotonic()
    figures = _empty(given.quick)
    print_head("Engine core", figures["machine"])  # type: ignore[arg-type]
    if "cost" in parts:
        _cost(figures, given.quick)
    if "overlap" in parts:
        _overlap(figures, given.quick)
    if "split" in parts:
        _split(figures, given.quick)
    if "admission" in parts:
        _admission(figures, given.quick)
        if given.url:
            _admission_over_http(figures, given.url, given.api_key, given.clients, 5.0 if given.quick else 20.0)
    figures["duration_s"] = time.monotonic() - started_s
    write_json(given.json_path, figures)
    return 0


def _empty(is_quick: bool) -> dict[str, object]:
    unknown = ("duration_s", "schedule_update_ms", "executor_idle_pct", *PARTS)
    return {"machine": machine_facts(), "is_quick": is_quick, **dict.fromkeys(unknown)}


def _cost(figures: dict[str, object], is_quick: bool) -> None:
    steps = [measure_load(load, 60 if is_quick else 800) for load in loads()]
    long_prompt = measure_long_prompt(3 if is_quick else 30)
    figures["cost"] = {"steps": steps, "long_prompt": long_prompt}
    figures["schedule_update_ms"] = {str(row["num_running"]): row["p50_ms"] for row in steps[:4]}
    print_part("Cost of the core", cost_tables(steps, long_prompt))


def _overlap(figures: dict[str, object], is_quick: bool) -> None:
    settings = OverlapSettings(warmup_s=0.5, measure_s=1.0, num_stops=8, num_long=3) if is_quick else OverlapSettings()
    rows = measure_overlap(settings)
    figures["overlap"] = rows
    figures["executor_idle_pct"] = next(
        row["executor_idle_pct"] for row in rows if row["plans_in_flight"] == _DEFAULT_DEPTH
    )
    title = f"Plans in flight: {settings.num_running} running requests, steps of {settings.step_ms:.0f} ms"
    print_part(title, overlap_table(rows))


def _split(figures: dict[str, object], is_quick: bool) -> None:
    rows = measure_split(SplitSettings(warmup_s=0.1, slice_s=0.05, num_slices=3) if is_quick else SplitSettings())
    figures["split"] = rows
    print_part("What the split costs", split_table(rows))


def _admission(figures: dict[str, object], is_quick: bool) -> None:
    settings = AdmissionSettings(overload_s=1.5, num_short=8) if is_quick else AdmissionSettings()
    result = measure_admission(settings)
    figures["admission"] = result
    print_part(f"Admission at {settings.overload:.0f} times overload", admission_tables(result))


def _admission_over_http(figures: dict[str, object], url: str, key: str, num_clients: int, duration_s: float) -> None:
    result = asyncio.run(measure_refusals(http_settings(url, key, 64, 32), num_clients, duration_s))
    figures["admission"]["http"] = result  # type: ignore[index]
    print_part("Overload through the gateway", "\n".join(f"{name:<18}{value}" for name, value in result.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
