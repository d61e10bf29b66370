"""What waits to be sent to one reader: a direct client's events, or those of a gateway's session.

Requests put events in and never wait. The reader takes all that is there at once; while it is slow, consecutive deltas
of a choice merge, up to a size. At the bound, a request that takes up more than half of it is given up alone;
otherwise the reader is too slow for all: everything is dropped and `on_full` gives the requests up at once, since the
call's own task may be stuck in a write, and only learns of it (from `take`) when its reader reads on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from tokenloom.common.errors import ResourceExhausted
from tokenloom.tokenizer.events import (
    MAX_LOGPROBS_PER_EVENT,
    MAX_SMALL_DELTA,
    Accepted,
    ChoiceFinished,
    Delta,
    Event,
    Failed,
)

_EVENT_BYTES = 64
_BYTES_PER_ID = 4
_BYTES_PER_LOGPROB = 32
_BYTES_PER_BIAS = 16
_MAX_MERGED_BYTES = 1 << 20
Batch = list[tuple[int, Event]]


class Outbox:
    """Events by the handle of their request.

    Args:
        max_bytes: bound on what waits, roughly as it will be on the wire.
        on_full: called once, when the bound is reached by many requests.
        on_request_full: called with the handle of a request that fills the bound alone; its Failed is in the outbox.
            None if there is but one request.
    """

    def __init__(
        self,
        max_bytes: int,
        on_full: Callable[[], None] = lambda: None,
        on_request_full: Callable[[int], None] | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._on_full = on_full
        self._on_request_full = on_request_full
        self._pending: Batch = []
        self._deltas: dict[tuple[int, int], Delta] = {}
        self._num_bytes: Counter[int] = Counter()
        self._total_bytes = 0
        self._closed: set[int] = set()
        self._is_full = False
        self._filled = asyncio.Event()

    def put(self, handle: int, event: Event) -> None:
        """Add an event. Does nothing once the bound was reached or the request is closed."""
        if self._is_full or handle in self._closed:
            return
        size = size_of(event)
        self._num_bytes[handle] += size
        self._total_bytes += size
        if self._total_bytes > self._max_bytes:
            self._make_room()
            if self._is_full or handle in self._closed:
                return
        self._filled.set()
        if not isinstance(event, Delta) or event.prompt_logprobs:  # these are large, and stay before the first token
            self._pending.append((handle, event))
            return
        waiting = self._deltas.get((handle, event.choice_index))
        if waiting is not None and _may_merge(waiting, event):
            waiting.append(event)
        else:
            self._deltas[handle, event.choice_index] = event
            self._pending.append((handle, event))

    def close(self, handle: int) -> None:
        """Drop what waits for a request whose client went away, and what may still come of it until `forget`."""
        self._closed.add(handle)
        self._total_bytes -= self._num_bytes.pop(handle, 0)
        self._pending = [item for item in self._pending if item[0] != handle]
        self._deltas = {key: delta for key, delta in self._deltas.items() if key[0] != handle}

    def forget(self, handle: int) -> None:
        """Nothing more comes of a request."""
        self._closed.discard(handle)

    def wake(self) -> None:
        """Let `take` return, also if there is nothing."""
        self._filled.set()

    @property
    def num_bytes(self) -> int:
        """What waits."""
        return self._total_bytes

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
            raise _too_slow()
        batch = self._pending
        self._clear()
        return batch

    def _make_room(self) -> None:
        handle, num_bytes = self._num_bytes.most_common(1)[0]
        if self._on_request_full is not None and num_bytes * 2 > self._max_bytes:
            self.close(handle)
            self._pending.append((handle, Failed(_too_slow())))
            self._on_request_full(handle)
            self._filled.set()
        else:
            self.give_up()

    def give_up(self) -> None:
        """The reader is too slow: drop everything and say so, once."""
        if not self._is_full:
            self._is_full = True
            self._clear()
            self._on_full()
            self._filled.set()

    def _clear(self) -> None:
        self._pending = []
        self._deltas = {}
        self._num_bytes.clear()
        self._total_bytes = 0


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
    match event:
        case Delta():
            num_logprobs = event.num_logprobs if event.logprobs or event.prompt_logprobs else 0
            extras = _BYTES_PER_ID * len(event.token_ids) + _BYTES_PER_LOGPROB * num_logprobs
            return _EVENT_BYTES + _utf8_bytes(event.text) + extras
        case Accepted():
            num_ids = sum(map(len, event.prompts)) + len(event.stop.stop_token_ids)
            return _EVENT_BYTES + _BYTES_PER_ID * num_ids + _BYTES_PER_BIAS * len(event.sampling.logit_bias)
        case ChoiceFinished():
            return _EVENT_BYTES + _utf8_bytes(event.stop_string)
        case Failed():
            return _EVENT_BYTES + _utf8_bytes(str(event.error))
    return _EVENT_BYTES


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _may_merge(waiting: Delta, later: Delta) -> bool:
    """The two together are no more than may be one event, and neither is an echoed prompt (text of no token)."""
    if (waiting.num_tokens == 0) != (later.num_tokens == 0):
        return False
    if size_of(waiting) + size_of(later) > _MAX_MERGED_BYTES:
        return False
    if waiting.is_kept_small and waiting.size + later.size > MAX_SMALL_DELTA:
        return False
    return waiting.num_logprobs + later.num_logprobs <= MAX_LOGPROBS_PER_EVENT


def _too_slow() -> ResourceExhausted:
    return ResourceExhausted("the reader is too slow; its events exceed the bound", reason="SLOW_READER")
