"""Resumable requests whose readers went away: how long they go on alone, and what those who come back are told.

Without a reader a request goes on for `resumable_s`, then it is aborted. Once it has ended, what it generated is kept
as long. Whoever submits it again reads it from the token on that it lacks: the living one (registry.py), or what is
kept here. If neither is there any more, it is computed again from its seed, as a new request.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable

from tokenloom.common.errors import TokenloomError, Unavailable
from tokenloom.scheduler import convert
from tokenloom.scheduler.core.request import FinishReason, Request
from tokenloom.scheduler.finished_store import FinishedRequest, FinishedStore
from tokenloom.scheduler.frames import FinishedRow
from tokenloom.scheduler.sessions import OUTBOX_BYTES, Stream, TokenizerSession


class Returns:
    """Timers of those who are alone, and the store of those that have ended.

    Args:
        resumable_s: how long both wait for a reader.
        max_bytes: bound on the store.
        end: aborts the request of a stream that nobody came back for.
    """

    def __init__(self, resumable_s: float, max_bytes: int, end: Callable[[Stream], None]) -> None:
        self._resumable_s = resumable_s
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._alone: dict[Stream, asyncio.TimerHandle] = {}
        self._finished = FinishedStore(resumable_s, max_bytes, OUTBOX_BYTES // 2)
        self._timer: asyncio.TimerHandle | None = None

    def wait_for(self, stream: Stream) -> None:
        """A living request lost its reader."""
        self._stop_waiting(stream)
        self._alone[stream] = self._loop.call_later(self._resumable_s, self._on_time_up, stream)

    def note_end(self, stream: Stream, reason: FinishReason, error: TokenloomError | None) -> None:
        """A resumable request ended; what somebody may come back for is kept."""
        self._stop_waiting(stream)
        if reason is FinishReason.ABORTED or not stream.has_begun or isinstance(error, Unavailable):
            return  # one that never ran was refused, and what was not there may be when its reader is back
        request = stream.request
        finished = FinishedRequest(
            request.request_id,
            stream.group_id,
            request.tenant,
            request.cache_salt,
            convert.settings_of(request.payload),
            array("I", request.prompt_token_ids),
            array("I", request.output_token_ids),
            tuple(stream.told),
            tuple(stream.told_prompt),
            stream.num_without_logprobs,
            request.num_cached_tokens or 0,
            reason,
            error,
        )
        self._finished.keep(finished, time.monotonic())
        self._arm_timer()

    @staticmethod
    def can_be_read_by(stream: Stream, request: Request) -> bool:
        """Nothing that the reader of `request` lacks of a living stream is lost."""
        return not stream.is_resumable or len(request.output_token_ids) >= stream.num_without_logprobs

    def answer(self, session: TokenizerSession, stream: Stream) -> bool:
        """Tell the reader of a new stream what is kept of its request; False if nothing is."""
        request = stream.request
        found = self._finished.find(request.request_id, time.monotonic())
        if found is None or not found.is_same(request, convert.settings_of(request.payload)):
            return False
        outbox, handle = session.outbox, stream.handle
        outbox.accept(handle, found.num_cached_tokens)
        if not request.reads_prefix_cache:  # it asks for the prompt's logprobs
            for run in found.told_prompt:
                outbox.add_prompt_logprobs(handle, run)
        for row in found.rows_since(len(request.output_token_ids)):
            outbox.add_tokens(handle, row.first_token_index, row.token_ids, row.logprobs)
        outbox.finish(FinishedRow(handle, found.reason, len(found.output_token_ids), found.error))
        return True

    def forget(self, request_or_group_id: str) -> None:
        """A request, or all choices of a group, were aborted: nothing of them is kept."""
        self._finished.forget(request_or_group_id)

    def stop(self) -> None:
        """Forget everything."""
        for timer in self._alone.values():
            timer.cancel()
        self._alone.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._finished.clear()

    def _on_time_up(self, stream: Stream) -> None:
        del self._alone[stream]
        if stream.session is None:
            self._end(stream)

    def _stop_waiting(self, stream: Stream) -> None:
        if (timer := self._alone.pop(stream, None)) is not None:
            timer.cancel()

    def _arm_timer(self) -> None:
        if self._timer is None and (next_s := self._finished.next_s) is not None:
            self._timer = self._loop.call_later(max(0.0, next_s - time.monotonic()), self._on_expiry)

    def _on_expiry(self) -> None:
        self._timer = None
        self._finished.expire(time.monotonic())
        self._arm_timer()
