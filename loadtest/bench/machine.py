"""On which machine, and on which code, figures were taken."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def machine_facts() -> dict[str, object]:
    """What a figure needs beside it.

    Returns: `cpu` (model), `num_cores`, `python`, `commit` (short; `-dirty` behind it if tracked files differ; empty
        outside a repository), `load_average_1m` (at the time of the call: above 0.5 the machine was not quiet).
    """
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "commit": _commit(),
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


def cpu_model(path: Path) -> str:
    """The processor's name as Linux knows it, else its architecture."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    try:
        command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def describe(facts: dict[str, object]) -> str:
    """The facts as one line for people."""
    return (
        f"{facts['cpu']}, {facts['num_cores']} cores, Python {facts['python']}, commit {facts['commit'] or 'unknown'}, "
        f"load average {facts['load_average_1m']}"
    )
