"""Ends a stage that runs but does not answer, so that its supervision starts it again.

A stage is watched from its first good answer on, so that loading a model takes as long as it takes. Each answer counts
when it comes, however late: a busy machine makes stages slow, only a hanging one makes them silent. And only time in
which the launcher itself ran is counted (common/silence.py).
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from tokenloom.common.silence import Silence, running_time, tick_of

_ASKS_PER_LIMIT = 8
_MOST_PAUSE_S = 2.0


class Probe(Protocol):
    """How a stage is asked."""

    async def is_up(self, timeout_s: float) -> bool:
        """It has started: from now on it must answer."""

    async def is_live(self, timeout_s: float) -> bool:
        """It answers, and does not say that it is broken."""

    async def close(self) -> None:
        """Ask no more."""


class Watched(Protocol):
    """A process under supervision."""

    num_restarts: int
    """How many processes of it have ended."""

    def end_hanging(self, why: str) -> None:
        """End the process at once, to be started again."""


class Watchdog:
    """Watches one stage.

    Args:
        child: its process.
        probe: asks it.
        limit_s: longest time without a good answer.
    """

    def __init__(self, child: Watched, probe: Probe, limit_s: float) -> None:
        self._child = child
        self._probe = probe
        self._limit_s = limit_s
        self._pause_s = min(limit_s / _ASKS_PER_LIMIT, _MOST_PAUSE_S)

    async def watch(self) -> None:
        """Watch one process after the other, until cancelled."""
        try:
            while True:
                number = self._child.num_restarts
                if await self._is_up() and number == self._child.num_restarts:
                    await self._watch_process(number)
        finally:
            await self._probe.close()

    async def _is_up(self) -> bool:
        await asyncio.sleep(self._pause_s)
        return await self._probe.is_up(self._limit_s)

    async def _watch_process(self, number: int) -> None:
        """Return when the process ended, or was ended because it hangs."""
        silence = Silence()
        asking = asyncio.create_task(self._ask(silence))
        try:
            async for passed_s in running_time(tick_of(self._limit_s)):
                if self._child.num_restarts != number:
                    return
                if silence.pass_time(passed_s) >= self._limit_s:
                    self._child.end_hanging(f"gave no sign of life for {self._limit_s:g} s and was killed")
                    return
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self, silence: Silence) -> None:
        while True:
            if await self._probe.is_live(self._limit_s):
                silence.end()
            await asyncio.sleep(self._pause_s)
