"""Work whose time follows the size of what a caller sent or asked for.

Small work is done at once. Large work goes to one thread, so that the event loop waits for the interpreter's switch
interval (5 ms) at most and the streams of others go on; a second thread would double that wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
MAX_LOOP_BYTES = 256 << 10
# An entry is a token with its logprob; so many ids cost as much.
MAX_LOOP_ENTRIES = 2000
IDS_PER_ENTRY = 100
_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-work")


async def run_sized(is_large: bool, work: Callable[[], T]) -> T:
    """Do `work` here, or in the worker thread if it is large. Raises: what `work` raises."""
    if not is_large:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_worker, work)


class Turns:
    """Cuts work that has to stay on the event loop into turns, between which others run.

    Args:
        max_entries: most that is done in one turn, unless a single piece is larger.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0

    async def next(self, num_entries: int) -> None:
        """A piece of this size follows; lets others run first if it is too much for this turn."""
        self._num_entries += num_entries
        if self._num_entries > self._max_entries:
            self._num_entries = num_entries
            await asyncio.sleep(0)
