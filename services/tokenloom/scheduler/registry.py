"""Who reads what: the living requests by id, the sessions, and what happens when one takes over from another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterable

from tokenloom.common.errors import Cancelled, FailedPrecondition, ResourceExhausted
from tokenloom.scheduler.core.request import FinishReason
from tokenloom.scheduler.frames import FinishedRow
from tokenloom.scheduler.load import LoadState
from tokenloom.scheduler.sessions import OUTBOX_BYTES, Stream, TokenizerSession

log = logging.getLogger(__name__)
_REMEMBERED_IDS = 4096


class Registry:
    """Streams and sessions. Knows nothing of the core: what ends a request is the engine's business."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.sessions: set[TokenizerSession] = set()
        self._ended_ids: OrderedDict[str, None] = OrderedDict()
        self._became_idle = asyncio.Event()

    # --- sessions -----------------------------------------------------------------------------------------------

    def open(self, session: TokenizerSession) -> None:
        """A tokenizer connected."""
        self.sessions.add(session)
        log.info("session of %s opened", session.client_id)

    def lose(self, session: TokenizerSession) -> list[Stream]:
        """A tokenizer's stream ended; returns the living requests that nobody reads now."""
        self.sessions.discard(session)
        session.outbox.close()
        left = list(session.streams.values())
        session.streams.clear()
        for stream in left:
            stream.session = None
            stream.num_losses += 1
        log.info("session of %s ended with %d requests alive", session.client_id, len(left))
        return left

    def orphans(self, losses: Iterable[tuple[Stream, int]]) -> list[str]:
        """Ids of the requests that nobody took over since a loss: pairs of a stream and its `num_losses` then."""
        return [
            stream.request.request_id
            for stream, num_losses in losses
            if stream.session is None
            and stream.num_losses == num_losses
            and self.streams.get(stream.request.request_id) is stream
        ]

    def overflown_sessions(self) -> list[TokenizerSession]:
        """Sessions whose readers do not read."""
        return [session for session in self.sessions if session.outbox.is_overflown]

    def give_up(self, session: TokenizerSession) -> None:
        """Tell a reader that does not read, if it ever does again, and stop listening to it."""
        log.warning("session of %s does not read; closing it", session.client_id)
        session.outbox.fail(
            ResourceExhausted(f"the session was not read: over {OUTBOX_BYTES >> 20} MiB waited", reason="SLOW_READER")
        )
        session.on_closed()

    def tell_load(self, load: LoadState) -> None:
        """Tell all sessions how busy the engine is."""
        for session in self.sessions:
            session.outbox.set_load(load)

    @staticmethod
    def detach(session: TokenizerSession, handle: int) -> Stream | None:
        """A session reads a request no longer; returns its stream, None if it had ended."""
        stream = session.streams.pop(handle, None)
        if stream is not None:
            stream.session = None
            stream.num_losses += 1
        return stream

    # --- requests -----------------------------------------------------------------------------------------------

    def add(self, stream: Stream) -> None:
        """A request was taken."""
        self.streams[stream.request.request_id] = stream
        if stream.session is not None:
            stream.session.streams[stream.handle] = stream

    def remove(self, stream: Stream) -> None:
        """A request ended; its id is remembered for a while."""
        request_id = stream.request.request_id
        del self.streams[request_id]
        if stream.session is not None:
            stream.session.streams.pop(stream.handle, None)
        self._ended_ids[request_id] = None
        if len(self._ended_ids) > _REMEMBERED_IDS:
            self._ended_ids.popitem(last=False)
        if not self.streams:
            self._became_idle.set()

    def has_ended(self, request_id: str) -> bool:
        """A request of this id was alive once, not long ago."""
        return request_id in self._ended_ids

    def ids_of(self, request_or_group_id: str) -> list[str]:
        """Ids of a living request, or of all living choices of a group."""
        return [
            request_id
            for request_id, stream in self.streams.items()
            if request_or_group_id in (request_id, stream.group_id)
        ]

    async def wait_until_idle(self, limit_s: float) -> None:
        """Return when no request is alive, or after `limit_s` seconds."""
        if self.streams:
            self._became_idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._became_idle.wait(), limit_s)

    # --- takeovers ----------------------------------------------------------------------------------------------

    def attach(self, session: TokenizerSession, handle: int, request_id: str, from_token_index: int) -> None:
        """Let `session` read a living request from a token on; its reader until now is told so."""
        stream = self.streams.get(request_id)
        if stream is None:
            error = FailedPrecondition(f"request {request_id!r} is not alive", field="request_id")
            session.outbox.reject(handle, error)
            return
        if stream.session is not None:
            self._supersede(stream, stream.session)
        stream.session, stream.handle = session, handle
        session.streams[handle] = stream
        if stream.request.num_cached_tokens is not None:
            session.outbox.accept(handle, stream.request.num_cached_tokens)
        for run in stream.told_prompt:
            session.outbox.add_prompt_logprobs(handle, run)
        for row in stream.rows_since(from_token_index):
            session.outbox.add_tokens(handle, row.first_token_index, row.token_ids, row.logprobs)

    def _supersede(self, stream: Stream, session: TokenizerSession) -> None:
        """Tell a living session that another one reads its request from now on."""
        session.streams.pop(stream.handle, None)
        error = Cancelled("another session took the request over", reason="SUPERSEDED")
        num_generated = len(stream.request.output_token_ids)
        session.outbox.finish(FinishedRow(stream.handle, FinishReason.ERROR, num_generated, error))
