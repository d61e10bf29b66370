"""EngineService over gRPC: protobuf in, one call, protobuf out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from opentelemetry.trace import SpanKind

from tokenloom.api.v1 import engine_pb2, engine_pb2_grpc
from tokenloom.common.errors import FailedPrecondition, InvalidArgument, TokenloomError, Unavailable
from tokenloom.common.pulse import Pulse
from tokenloom.common.schema import check_revision
from tokenloom.common.telemetry import context_of, extract, inject, tracer
from tokenloom.scheduler import convert, frames, metrics, watch_convert
from tokenloom.scheduler.capabilities import Capabilities
from tokenloom.scheduler.core.request import FinishReason
from tokenloom.scheduler.engine import Engine
from tokenloom.scheduler.recorder import Recorder, parts_of
from tokenloom.scheduler.sessions import MAX_REFUSED_TENANTS, Stream, TokenizerSession

log = logging.getLogger(__name__)
_HELLO_TIMEOUT_S = 10.0
_MAX_TURN_S = 0.001
MUCH_BYTES = 1 << 20
Requests = AsyncIterator[engine_pb2.EngineServiceSessionRequest]


class Turns:
    """Lets the step loop run while a session's frame is taken: a prompt of 32k tokens alone is 3 ms of work."""

    def __init__(self) -> None:
        self._began_s = 0.0

    def begin(self) -> None:
        """A frame came: a new turn of the event loop. What fits into it is taken in one go and planned together."""
        self._began_s = time.monotonic()

    async def pause_if_long(self) -> None:
        """Let others run if this turn of the event loop has been held for a while."""
        if time.monotonic() - self._began_s > _MAX_TURN_S:
            await asyncio.sleep(0)
            self.begin()


