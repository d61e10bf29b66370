"""`make soak`: steady load, aborts, a kill a minute; see `--help`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.soak.run import MAX_SLOPE_MIB, Plan, Report, soak


def text_of(report: Report) -> str:
    """The report for people."""
    tally = report.tally
    lines = [
        f"capacity {report.capacity:.1f} requests/s; done {tally.num_done}, aborted {tally.num_aborted}, "
        f"failed {tally.num_failed}, {tally.num_tokens} tokens",
        "kills: " + ", ".join(f"{count} x {stage}" for stage, count in report.kills.items()),
        "held at the end: " + (", ".join(f"{v} {k}" for k, v in report.held.items() if v) or "nothing"),
        f"{'resident memory':<16} {'MiB/min':>8} {'over':>8} {'last':>10}",
    ]
    lines += [
        f"{stage:<16} {m:>8.2f} {over:>6.0f} s {last:>6.0f} MiB" for stage, (m, over, last) in report.slopes.items()
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run a soak; returns 1 if a request failed, something was held at the end, or memory grew."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="80 %% of the measured capacity, 10 %% of the clients give up, one kill -9 a minute. Fails if a "
        f"request fails, if a stage holds anything at the end, or grows by more than {MAX_SLOPE_MIB:g} MiB per minute.",
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="under load")
    parser.add_argument("--kill-every-s", type=float, default=60.0, help="seconds between kills")
    parser.add_argument("--json", default="build/soak.json", metavar="FILE", help="where the report goes, too")
    given = parser.parse_args(argv)
    report = asyncio.run(soak(Plan(60 * given.minutes, given.kill_every_s)))
    problems = report.problems(MAX_SLOPE_MIB)
    sys.stdout.write("\n".join([text_of(report), *(f"FAILED: {problem}" for problem in problems), ""]))
    Path(given.json).parent.mkdir(parents=True, exist_ok=True)
    Path(given.json).write_text(json.dumps({**asdict(report), "problems": problems}, indent=2) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
