"""Signs of life on a stream: told whenever nothing else was for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pulse:
    """A timer of the running event loop that calls `beat` when nothing was sent for `period_s` seconds.

    Args:
        period_s: 0: never.
        beat: has something sent soon; must not block.
    """

    def __init__(self, period_s: float, beat: Callable[[], object]) -> None:
        self._period_s = period_s
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._arm(period_s)

    def note_sent(self) -> None:
        """Something was sent; costs next to nothing."""
        self._sent_s = self._loop.time()

    def stop(self) -> None:
        """No more beats."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, delay_s: float) -> None:
        if self._period_s > 0:
            self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        left_s = self._sent_s + self._period_s - self._loop.time()
        if left_s <= 0:
            self._sent_s = self._loop.time()
            self._beat()
            left_s = self._period_s
        self._arm(left_s)
