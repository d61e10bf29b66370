"""Command lines and result files of the benchmarks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench.machine import describe


def parser_of(prog: str, description: str, parts: Sequence[str], json_path: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"what to measure, of {', '.join(parts)}; none: all")
    parser.add_argument("--quick", action="store_true", help="a few seconds: to see that it works, not for figures")
    parser.add_argument(
        "--json", dest="json_path", default=json_path, metavar="FILE", help="where to write the figures"
    )
    parser.add_argument(
        "--url", default="", help="address of a running stack, which is then measured over HTTP as well"
    )
    return parser


def chosen_parts(parser: argparse.ArgumentParser, given: Sequence[str], parts: Sequence[str]) -> list[str]:
    """The parts to measure, in their own order; ends the program with exit code 2 if there is no such part."""
    if unknown := [part for part in given if part not in parts]:
        parser.error(f"unknown part {unknown[0]!r}; one of: {', '.join(parts)}")
    return [part for part in parts if part in given or not given]


def write_json(path: str, figures: dict[str, object]) -> None:
    """Write the figures; makes the folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(figures, indent=2) + "\n")


def print_head(title: str, facts: dict[str, object]) -> None:
    """Say what begins, and where."""
    print(f"{title}\n{describe(facts)}")


def print_part(title: str, text: str) -> None:
    """Show a part's figures."""
    print(f"\n{title}\n{text}", flush=True)
