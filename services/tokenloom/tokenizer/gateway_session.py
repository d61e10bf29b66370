"""One gateway's session: many requests over one stream.

The requests' events gather in an outbox while the frame of an engine step is handled, and go out as one message when
the event loop comes round to the writer: one message per step and session, more only if it would be too large or take
too long to make. A gateway that does not read keeps nobody waiting; at the outbox's bound the request that fills most
of it is given up, or else all of the gateway's requests, and its session ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

from tokenloom.api.v1 import inference_pb2
from tokenloom.common.errors import Internal, InvalidArgument, TokenloomError
from tokenloom.common.keys_file import Scope
from tokenloom.common.pulse import Pulse
from tokenloom.common.schema import SCHEMA_REVISION, check_revision
from tokenloom.tokenizer.auth import Authenticator
from tokenloom.tokenizer.convert import EventConverter, session_start
from tokenloom.tokenizer.events import MAX_LOGPROBS_PER_EVENT, Accepted, Delta, Event, Failed
from tokenloom.tokenizer.generation import GenerationService
from tokenloom.tokenizer.outbox import Batch, Outbox, RequestSink, size_of

log = logging.getLogger(__name__)
_HELLO_TIMEOUT_S = 10.0
_MAX_FRAME_BYTES = 4 << 20
_IDS_PER_LOGPROB = 64
_LOAD_PERIOD_S = 0.5


class GatewaySession:
    """Serves one session.

    Args:
        max_outbox_bytes: bound on events that wait to be written.
        heartbeat_s: the load is told so often, twice a second if it changed, and at once if that matters.
        load: how busy the stage is.
    """

    def __init__(
        self,
        generation: GenerationService,
        authenticator: Authenticator,
        converter: EventConverter,
        *,
        model_id: str,
        max_outbox_bytes: int,
        heartbeat_s: float,
        load: Callable[[], inference_pb2.SessionLoad],
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._load = load
        self._must_tell_load = True
        self._told_load = inference_pb2.SessionLoad()
        self._generation = generation
        self._authenticator = authenticator
        self._converter = converter
        self._model_id = model_id
        self._outbox = Outbox(max_outbox_bytes, self._give_up, self._cancel)
        self._reader: asyncio.Task[None] | None = None
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._last_handle = 0
        self._wants_ids = False
        self._left: set[int] = set()
        self._must_tell_draining = False
        self._is_ending = False

    async def run(
        self, messages: AsyncIterator[inference_pb2.SessionRequest]
    ) -> AsyncIterator[inference_pb2.SessionResponse]:
        """Read the gateway's messages and yield ours, until one side ends the session and all its requests have ended.

        Raises: FailedPrecondition if the gateway speaks another schema; ResourceExhausted if it reads too slowly.
        """
        first = await self._hello(messages)
        yield inference_pb2.SessionResponse(
            welcome=inference_pb2.SessionWelcome(
                schema_revision=SCHEMA_REVISION,
                model=self._model_id,
                heartbeat_ms=round(self._heartbeat_s * 1000),
            )
        )
        reader = asyncio.get_running_loop().create_task(self._read(first, messages), name="gateway-session-reader")
        self._reader = reader
        pulse = Pulse(self._heartbeat_s, self.tell_load)
        load_watch = Pulse(min(_LOAD_PERIOD_S, self._heartbeat_s), self._tell_new_load)
        self._outbox.wake()  # for the first load
        try:
            while True:
                batch = await self._outbox.take()
                if self._must_tell_draining:  # before the requests that are given back, which go elsewhere then
                    self._must_tell_draining = False
                    yield inference_pb2.SessionResponse(draining=True)
                for part in parts_of(batch):
                    yield self._converter.frame(part, self._wants_ids)
                    await asyncio.sleep(0)
                if self._must_tell_load:
                    self._must_tell_load = False
                    self._told_load = self._load()
                    yield inference_pb2.SessionResponse(load=self._told_load)
                if (reader.done() or self._is_ending) and not self._outbox.has_news:
                    if reader.done():
                        reader.result()
                    if not self._requests:
                        return
        finally:
            pulse.stop()
            load_watch.stop()
            self._give_up()
            await asyncio.gather(reader, *self._requests.values(), return_exceptions=True)

    def _give_up(self) -> None:
        """Take no more requests and cancel those that run."""
        if self._reader is not None:
            self._reader.cancel()
        for task in self._requests.values():
            task.cancel()

    def _cancel(self, handle: int) -> None:
        """Give one request up; nothing more is told of it."""
        if (running := self._requests.get(handle)) is not None:
            running.cancel()

    def _tell_new_load(self) -> None:
        if self._load() != self._told_load:
            self.tell_load()

    def tell_load(self) -> None:
        """Tell the gateway how busy the stage is."""
        self._must_tell_load = True
        self._outbox.wake()

    def tell_draining(self) -> None:
        """Ask the gateway for no new requests."""
        self._must_tell_draining = True
        self._outbox.wake()

    def end(self) -> None:
        """End the session when all its requests have ended and the gateway knows."""
        self._is_ending = True
        self._outbox.wake()

    async def _hello(self, messages: AsyncIterator[inference_pb2.SessionRequest]) -> inference_pb2.SessionRequest:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            raise InvalidArgument("the session did not begin with a hello") from None
        if not first.HasField("hello"):
            raise InvalidArgument("the session did not begin with a hello")
        check_revision(first.hello.schema_revision, "gateway")
        self._wants_ids = first.hello.wants_token_ids
        log.info("gateway session opened by %s", first.hello.client_id)
        return first

    async def _read(
        self, first: inference_pb2.SessionRequest, messages: AsyncIterator[inference_pb2.SessionRequest]
    ) -> None:
        try:
            self._take(first)
            async for message in messages:
                self._take(message)
        finally:
            self._outbox.wake()

    def _take(self, message: inference_pb2.SessionRequest) -> None:
        for start in message.starts:
            if start.handle <= self._last_handle:
                raise InvalidArgument(f"handle {start.handle} does not rise", field="handle")
            self._last_handle = start.handle
            task = asyncio.get_running_loop().create_task(self._serve(start))
            self._requests[start.handle] = task
            task.add_done_callback(partial(self._forget, start.handle))
        for handle in message.cancelled_handles:
            if handle in self._requests:
                self._left.add(handle)
                self._outbox.close(handle)
                self._cancel(handle)
        for handle in message.detached_handles:
            if handle in self._requests:
                self._outbox.close(handle)
                self._cancel(handle)

    async def _serve(self, start: inference_pb2.SessionStart) -> None:
        """One request; it ends with exactly one of Completed and Failed, or with nothing if it was cancelled."""
        handle, request = start.handle, None
        try:
            caller = self._authenticator.caller_of(start.key_digest, Scope.INFERENCE)
            request = session_start(start, caller, self._wants_ids)
            await self._generation.run(request, RequestSink(self._outbox, handle))
        except asyncio.CancelledError:
            if (
                handle in self._left
                and request is not None
                and (request.age_s is not None or request.options.resumable)
            ):
                self._generation.abandon(request)  # what the engine has of it: left alone, or not taken over yet
            raise
        except TokenloomError as error:
            self._outbox.put(handle, Failed(error))
        except Exception:
            log.exception("unexpected error in a request")
            self._outbox.put(handle, Failed(Internal("internal error; the server's log has the details")))

    def _forget(self, handle: int, _: object) -> None:
        """A request's task is done, or was cancelled before it began."""
        del self._requests[handle]
        self._left.discard(handle)
        self._outbox.forget(handle)
        self._outbox.wake()


def parts_of(batch: Batch) -> Iterator[Batch]:
    """Cut what waited so long that one message would be too large, or hold the event loop up while it is made."""
    part: Batch = []
    num_bytes = num_entries = 0
    for item in batch:
        size, entries = size_of(item[1]), _entries_of(item[1])
        is_over = num_bytes + size > _MAX_FRAME_BYTES or num_entries + entries > MAX_LOGPROBS_PER_EVENT
        if part and is_over:
            yield part
            part, num_bytes, num_entries = [], 0, 0
        part.append(item)
        num_bytes += size
        num_entries += entries
    if part:
        yield part


def _entries_of(event: Event) -> int:
    """How long an event takes to be turned into protobuf, in logprobs."""
    if isinstance(event, Delta):
        return event.num_logprobs
    return sum(map(len, event.prompts)) // _IDS_PER_LOGPROB if isinstance(event, Accepted) else 0
