"""What a session's reader is to be told, gathered until it is sent.

A frame grows while the writer is busy, so that consecutive steps merge; its size is counted so that a reader that does
not read cannot fill the memory. Tokens are kept as the columns in which they travel: a step with 256 rows would make
as many objects otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
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
        max_bytes: a frame that grows beyond it means that nobody reads; `is_overflown` says so.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frame = Frame()
        self._filled = asyncio.Event()
        self._is_closed = False
        self._failure: TokenloomError | None = None

    @property
    def is_overflown(self) -> bool:
        """The reader is too slow."""
        return self._frame.num_bytes > self._max_bytes

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

    def fail(self, error: TokenloomError) -> None:
        """Drop what waits; the next `take` raises `error`."""
        self._frame, self._failure = Frame(), error
        self.close()

    async def take(self) -> Frame | None:
        """Wait for news and take them all; None after `close` when all were taken.

        Raises: what `fail` was given.
        """
        await self._filled.wait()
        if self._failure is not None:
            raise self._failure
        frame, self._frame = self._frame, Frame()
        if not self._is_closed:
            self._filled.clear()
        elif frame.num_bytes == 0 and not frame.is_draining:
            return None
        return frame

    def _grow(self, num_bytes: int) -> None:
        self._frame.num_bytes += num_bytes
        self._filled.set()
