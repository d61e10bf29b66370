"""How long the event loop was held up, without the time for which other processes had the cores."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

_TICK_S = 0.001
_NUM_RUNS = 5
LIMIT_S = 0.020
"""What the event loop may be held up for."""


async def largest_lag_s(work: Awaitable[object]) -> float:
    """The longest time for which the loop could not run while `work` did; an error of `work` ends it."""
    task = asyncio.ensure_future(work)
    largest = 0.0
    while not task.done():
        before_s, waited = time.perf_counter(), _waited_for_cpu_s()
        await asyncio.sleep(_TICK_S)
        lag_s = time.perf_counter() - before_s - _TICK_S
        now = _waited_for_cpu_s()
        largest = max(largest, lag_s - sum(now[i] - waited[i] for i in now.keys() & waited.keys()))
    return largest


def median_lag_s(scenario: Callable[[], Awaitable[float]]) -> float:
    """The median over several runs of a scenario that returns its largest lag; the garbage collector is off."""

    async def run() -> float:
        return await scenario()

    gc.disable()
    try:
        return statistics.median(uvloop.run(run()) for _ in range(_NUM_RUNS))
    finally:
        gc.enable()


def hold_the_gil(seconds: float) -> None:
    """One call into C that lets no other thread run Python: PyDLL, unlike CDLL, keeps the interpreter's lock."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def _waited_for_cpu_s() -> dict[int, float]:
    """How long each of our threads was ready to run but had no core; the second number in schedstat, ns."""
    waited: dict[int, float] = {}
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.name.startswith(("encode-", "chat-template")):
            try:
                numbers = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
            except FileNotFoundError:  # it has just ended
                continue
            waited[thread.native_id or 0] = int(numbers[1]) / 1e9
    return waited