async def _pause_if_much(session: TokenizerSession, num_bytes_before: int) -> None:
    """After a request was taken over that had much to tell: let the session read that before more is added."""
    if session.outbox.num_bytes - num_bytes_before > MUCH_BYTES:
        await session.outbox.wait_until_written()


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """The scheduler's gRPC interface.

    Args:
        heartbeat_s: longest silence on a session. Signs of life come from the event loop of the engine itself.
    """

    def __init__(self, engine: Engine, recorder: Recorder, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._engine = engine
        self._recorder = recorder
        self._epoch = uuid.uuid4().hex

    async def Session(
        self, request_iterator: Requests, context: Any
    ) -> AsyncIterator[engine_pb2.EngineServiceSessionResponse]:
        """Serve one tokenizer: a task reads its frames, this one writes ours."""
        capabilities, session = await self._greet(request_iterator)
        assert self._engine.core is not None
        yield engine_pb2.EngineServiceSessionResponse(
            welcome=convert.welcome(
                capabilities,
                self._epoch,
                self._engine.core.max_request_tokens,
                self._engine.core.config.max_num_waiting,
                self._heartbeat_s,
            )
        )
        reader = asyncio.create_task(self._read(request_iterator, session, capabilities))
        session.on_closed = reader.cancel
        self._engine.open_session(session)
        pulse = Pulse(self._heartbeat_s, session.outbox.beat)
        try:
            while (frame := await session.outbox.take()) is not None:
                for part in frames.parts_of(frame):
                    pulse.note_sent()
                    yield convert.response_of(part)
            if reader.done() and not reader.cancelled():
                reader.result()
        finally:
            pulse.stop()
            reader.cancel()
            self._engine.lose_session(session)

    async def _greet(self, request_iterator: Requests) -> tuple[Capabilities, TokenizerSession]:
        """Read Hello and refuse who does not fit."""
        try:
            first = await asyncio.wait_for(anext(request_iterator), _HELLO_TIMEOUT_S)
        except (TimeoutError, StopAsyncIteration):
            raise InvalidArgument("a session begins with Hello", field="hello") from None
        if not first.HasField("hello"):
            raise InvalidArgument("a session begins with Hello", field="hello")
        capabilities = self._engine.capabilities
        if capabilities is None:
            raise Unavailable("the engine is not ready: it waits for its executor", retry_after_s=1.0)
        hello = first.hello
        mine = {
            "model_id": capabilities.model_id,
            "tokenizer_fingerprint": capabilities.tokenizer_fingerprint,
        }
        for field, value in mine.items():
            if (theirs := getattr(hello, field)) and theirs != value:
                raise FailedPrecondition(f"{field}: the engine has {value}, the tokenizer {theirs}", field=field)
        check_revision(hello.schema_revision, "tokenizer")
        return capabilities, TokenizerSession(hello.client_id)

    async def _read(self, request_iterator: Requests, session: TokenizerSession, capabilities: Capabilities) -> None:
        turns = Turns()
        try:
            async for frame in request_iterator:
                turns.begin()
                for policy in frame.tenants:
                    self._define_tenant(session, policy)
                    await turns.pause_if_long()
                for submit in frame.submits:
                    num_bytes = session.outbox.num_bytes
                    await self._submit(session, submit, capabilities, turns)
                    await _pause_if_much(session, num_bytes)
                    await turns.pause_if_long()
                for attach in frame.attaches:
                    num_bytes = session.outbox.num_bytes
                    self._engine.attach(session, attach.handle, attach.request_id, attach.from_token_index)
                    await _pause_if_much(session, num_bytes)
                for finish in frame.finishes:
                    self._engine.finish(session, finish.handle, convert.finish_reason_of(finish.reason))
                for cancel in frame.cancels:
                    self._engine.finish(session, cancel.handle, FinishReason.ABORTED)
                for detach in frame.detaches:
                    self._engine.detach(session, detach.handle)
        finally:
            session.outbox.close()

    def _define_tenant(self, session: TokenizerSession, proto: engine_pb2.TenantPolicy) -> None:
        """Take a tenant's policy.

        A malformed one changes nothing, but the session's submits for that tenant are refused until a good one comes:
        they would run under other limits than their sender believes.

        Raises: TokenloomError if the session sends nothing but malformed ones, which ends it.
        """
        try:
            self._engine.set_tenant(proto.tenant, convert.tenant_policy_of(proto))
            session.refused_tenants.pop(proto.tenant, None)
        except TokenloomError as error:
            log.warning("session of %s: %s", session.client_id, error.message)
            if len(session.refused_tenants) >= MAX_REFUSED_TENANTS:
                raise
            if error.field != "tenant":  # under such a name no submit is taken anyway
                session.refused_tenants[proto.tenant] = error

    async def _submit(
        self, session: TokenizerSession, submit: engine_pb2.Submit, capabilities: Capabilities, turns: Turns
    ) -> None:
        now = time.monotonic()
        try:
            request = convert.request_of(submit, capabilities, now)
            error = session.refused_tenants.get(submit.tenant)
        except TokenloomError as refusal:
            error = refusal
        if error is not None:
            metrics.REFUSED.labels(error.reason).inc()
            session.outbox.reject(submit.handle, error)
            return
        await turns.pause_if_long()
        span = tracer().start_span("engine.request", context=extract(submit.trace), kind=SpanKind.SERVER)
        span.set_attribute("tokenloom.request_id", submit.request_id)
        request.payload.trace = inject(context_of(span))
        stream = Stream(request, session, submit.handle, submit.group_id, now, span, is_resumable=submit.resumable)
        self._engine.submit(session, stream, is_resubmission=submit.HasField("age_ms"))

    async def Abort(self, request: engine_pb2.AbortRequest, context: Any) -> engine_pb2.AbortResponse:
        """End a request of any session."""
        if not request.request_id:
            raise InvalidArgument("an abort names a request or a group", field="request_id")
        outcome = {
            True: engine_pb2.AbortResponse.OUTCOME_ABORTED,
            False: engine_pb2.AbortResponse.OUTCOME_ALREADY_FINISHED,
            None: engine_pb2.AbortResponse.OUTCOME_NOT_FOUND,
        }[self._engine.abort(request.request_id)]
        return engine_pb2.AbortResponse(outcome=outcome)

    async def GetLoad(self, request: engine_pb2.GetLoadRequest, context: Any) -> engine_pb2.GetLoadResponse:
        """How busy the engine is."""
        if (load := self._engine.load()) is None:
            raise Unavailable("the engine is not ready: it waits for its executor", retry_after_s=1.0)
        return engine_pb2.GetLoadResponse(load=convert.load_proto(load))

    async def FlushPrefixCache(
        self, request: engine_pb2.FlushPrefixCacheRequest, context: Any
    ) -> engine_pb2.FlushPrefixCacheResponse:
        """Forget all cached prefixes that no request holds."""
        return engine_pb2.FlushPrefixCacheResponse(num_blocks_flushed=self._engine.flush_prefix_cache())

    async def WatchSteps(
        self, request: engine_pb2.WatchStepsRequest, context: Any
    ) -> AsyncIterator[engine_pb2.WatchStepsResponse]:
        """Every plan as it is made."""
        watchers = self._engine.watchers
        with watchers.subscribe() as queue:
            await context.send_initial_metadata(())  # tells the reader that it sees every plan from here on
            while True:
                record = await queue.get()
                yield watch_convert.step_proto(record, watchers.take_num_dropped(queue))

    async def WatchCacheEvents(
        self, request: engine_pb2.WatchCacheEventsRequest, context: Any
    ) -> AsyncIterator[engine_pb2.WatchCacheEventsResponse]:
        """What the prefix cache holds, and how that changes."""
        with self._engine.cache_watchers.subscribe() as reader:
            for sequence in itertools.count():
                part = await reader.take()
                assert self._engine.capabilities is not None, "there is no cache without an executor"
                block_size = self._engine.capabilities.block_size
                yield watch_convert.cache_events_proto(part, sequence, block_size, self._epoch)

    async def GetRecording(
        self, request: engine_pb2.GetRecordingRequest, context: Any
    ) -> AsyncIterator[engine_pb2.GetRecordingResponse]:
        """The flight recorder's ring, as of now."""
        if self._recorder.is_empty:
            raise FailedPrecondition("nothing is recorded: no step ran yet, or --record-steps is 0")
        for part in parts_of(self._recorder.chunks()):
            yield part
