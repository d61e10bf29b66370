"""What a session's reader is to be told, gathered until it is sent.

A frame grows while the writer is busy, so that consecutive steps merge; its size is counted so that a reader that does
not read cannot fill the memory. Tokens are kept as the columns in which they travel: a step with 256 rows would make
as many objects otherwise. A session that takes requests over may be told more at once than a message may hold: frames
go out in parts (`parts_of`), and who would add more waits until that is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tokenloom.common.errors import TokenloomError
from tokenloom.scheduler.core.request import FinishReason, PromptLogprobs
from tokenloom.scheduler.load import LoadState

# What is kept weighs in memory, measured: an event as objects; a row's part in the columns and each of its tokens (the
# request holds their ids anyway); an id and its logprob, which nobody else holds.
_EVENT_BYTES = 250
_ROW_BYTES = 64
_TOKEN_BYTES = 16
_LOGPROB_BYTES = 72
# On the wire it is a quarter of that, or less.
_PART_BYTES = 8 << 20


@dataclass(slots=True)
class TokenRow:
    """New tokens of one request: the first one's index in its output, ids and logprobs (as the executor gave them)."""

    first_token_index: int
    token_ids: Sequence[int]
    logprobs: Any


@dataclass(slots=True)
class TokenColumns:
    """Rows of new tokens, one after the other; a request that waits for its reader may have several.

    Args:
        handles: request of each row.
        first_token_indexes: index of each row's first token in its request's output.
        num_tokens: tokens of each row.
        token_ids: tokens of all rows.
        num_logprobs_per_token: logprob entries per token of each row; 0: none.
        logprob_token_ids: token of each entry of all rows.
        logprobs: logprob of each entry.
    """

    handles: list[int] = field(default_factory=list)
    first_token_indexes: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_logprobs_per_token: list[int] = field(default_factory=list)
    logprob_token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def extend(self, rows: TokenColumns) -> None:
        """Append the rows of others."""
        for column in fields(self):
            getattr(self, column.name).extend(getattr(rows, column.name))


@dataclass(slots=True)
class FinishedRow:
    """A request's end."""

    handle: int
    reason: FinishReason
    num_generated_tokens: int
    error: TokenloomError | None


@dataclass(slots=True)
class Frame:
    """News for one session, in the order of the fields."""

    rejected: list[tuple[int, TokenloomError]] = field(default_factory=list)
    accepted: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    tokens: TokenColumns = field(default_factory=TokenColumns)
    finished: list[FinishedRow] = field(default_factory=list)
    load: LoadState | None = None
    is_draining: bool = False
    num_bytes: int = 0


