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
MAX_LOOP_ENTRIES = 2000
_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-work")


async def run_sized(is_large: bool, work: Callable[[], T]) -> T:
    """Do `work` here, or in the worker thread if it is large. Raises: what `work` raises."""
    if not is_large:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_worker, work)
