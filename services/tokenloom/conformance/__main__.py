"""`tokenloom conformance`, `python -m tokenloom.conformance`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from tokenloom.common.config import parse
from tokenloom.common.stage import run_main
from tokenloom.conformance.config import ConformanceSettings
from tokenloom.conformance.suite import Outcome, run_suite, selected

DESCRIPTION = "Checks an executor against the protocol. Exit code 0: nothing failed; 1: something did; 2: no answer."


def main(argv: Sequence[str]) -> int:
    """Run the checks; returns the exit code."""
    settings = parse(ConformanceSettings, "tokenloom conformance", DESCRIPTION, argv)
    if settings.list:
        sys.stdout.writelines(f"{one.name:<24} {one.rule}\n" for one in selected(settings.only))
        return 0

    def tell(outcome: Outcome) -> None:
        if not settings.json:
            sys.stdout.write(f"{outcome}\n")

    report = asyncio.run(run_suite(settings, tell))
    sys.stdout.write((report.as_json() if settings.json else report.summary()) + "\n")
    return 0 if report.is_conformant else 1


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:]), extra="all"))
