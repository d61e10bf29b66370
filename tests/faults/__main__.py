"""`make faults`: every fault at every moment under load, and what became of the requests. See `--help`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tests.faults.grid import Outcome, cells, run_cell
from tests.faults.site import Moment, Site, running_site
from tests.faults.specials import SPECIALS

STALL_S = 3.0
STAND_S = 5.0
QUICK_MOMENTS: tuple[Moment, ...] = ("decode",)
_CASE_LIMIT_S = 240.0
_COLUMNS = "{:<42} {:<9} {:>8} {:>5} {:>6} {:>10} {:>10} {:>10}  {}"
Case = tuple[str, Callable[[Site], Awaitable[Outcome]]]


def all_cases() -> list[Case]:
    """The grid, then the special ones, by name."""
    grid: list[Case] = []
    for stage, kind, moment in cells():
        grid.append((f"{stage} {kind} {moment}", partial(_cell, stage=stage, kind=kind, moment=moment)))
    return grid + [(special.__name__, special) for special in SPECIALS]


async def _cell(site: Site, **cell: str) -> Outcome:
    return await run_cell(site, **cell, stand_s=STAND_S)  # type: ignore[arg-type]


def chosen(cases: Sequence[Case], only: Sequence[str], is_quick: bool) -> list[Case]:
    """The cases whose names hold all words of one of `only`."""
    words = [set(text.replace(",", " ").split()) for text in only]
    found = [case for case in cases if not words or any(some <= set(case[0].split()) for some in words)]
    if is_quick:
        specials = {special.__name__ for special in SPECIALS}
        found = [(name, run) for name, run in found if name in specials or name.split()[-1] in QUICK_MOMENTS]
    return found


async def run(cases: Sequence[Case], file: Path) -> list[Outcome]:
    """Run cases one after the other on one site, showing a row for each; `file` has all rows so far."""
    show(heading())
    outcomes = []
    async with running_site(STALL_S) as site:
        for name, case in cases:
            outcome = await outcome_of_case(site, name, case)
            outcomes.append(outcome)
            write(outcomes, file)
            show(row_of(outcome))
            for problem in outcome.problems[:5]:
                show(f"    {problem[:300]}")
            if outcome.is_bad:
                site.cluster.show_logs()
    return outcomes


async def outcome_of_case(site: Site, name: str, case: Callable[[Site], Awaitable[Outcome]]) -> Outcome:
    """What a case gave; one that cannot be run to its end is a row with a problem."""
    began_s = time.monotonic()
    try:
        return await asyncio.wait_for(case(site), _CASE_LIMIT_S)
    except Exception as error:  # a case that breaks is shown as failed, and the others are run
        problem = f"the case broke: {type(error).__name__}: {error}"
        took_s = time.monotonic() - began_s
        return Outcome(name, "", 0, 0, 0, None, None, None, problems=(problem,), took_s=took_s)


def write(outcomes: Sequence[Outcome], file: Path) -> None:
    """The rows as JSON."""
    rows = [{**asdict(outcome), "is_late": outcome.is_late, "is_bad": outcome.is_bad} for outcome in outcomes]
    file.write_text(json.dumps(rows, indent=2) + "\n")


def heading() -> str:
    """The table's first line."""
    return _COLUMNS.format("fault", "moment", "requests", "lost", "wrong", "pause p50", "pause p99", "at most", "")


def row_of(outcome: Outcome) -> str:
    """A line of the table; times in seconds."""
    times = [outcome.pause_p50_s, outcome.pause_p99_s, outcome.bound_s]
    shown = ["-" if value is None else f"{value:.2f}" for value in times]
    verdict = "FAILED" if outcome.is_bad else "late" if outcome.is_late else "ok"
    counts = (outcome.num_requests, outcome.num_lost, outcome.num_wrong)
    return _COLUMNS.format(outcome.fault, outcome.moment, *counts, *shown, verdict)


def show(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Run the chosen cases; returns 1 if something was lost, wrong or left behind."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description="Faults of every stage under at least 64 streams: a table, and build/faults.json. Pauses are the "
        "longest gaps of streams around the fault, in seconds; at most: what the fault itself takes (a restart, a "
        "stand-still), computing all prompts and outputs again, and 1 s.",
    )
    parser.add_argument("--quick", action="store_true", help="one moment of the grid, decode, and the special cases")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORDS", help="cases with these words; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="print the cases' names")
    parser.add_argument("--json", default="build/faults.json", metavar="FILE", help="where the rows go, too")
    given = parser.parse_args(argv)
    cases = chosen(all_cases(), given.only, given.quick)
    if given.list or not cases:
        show("\n".join(name for name, _ in cases) or "no such case")
        return 0 if cases else 2
    began_s = time.monotonic()
    file = Path(given.json)
    file.parent.mkdir(parents=True, exist_ok=True)
    outcomes = asyncio.run(run(cases, file))
    num_bad, num_late = sum(o.is_bad for o in outcomes), sum(o.is_late for o in outcomes)
    num_requests = sum(o.num_requests for o in outcomes)
    took = f"{time.monotonic() - began_s:.0f} s"
    show(f"{len(outcomes)} cases, {num_requests} requests, {num_bad} cases failed, {num_late} late, {took}")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
