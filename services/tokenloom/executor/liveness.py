"""Is the model's thread alive? A plan that makes no progress for very long is stuck: only a new process helps then.

The event loop answers for the thread: the health of "" turns NOT_SERVING, which supervisors take for a reason to start
the executor again (liveness probes, `tokenloom serve`). If the thread goes on after all, it turns SERVING again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from tokenloom.common.silence import Silence, running_time, tick_of
from tokenloom.executor.progress import Progress

log = logging.getLogger(__name__)


class Liveness:
    """Watches the progress of plans.

    Args:
        progress: of the model's thread.
        limit_s: how long a plan may stand still.
        set_live: told when that is exceeded, and when the plan moves again.
    """

    def __init__(self, progress: Progress, limit_s: float, set_live: Callable[[bool], Awaitable[None]]) -> None:
        self._progress = progress
        self._limit_s = limit_s
        self._set_live = set_live

    async def watch(self) -> None:
        """Watch until cancelled."""
        standstill, seen, is_live = Silence(), -1, True
        async for passed_s in running_time(tick_of(self._limit_s)):
            if not self._progress.is_busy or self._progress.count != seen:
                seen = self._progress.count
                standstill.end()
            still_s = standstill.pass_time(passed_s)
            if (still_s < self._limit_s) != is_live:
                is_live = not is_live
                if is_live:
                    log.warning("the plan moves again")
                else:
                    log.error("a plan has not moved for %.0f s: this executor should be started again", still_s)
                await self._set_live(is_live)
