"""`python -m loadtest.fairness`: see `--help`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from loadtest.bench.machine import machine_facts
from loadtest.bench.options import chosen_parts, parser_of, print_head, print_part, write_json
from loadtest.bench.over_http import http_settings, measure_tenants
from loadtest.bench.table import to_table
from loadtest.fairness.real_run import run_for_real
from loadtest.fairness.simulation import simulate
from loadtest.fairness.workload import Observed, Workload, verdict

PARTS = ("simulation", "real")
_RUNS = {"solo": "light tenant alone", "fair": "beside the flood, FAIR", "fcfs": "beside the flood, FCFS"}


def main(argv: Sequence[str]) -> int:
    """Measure, print one table, write the JSON file. Returns: 0 if the promises were kept, else 1."""
    parser = parser_of(
        "python -m loadtest.fairness",
        "A flood from one tenant beside a light one: what fair queueing does for the light one's time to first token.",
        PARTS,
        "build/bench-fairness.json",
    )
    parser.add_argument("--flood-key", default="", help="key of the flooding tenant at --url")
    parser.add_argument("--light-key", default="", help="key of the light tenant at --url")
    parser.add_argument("--flood-clients", type=int, default=96, help="clients of the flood at --url")
    given = parser.parse_args(argv)
    parts = chosen_parts(parser, given.parts, PARTS)
    started_s = time.monotonic()
    figures: dict[str, object] = {"machine": machine_facts(), "is_quick": given.quick}
    figures |= dict.fromkeys(("duration_s", *PARTS, "http"))
    print_head("Fair queueing", figures["machine"])  # type: ignore[arg-type]
    verdicts = _measure(parts, is_quick=given.quick)
    figures |= verdicts
    print_part(_TITLE, fairness_table(verdicts))
    if given.url:
        flood = http_settings(given.url, given.flood_key, 64, 64)
        light = http_settings(given.url, given.light_key, 32, 8)
        result = asyncio.run(measure_tenants(flood, light, given.flood_clients, 1.0, 20.0 if given.quick else 120.0))
        figures["http"] = result
        print_part("Through the gateway", "\n".join(f"{name:<26}{value}" for name, value in result.items()))
    figures["duration_s"] = time.monotonic() - started_s
    write_json(given.json_path, figures)
    return 0 if all(each["is_within_bound"] for each in verdicts.values()) else 1


_TITLE = "A flood of 200 requests at once, then 96 all the time, beside a request now and then (weights equal)"


def _measure(parts: Sequence[str], *, is_quick: bool) -> dict[str, dict[str, object]]:
    verdicts: dict[str, dict[str, object]] = {}
    if "simulation" in parts:
        verdicts["simulation"] = _verdict(simulate(Workload(duration_s=10.0 if is_quick else 60.0)))
    if "real" in parts:
        workload = replace(Workload(), duration_s=5.0 if is_quick else 30.0)
        verdicts["real"] = _verdict(run_for_real(workload, solo_s=3.0 if is_quick else 15.0))
    return verdicts


def _verdict(runs: dict[str, Observed]) -> dict[str, object]:
    return verdict(runs["solo"], runs["fair"], runs["fcfs"])


def fairness_table(verdicts: dict[str, dict[str, object]]) -> str:
    """All runs in one table, and the promises below it."""
    columns = {
        "light_ttft_ms_p50": "first token ms p50",
        "light_ttft_ms_p95": "p95",
        "num_light": "light requests",
        "step_ms_p95": "step ms p95",
        "tokens_per_s": "tokens/s",
        "num_preemptions": "preemptions",
    }
    rows: list[list[object]] = []
    notes = []
    for part, figures in verdicts.items():
        for run, label in _RUNS.items():
            values = figures[run]
            assert isinstance(values, dict)
            rows.append([f"{part}: {label}", *(values[name] for name in columns)])
        kept = "kept" if figures["is_within_bound"] else "NOT KEPT"
        notes.append(
            f"{part}: bound (solo p95 + 3 x p95 step) {figures['bound_ms']:.1f} ms: {kept}; "
            f"throughput FAIR to FCFS {figures['throughput_ratio']:.3f}"
        )
    return "\n".join([to_table(["run", *columns.values()], rows), *notes])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
