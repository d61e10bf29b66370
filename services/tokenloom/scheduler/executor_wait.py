"""How long requests wait for a lost executor before they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tokenloom.common.errors import Unavailable
from tokenloom.common.silence import sleep_running

_RETRY_AFTER_S = 1.0


class ExecutorWait:
    """The clock that runs while there is no executor, in time in which this process runs.

    Args:
        limit_s: how long requests wait.
        on_over: called when they have waited so long; to end those that live.
    """

    def __init__(self, limit_s: float, on_over: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_over = on_over
        self._clock: asyncio.Task[None] | None = None
        self._is_over = False

    def begin(self) -> None:
        """The executor was lost."""
        self.end()
        self._clock = asyncio.create_task(self._run())

    def end(self) -> None:
        """It is back, or nobody waits any more."""
        if self._clock is not None:
            self._clock.cancel()
        self._clock, self._is_over = None, False

    def check(self) -> None:
        """Raise Unavailable if requests have waited too long: no new ones are taken."""
        if self._is_over:
            raise self.error()

    def error(self) -> Unavailable:
        """Why requests fail."""
        text = f"the engine lost its executor and found none within {self._limit_s:g} s"
        return Unavailable(text, reason="EXECUTOR_LOST", retry_after_s=_RETRY_AFTER_S)

    async def _run(self) -> None:
        await sleep_running(self._limit_s)
        self._is_over = True
        self._on_over()
