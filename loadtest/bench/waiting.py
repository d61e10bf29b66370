"""Waiting for what nobody announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_POLL_S = 0.01


async def until(is_true: Callable[[], bool], limit_s: float) -> None:
    """Return when a condition holds, which is looked at every 10 ms. Raises: TimeoutError after `limit_s` seconds."""
    async with asyncio.timeout(limit_s):
        while not is_true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(_POLL_S)
