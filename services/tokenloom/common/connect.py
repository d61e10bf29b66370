"""The first connection of a command that makes a few calls and ends.

Calls do not wait for a channel to connect: the first attempt that fails fails them. On a busy machine, or over a long
line, the first attempt may fail although the peer is there, so commands wait for the channel first.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

_LIMIT_S = 5.0


async def wait_until_connected(channel: Any, timeout_s: float) -> None:
    """Return when the channel is connected, or after `timeout_s` seconds and at most 5; a call then tells why not."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(timeout_s, _LIMIT_S)):
            await channel.channel_ready()
