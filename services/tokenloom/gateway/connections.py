"""HTTP connections and the limits that uvicorn does not have.

    begin --head--> request --answer--> idle --first byte--> head of the next request ...
      |                                   |
      +-- no head in time: closed         +-- nothing in time, or others need the room: closed

- A head must arrive in time and is of bounded size, and few requests may wait behind the one being answered.
- A client must take what is written for it: a part of what waits, or all of it, in each `write_timeout_s`. One that
  does not is cut; whoever writes is told first.
- There is a most of connections. Beyond it the one that was idle longest is closed; if none is idle, the new one is
  answered 503. The limit stays below that of open files, so that the gateway itself can always open some. Should that
  be reached all the same, libuv takes each connection and closes it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tokenloom.gateway import metrics
from tokenloom.gateway.http_errors import HttpError, error_body

_MAX_HEAD_BYTES = 64 << 10
_MAX_PIPELINED = 16
# Of what waits for a client, so much or all of it must go within the time limit: about a kilobyte per second.
_MIN_TAKEN_BYTES = 64 << 10
# A client that is refused reads the answer meanwhile; closing at once could lose it.
_LINGER_S = 2.0
_MAX_LINGERING = 64


def _nothing() -> None:
    """Nobody to tell."""


@dataclass(slots=True)
class ConnectionLimits:
    """What connections may do, and who of them is idle.

    Args:
        max_connections: most that are open at once.
        head_timeout_s: for a request's head, from the connection's begin or the head's first byte on.
        write_timeout_s: in which a client must take a part of what is written for it.
        idle: connections before a request, the longest idle one first.
        num_open: connections that are open.
        num_lingering: those that were refused and have not gone yet.
    """

    max_connections: int
    head_timeout_s: float
    write_timeout_s: float
    idle: dict[HttpConnection, None] = field(default_factory=dict)
    num_open: int = 0
    num_lingering: int = 0


class HttpConnection(HttpToolsProtocol):
    """One connection.

    Attributes:
        on_stalled: called when the client takes nothing, before it is cut; set by whoever writes.
    """

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self.on_stalled: Callable[[], None] = _nothing
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None  # of the head, or of a refusal
        self._write_check: asyncio.TimerHandle | None = None
        self._num_waiting_bytes = 0  # at the last check of writing
        self._is_in_head = False
        self._num_head_bytes = 0
        self._is_refused = False

    # --- connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a head, if there is room."""
        super().connection_made(transport)
        limits = self._limits
        limits.num_open += 1
        metrics.CONNECTIONS.set(limits.num_open)
        if limits.num_open - limits.num_lingering > limits.max_connections and not self._close_longest_idle():
            metrics.CONNECTIONS_CUT.labels("no_room").inc()
            self._refuse(HttpError(503, "too many connections are open; try again later", code="too_many_connections"))
            return
        limits.idle[self] = None
        self._set_deadline(limits.head_timeout_s, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        super().connection_lost(exc)
        limits = self._limits
        limits.num_open -= 1
        limits.num_lingering -= self._is_refused
        metrics.CONNECTIONS.set(limits.num_open)
        limits.idle.pop(self, None)
        self._end_deadline()
        if self._write_check is not None:
            self._write_check.cancel()
            self._write_check = None

    def abort(self) -> None:
        """Cut the connection."""
        self.transport.abort()

    def _close_longest_idle(self) -> bool:
        """Make room; False if nobody is idle."""
        for other in self._limits.idle:
            metrics.CONNECTIONS_CUT.labels("idle").inc()
            other.abort()
            self._limits.idle.pop(other)  # it is told of its end later
            return True
        return False

    # --- reading ---

    def data_received(self, data: bytes) -> None:
        """Take what came, unless the client was refused already."""
        if self._is_refused:
            return
        self._limits.idle.pop(self, None)
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                metrics.CONNECTIONS_CUT.labels("head_too_large").inc()
                message = f"the request's head is larger than {_MAX_HEAD_BYTES} bytes"
                self._refuse(HttpError(431, message, code="head_too_large"))
                return
        if self._deadline is None and not self._is_answering and not self.transport.is_closing():
            self._set_deadline(self._limits.head_timeout_s, self._on_late_head)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        self.scope["state"]["connection"] = self

    def on_headers_complete(self) -> None:
        """A request is there. Raises: ValueError, which ends the connection, if too many wait behind another."""
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests wait behind the one being answered")
        self._is_in_head = False
        self._end_deadline()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """The next request, or a time without any; what was written is still to be taken."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_writing()
        if self._is_answering or self.transport.is_closing():
            return
        if self._is_in_head:
            self._set_deadline(self._limits.head_timeout_s, self._on_late_head)
        else:
            self._limits.idle[self] = None

    def _on_late_head(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        metrics.CONNECTIONS_CUT.labels("head_timeout").inc()
        if self._is_in_head:
            message = f"the request's head did not arrive within {self._limits.head_timeout_s:g} s"
            self._refuse(HttpError(408, message, code="head_timeout"))
        else:
            self.abort()

    def _refuse(self, error: HttpError) -> None:
        """Answer without a request, and hear no more."""
        self._end_deadline()
        self._limits.idle.pop(self, None)
        self._is_refused = True
        self._limits.num_lingering += 1
        if self._is_answering or self._limits.num_lingering > _MAX_LINGERING:
            self.abort()
            return
        body = orjson.dumps(error_body(error))
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        retry = "retry-after: 1\r\n" if error.status == 503 else ""
        self.transport.write(STATUS_LINE[error.status] + (head + retry + "\r\n").encode() + body)
        self.transport.write_eof()
        self._set_deadline(_LINGER_S, self.abort)

    def _set_deadline(self, limit_s: float, then: Callable[[], None]) -> None:
        self._end_deadline()
        self._deadline = self.loop.call_later(limit_s, then)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # --- writing ---

    def pause_writing(self) -> None:
        """The client is slower than its answer; see that it takes some."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """The client took most of it."""
        super().resume_writing()
        self._num_waiting_bytes = 1 << 62  # whatever waits at the next check is less

    def _watch_writing(self) -> None:
        if self._write_check is None:
            self._num_waiting_bytes = self.transport.get_write_buffer_size()
            self._write_check = self.loop.call_later(self._limits.write_timeout_s, self._check_writing)

    def _check_writing(self) -> None:
        self._write_check = None
        num_waiting = self.transport.get_write_buffer_size()
        if not num_waiting or (self._is_answering and not self.flow.write_paused):
            return
        if num_waiting <= self._num_waiting_bytes - _MIN_TAKEN_BYTES:
            self._watch_writing()
            return
        metrics.CONNECTIONS_CUT.labels("slow_reader").inc()
        self.on_stalled()
        self.abort()


def connection_of(scope: Any) -> HttpConnection | None:
    """The connection of a request; None if it came without one, as in tests of the application alone."""
    return cast("HttpConnection | None", scope.get("state", {}).get("connection"))
