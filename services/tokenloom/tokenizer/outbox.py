"""What waits to be sent to one reader: a direct client's events, or those of a gateway's session.

Requests put events in and never wait. The reader takes all that is there at once; while it is slow, consecutive deltas
of a choice merge. At the bound everything is dropped and `on_full` gives the requests up at once: the call's own task
may be stuck in a write, and only learns of it (from `take`) when its reader reads on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tokenloom.common.errors import ResourceExhausted
from tokenloom.tokenizer.events import Accepted, Delta, Event, PositionLogprobs

_EVENT_BYTES = 64
_BYTES_PER_ID = 4
_BYTES_PER_LOGPROB = 32
Batch = list[tuple[int, Event]]


class Outbox:
    """Events by the handle of their request.

    Args:
        max_bytes: bound on what waits, roughly as it will be on the wire.
        on_full: called once, when the bound is reached.
    """

    def __init__(self, max_bytes: int, on_full: Callable[[], None] = lambda: None) -> None:
        self._max_bytes = max_bytes
        self._on_full = on_full
        self._pending: Batch = []
        self._deltas: dict[tuple[int, int], Delta] = {}
        self._num_bytes = 0
        self._is_full = False
        self._filled = asyncio.Event()

    def put(self, handle: int, event: Event) -> None:
        """Add an event. Does nothing once the bound was reached."""
        if self._is_full:
            return
        self._num_bytes += size_of(event)
        if self._num_bytes > self._max_bytes:
            self._is_full = True
            self._clear()
            self._on_full()
        elif not isinstance(event, Delta) or event.prompt_logprobs:  # these are large, and stay before the first token
            self._pending.append((handle, event))
        elif (waiting := self._deltas.get((handle, event.choice_index))) is not None:
            waiting.append(event)
        else:
            self._deltas[handle, event.choice_index] = event
            self._pending.append((handle, event))
        self._filled.set()

    def drop(self, handle: int) -> None:
        """Forget what waits for a request whose client went away."""
        self._pending = [item for item in self._pending if item[0] != handle]
        self._deltas = {key: delta for key, delta in self._deltas.items() if key[0] != handle}

    def wake(self) -> None:
        """Let `take` return, also if there is nothing."""
        self._filled.set()

    @property
    def has_news(self) -> bool:
        """`take` would not wait: events are there, or the bound was reached."""
        return bool(self._pending) or self._is_full

    async def take(self) -> Batch:
        """Wait for events and take all; empty if woken for another reason.

        Raises: ResourceExhausted if the bound was reached.
        """
        await self._filled.wait()
        self._filled.clear()
        if self._is_full:
            raise ResourceExhausted("the reader is too slow; its events exceed the bound", reason="SLOW_READER")
        batch = self._pending
        self._clear()
        return batch

    def _clear(self) -> None:
        self._pending = []
        self._deltas = {}
        self._num_bytes = 0


class RequestSink:
    """An `EventSink` for one request: its events go to an outbox under its handle."""

    def __init__(self, outbox: Outbox, handle: int) -> None:
        self._outbox = outbox
        self._handle = handle

    def put(self, event: Event) -> None:
        """Take the next event."""
        self._outbox.put(self._handle, event)


def size_of(event: Event) -> int:
    """Roughly the bytes of an event on the wire."""
    if isinstance(event, Delta):
        if not event.has_extras:
            return _EVENT_BYTES + len(event.text)
        num_logprobs = _num_entries(event.logprobs) + _num_entries(event.prompt_logprobs)
        return _EVENT_BYTES + len(event.text) + _BYTES_PER_ID * len(event.token_ids) + _BYTES_PER_LOGPROB * num_logprobs
    if isinstance(event, Accepted):
        return _EVENT_BYTES + sum(_BYTES_PER_ID * len(ids) for ids in event.prompts)
    return _EVENT_BYTES


def _num_entries(positions: list[PositionLogprobs]) -> int:
    return sum(len(position.token_ids) for position in positions)
