"""`tokenloom replay`, `python -m tokenloom.replay`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from tokenloom.common.config import parse
from tokenloom.common.stage import run_main
from tokenloom.replay.command import replay
from tokenloom.replay.config import ReplaySettings

DESCRIPTION = "Feeds recorded steps to an executor and compares every token. Exit code 0: equal; 1: not; 2: impossible."


def main(argv: Sequence[str]) -> int:
    """Replay; returns the exit code."""
    settings = parse(ReplaySettings, "tokenloom replay", DESCRIPTION, argv)
    summary = asyncio.run(replay(settings))
    sys.stdout.write((summary.as_json() if settings.json else summary.as_text()) + "\n")
    return 0 if summary.is_equal else 1


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:]), extra="all"))
