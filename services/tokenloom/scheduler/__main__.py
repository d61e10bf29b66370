"""`tokenloom scheduler`, `python -m tokenloom.scheduler`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tokenloom.common.config import parse
from tokenloom.common.stage import freeze_heap, run_main, run_stage
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.stage import SchedulerStage

DESCRIPTION = "The engine core: decides which request computes what in each step; owns the KV block table."


def main(argv: Sequence[str]) -> int:
    """Run the stage; returns the exit code."""
    settings = parse(SchedulerSettings, "tokenloom scheduler", DESCRIPTION, argv)
    return run_stage("scheduler", settings.process, lambda: SchedulerStage(settings, on_set_up=freeze_heap))


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:]), extra="scheduler"))
