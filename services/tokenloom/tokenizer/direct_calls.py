"""Direct calls whose client does not read: given up in bounded time, and together they take bounded memory.

Each call's events wait in an outbox with a bound of its own. A sweep, once a second while there are calls, gives those
up whose client took nothing for long although something waits, and the largest ones while all together hold too much.
What is left of such a call is one message in gRPC; its client is told the reason if it ever reads on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tokenloom.tokenizer.outbox import Outbox

WRITE_TIMEOUT_S = 60.0
MAX_TOTAL_BYTES = 128 << 20
SWEEP_S = 1.0


@dataclass(eq=False)
class DirectCall:
    """One call.

    Args:
        outbox: what waits for the client.

    Attributes:
        busy_since_s: when the client was last given something to take (the loop's clock); None: nothing is on its way.
    """

    outbox: Outbox
    busy_since_s: float | None = field(default=None, init=False)


class DirectCalls:
    """All direct calls."""

    def __init__(self) -> None:
        self._calls: set[DirectCall] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: DirectCall) -> None:
        """Watch a call until it is removed."""
        self._calls.add(call)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def remove(self, call: DirectCall) -> None:
        """The call ended."""
        self._calls.discard(call)
        if not self._calls and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SWEEP_S, self._sweep)
        now_s, total = loop.time(), sum(call.outbox.num_bytes for call in self._calls)
        for call in sorted(self._calls, key=lambda call: call.outbox.num_bytes, reverse=True):
            is_stuck = call.busy_since_s is not None and now_s - call.busy_since_s >= WRITE_TIMEOUT_S
            if is_stuck or total > MAX_TOTAL_BYTES:
                total -= call.outbox.num_bytes
                call.outbox.give_up()
