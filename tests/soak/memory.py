"""Resident memory of every process, and how it grows."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from tests.cluster import Cluster

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20


class MemoryLog(threading.Thread):
    """Samples of all stages' resident memory, each life of a process a series of its own.

    Args:
        interval_s: between samples.
    """

    def __init__(self, cluster: Cluster, interval_s: float = 1.0) -> None:
        super().__init__(name="memory log", daemon=True)
        self._cluster = cluster
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._lives: dict[tuple[str, int], list[tuple[float, float]]] = {}

    def run(self) -> None:
        """Sample until `stop`."""
        while not self._is_over.wait(self._interval_s):
            for stage in self._cluster.names:
                if (pid := self._cluster.pid(stage)) is not None and (mib := resident_mib(pid)) > 0:
                    self._lives.setdefault((stage, pid), []).append((time.monotonic(), mib))

    def stop(self) -> None:
        """End the thread."""
        self._is_over.set()
        self.join()

    def slopes(self, warm_up_s: float, least_s: float) -> dict[str, tuple[float, float, float]]:
        """Growth per stage in MiB per minute, over how many seconds, and the last size in MiB.

        The mean over the lives of its processes, by their length; of each life the first `warm_up_s` seconds are left
        out, and one that is shorter than `least_s` seconds then. Stages without such a life are left out.
        """
        found: dict[str, tuple[float, float, float]] = {}
        for (stage, _), samples in self._lives.items():
            settled = [sample for sample in samples if sample[0] >= samples[0][0] + warm_up_s]
            if len(settled) < 3 or (length_s := settled[-1][0] - settled[0][0]) < least_s:
                continue
            slope = 60 * slope_of(settled)
            mean, total_s, _ = found.get(stage, (0.0, 0.0, 0.0))
            mean = (mean * total_s + slope * length_s) / (total_s + length_s)
            found[stage] = (mean, total_s + length_s, settled[-1][1])
        return found


def slope_of(samples: list[tuple[float, float]]) -> float:
    """Least squares: units of the second column per unit of the first."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / sum((x - mean_x) ** 2 for x, _ in samples)


def resident_mib(pid: int) -> float:
    """Resident memory of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES / _MIB
    except OSError:
        return 0.0
