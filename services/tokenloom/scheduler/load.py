"""How busy the engine is, for routers and people: told to every session when it changed, at most once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tokenloom.scheduler.core.scheduler import Scheduler

REPORT_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class LoadState:
    """How busy the engine is; see Load in engine.proto for the fields."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_blocks: int
    num_cached_blocks: int
    num_blocks: int
    max_num_seqs: int
    tokens_per_second: float
    waits_for_executor: bool = False


def load_of(core: Scheduler, tokens_per_second: float, *, waits_for_executor: bool = False) -> LoadState:
    """The core's state as of now."""
    pool = core.kv.pool
    return LoadState(
        num_running=len(core.running),
        num_waiting=len(core.waiting),
        num_waiting_tokens=core.num_waiting_tokens,
        num_free_blocks=pool.num_free_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_blocks=pool.num_blocks - 1,
        max_num_seqs=core.config.max_num_seqs,
        tokens_per_second=tokens_per_second,
        waits_for_executor=waits_for_executor,
    )


class LoadReporter:
    """Tells the load when it may have changed; sleeps while it does not.

    A timer of its own: after the last request ended nothing steps any more, and the last word must not be an old one.
    The rate of tokens falls by itself, so the reporter goes on until it is zero.

    Args:
        read: the load as of now; None while there is no engine core.
        tell: hands it to the sessions.
    """

    def __init__(self, read: Callable[[], LoadState | None], tell: Callable[[LoadState], None]) -> None:
        self._read = read
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._looked_s = -REPORT_PERIOD_S
        self._told: LoadState | None = None

    def note_change(self) -> None:
        """Something changed; costs next to nothing while a report is due already."""
        if self._timer is None:
            delay_s = max(0.0, self._looked_s + REPORT_PERIOD_S - time.monotonic())
            self._timer = self._loop.call_later(delay_s, self._report)

    def report_now(self) -> None:
        """Something changed that cannot wait."""
        self.stop()
        self._report()

    def stop(self) -> None:
        """Tell no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report(self) -> None:
        self._timer = None
        self._looked_s = time.monotonic()
        load = self._read()
        if load is None:
            return
        if load != self._told:
            self._told = load
            self._tell(load)
        if load.tokens_per_second > 0:
            self.note_change()
