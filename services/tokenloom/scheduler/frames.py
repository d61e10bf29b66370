"""What a session's reader is to be told, gathered until it is sent.

A frame grows while the writer is busy, so that consecutive steps merge; its size is counted so that a reader that does
not read cannot fill the memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tokenloom.common.errors import TokenloomError
from tokenloom.scheduler.core.request import FinishReason, PromptLogprobs

# What the objects of a row weigh in memory, measured; an entry is an id or a logprob beside it.
_ROW_BYTES = 250
_ENTRY_BYTES = 16


@dataclass(slots=True)
class TokenRow:
    """New tokens of one request: its handle, the first token's index, ids and logprobs (as the executor gave them)."""

    handle: int
    first_token_index: int
    token_ids: list[int]
    logprobs: Any


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
    tokens: list[TokenRow] = field(default_factory=list)
    finished: list[FinishedRow] = field(default_factory=list)
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
        self._last_rows: dict[int, TokenRow] = {}
        self._is_closed = False
        self._failure: TokenloomError | None = None

    @property
    def is_overflown(self) -> bool:
        """The reader is too slow."""
        return self._frame.num_bytes > self._max_bytes

    def reject(self, handle: int, error: TokenloomError) -> None:
        """A request was not taken."""
        self._frame.rejected.append((handle, error))
        self._grow(len(error.message) // _ENTRY_BYTES)

    def accept(self, handle: int, num_cached_tokens: int) -> None:
        """A request began to run."""
        self._frame.accepted.append((handle, num_cached_tokens))
        self._grow(0)

    def add_prompt_logprobs(self, handle: int, run: PromptLogprobs) -> None:
        """Prompt logprobs."""
        self._frame.prompt_logprobs.append((handle, run))
        self._grow(len(run.token_ids))

    def add_tokens(self, row: TokenRow) -> None:
        """New tokens; joined to the request's waiting row, if it has one and neither carries logprobs."""
        last = self._last_rows.get(row.handle)
        if last is not None and row.logprobs is None:
            last.token_ids += row.token_ids
            self._frame.num_bytes += _ENTRY_BYTES * len(row.token_ids)
            return
        self._frame.tokens.append(row)
        if row.logprobs is None:
            self._last_rows[row.handle] = row
            self._grow(len(row.token_ids))
        else:
            self._last_rows.pop(row.handle, None)
            self._grow(2 * len(row.logprobs.token_ids))

    def finish(self, row: FinishedRow) -> None:
        """A request ended."""
        self._frame.finished.append(row)
        self._grow(0)

    def drain(self) -> None:
        """Tell the reader that the engine is about to stop."""
        self._frame.is_draining = True
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
        self._last_rows.clear()
        if not self._is_closed:
            self._filled.clear()
        elif frame.num_bytes == 0 and not frame.is_draining:
            return None
        return frame

    def _grow(self, num_entries: int) -> None:
        self._frame.num_bytes += _ROW_BYTES + _ENTRY_BYTES * num_entries
        self._filled.set()
