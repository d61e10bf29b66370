"""`python -m loadtest`: see `--help`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.report import summarise, to_text
from loadtest.run import run
from loadtest.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    """Run a load test and print its figures. Returns: 0 if every request ended well, else 1."""
    settings = parse_settings(argv)
    outcomes, duration_s = asyncio.run(run(settings))
    figures = summarise(settings, outcomes, duration_s)
    print(to_text(figures))
    if settings.json_path:
        Path(settings.json_path).write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if figures["errors"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
