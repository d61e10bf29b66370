"""How long a peer has been silent, in time in which this process itself ran.

A process that was stopped and goes on, or whose event loop was held up, must not blame its peers for the time that it
lost: what they said meanwhile waits in its sockets. So time is counted in ticks: between two of them at most two
ticks' worth counts, however long it really was, and after each there is a turn of the loop that reads what waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from tokenloom.common.errors import Unavailable

MAX_HEARTBEAT_S = 2.0
"""Stages ask for, or promise, a sign of life at least so often."""
STALL_TIMEOUT_S = 15.0
"""Silence after which a peer that promised signs of life counts as lost."""
_BEATS_PER_LIMIT = 3
_TICKS_PER_LIMIT = 30
_LEAST_TICK_S = 0.01
_MOST_TICK_S = 0.5


def tick_of(limit_s: float) -> float:
    """Seconds between two looks at something that has a limit."""
    return min(max(limit_s / _TICKS_PER_LIMIT, _LEAST_TICK_S), _MOST_TICK_S)


async def running_time(tick_s: float) -> AsyncIterator[float]:
    """Once per tick, for ever: the seconds of it in which this process ran."""
    last_s = time.monotonic()
    while True:
        await asyncio.sleep(tick_s)
        now_s = time.monotonic()
        yield min(now_s - last_s, 2 * tick_s)
        last_s = now_s


async def sleep_running(seconds: float) -> None:
    """Return after so many seconds in which this process ran."""
    left_s = seconds
    async for passed_s in running_time(tick_of(seconds)):
        left_s -= passed_s
        if left_s <= 0:
            return


class Silence:
    """A peer's silence."""

    def __init__(self) -> None:
        self._was_heard = False
        self._silent_s = 0.0

    def end(self) -> None:
        """The peer said something."""
        self._was_heard = True

    def pass_time(self, seconds: float) -> float:
        """Let time pass; returns how long the peer has been silent."""
        self._silent_s = 0.0 if self._was_heard else self._silent_s + seconds
        self._was_heard = False
        return self._silent_s

    async def wait_for(self, limit_s: float) -> None:
        """Return once the peer has been silent for so long."""
        async for passed_s in running_time(tick_of(limit_s)):
            if self.pass_time(passed_s) >= limit_s:
                return


def silence_limit_s(stall_timeout_s: float, heartbeat_ms: int) -> float:
    """How long a peer may be silent that promised a sign of life so often; 0, for ever, if it promised none."""
    return max(stall_timeout_s, _BEATS_PER_LIMIT * heartbeat_ms / 1000) if heartbeat_ms else 0.0


async def read_while_heard(reading: Coroutine[Any, Any, None], silence: Silence, limit_s: float, peer: str) -> None:
    """Read a peer's messages, each of which ends its silence, until they end or it is silent for `limit_s` seconds.

    Raises: Unavailable if it is silent; what `reading` raises.
    """
    if not limit_s:
        await reading
        return
    reader, watch = asyncio.create_task(reading), asyncio.create_task(silence.wait_for(limit_s))
    try:
        await asyncio.wait({reader, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not reader.done():
            raise Unavailable(f"the {peer} hangs: nothing was heard of it for {limit_s:g} s")
        reader.result()
    finally:
        reader.cancel()
        watch.cancel()
        await asyncio.gather(reader, watch, return_exceptions=True)