class Outbox:
    """The frame that grows and the signal that it is worth sending.

    Args:
        max_bytes: a frame that grows beyond it while the writer is busy means that nobody reads (`is_overflown`).
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frame = Frame()
        self._filled = asyncio.Event()
        self._take_began = asyncio.Event()
        self._num_takes = 0
        self._is_awaited = False
        self._is_closed = False
        self._failure: TokenloomError | None = None

    @property
    def num_bytes(self) -> int:
        """What waits, roughly as it weighs in memory."""
        return self._frame.num_bytes

    @property
    def is_overflown(self) -> bool:
        """The reader is too slow."""
        return self._frame.num_bytes > self._max_bytes and not self._is_awaited

    def reject(self, handle: int, error: TokenloomError) -> None:
        """A request was not taken, or never ran."""
        self._frame.rejected.append((handle, error))
        self._grow(_EVENT_BYTES + len(error.message))

    def accept(self, handle: int, num_cached_tokens: int) -> None:
        """A request began to run."""
        self._frame.accepted.append((handle, num_cached_tokens))
        self._grow(_EVENT_BYTES)

    def add_prompt_logprobs(self, handle: int, run: PromptLogprobs) -> None:
        """Prompt logprobs."""
        self._frame.prompt_logprobs.append((handle, run))
        self._grow(_EVENT_BYTES + _LOGPROB_BYTES * len(run.token_ids))

    def add_tokens(self, handle: int, first_token_index: int, token_ids: Sequence[int], logprobs: Any = None) -> None:
        """New tokens of a request."""
        columns = self._frame.tokens
        columns.handles.append(handle)
        columns.first_token_indexes.append(first_token_index)
        columns.num_tokens.append(len(token_ids))
        columns.token_ids.extend(token_ids)
        num_bytes = _ROW_BYTES + _TOKEN_BYTES * len(token_ids)
        if logprobs is None:
            columns.num_logprobs_per_token.append(0)
        else:
            columns.num_logprobs_per_token.append(logprobs.num_per_token)
            columns.logprob_token_ids.extend(logprobs.token_ids)
            columns.logprobs.extend(logprobs.logprobs)
            num_bytes += _LOGPROB_BYTES * len(logprobs.token_ids)
        self._grow(num_bytes)

    def finish(self, row: FinishedRow) -> None:
        """A request ended."""
        self._frame.finished.append(row)
        self._grow(_EVENT_BYTES)

    def set_load(self, load: LoadState) -> None:
        """How busy the engine is; what was not sent yet is replaced."""
        self._frame.load = load
        self._filled.set()

    def drain(self) -> None:
        """Tell the reader that the engine is about to stop."""
        self._frame.is_draining = True
        self._filled.set()

    def beat(self) -> None:
        """Let the reader hear of us, also if there is no news."""
        self._filled.set()

    def close(self) -> None:
        """No more frames after the one that is there."""
        self._is_closed = True
        self._filled.set()
        self._take_began.set()

    def fail(self, error: TokenloomError) -> None:
        """Drop what waits; the next `take` raises `error`."""
        self._frame, self._failure = Frame(), error
        self.close()

    async def take(self) -> Frame | None:
        """Wait for news and take them all; None after `close` when all were taken.

        Raises: what `fail` was given.
        """
        self._is_awaited = True
        self._num_takes += 1
        self._take_began.set()
        await self._filled.wait()
        self._is_awaited = False
        if self._failure is not None:
            raise self._failure
        frame, self._frame = self._frame, Frame()
        if not self._is_closed:
            self._filled.clear()
        elif frame.num_bytes == 0 and not frame.is_draining:
            return None
        return frame

    async def wait_until_written(self) -> None:
        """Return when the writer is done with all that waits now, or the outbox is closed."""
        last = self._num_takes + (1 if self._is_awaited else 2)
        while self._num_takes < last and not self._is_closed:
            self._take_began.clear()
            await self._take_began.wait()

    def _grow(self, num_bytes: int) -> None:
        self._frame.num_bytes += num_bytes
        self._filled.set()


def parts_of(frame: Frame, max_bytes: int = _PART_BYTES) -> Iterator[Frame]:
    """A frame as frames of about `max_bytes` at most, which together tell the same in the same order."""
    if frame.num_bytes <= max_bytes:
        yield frame
        return
    part, num_bytes = Frame(rejected=frame.rejected, accepted=frame.accepted, load=frame.load), 0
    for handle, run in frame.prompt_logprobs:
        size = _LOGPROB_BYTES * len(run.token_ids)
        if num_bytes and num_bytes + size > max_bytes:
            yield part
            part, num_bytes = Frame(), 0
        part.prompt_logprobs.append((handle, run))
        num_bytes += size
    for row in _rows_of(frame.tokens):
        size = _LOGPROB_BYTES * len(row.logprobs) + _TOKEN_BYTES * len(row.token_ids) + _ROW_BYTES
        if num_bytes and num_bytes + size > max_bytes:
            yield part
            part, num_bytes = Frame(), 0
        part.tokens.extend(row)
        num_bytes += size
    part.finished, part.is_draining = frame.finished, frame.is_draining
    yield part


def _rows_of(tokens: TokenColumns) -> Iterator[TokenColumns]:
    """Each row as columns of its own."""
    at = logprobs_at = 0
    for i, count in enumerate(tokens.num_tokens):
        width = tokens.num_logprobs_per_token[i]
        end, logprobs_end = at + count, logprobs_at + count * width
        yield TokenColumns(
            [tokens.handles[i]],
            [tokens.first_token_indexes[i]],
            [count],
            tokens.token_ids[at:end],
            [width],
            tokens.logprob_token_ids[logprobs_at:logprobs_end],
            tokens.logprobs[logprobs_at:logprobs_end],
        )
        at, logprobs_at = end, logprobs_end
