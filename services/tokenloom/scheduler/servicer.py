"""EngineService over gRPC: protobuf in, one call, protobuf out."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

from opentelemetry.trace import SpanKind

from tokenloom.api.v1 import engine_pb2, engine_pb2_grpc
from tokenloom.common.errors import FailedPrecondition, InvalidArgument, TokenloomError, Unavailable
from tokenloom.common.schema import check_revision
from tokenloom.common.telemetry import context_of, extract, inject, tracer
from tokenloom.scheduler import convert
from tokenloom.scheduler.capabilities import Capabilities
from tokenloom.scheduler.core.request import FinishReason
from tokenloom.scheduler.engine import Engine
from tokenloom.scheduler.recorder import Recorder, parts_of
from tokenloom.scheduler.sessions import Stream, TokenizerSession
from tokenloom.scheduler.watchers import LoadState, StepRecord, load_of

log = logging.getLogger(__name__)
_HELLO_TIMEOUT_S = 10.0
Requests = AsyncIterator[engine_pb2.EngineServiceSessionRequest]


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """The scheduler's gRPC interface."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self._engine = engine
        self._recorder = recorder
        self._epoch = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()

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
            )
        )
        reader = asyncio.create_task(self._read(request_iterator, session, capabilities))
        session.on_closed = reader.cancel
        self._engine.open_session(session)
        try:
            while (frame := await session.outbox.take()) is not None:
                yield convert.response_of(frame)
            if reader.done() and not reader.cancelled():
                reader.result()
        finally:
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
        try:
            async for frame in request_iterator:
                for submit in frame.submits:
                    self._submit(session, submit, capabilities)
                for attach in frame.attaches:
                    self._engine.attach(session, attach.handle, attach.request_id, attach.from_token_index)
                for finish in frame.finishes:
                    self._engine.finish(session, finish.handle, convert.finish_reason_of(finish.reason))
                for cancel in frame.cancels:
                    self._engine.finish(session, cancel.handle, FinishReason.ABORTED)
        finally:
            session.outbox.close()

    def _submit(self, session: TokenizerSession, submit: engine_pb2.Submit, capabilities: Capabilities) -> None:
        now = self._loop.time()
        try:
            request = convert.request_of(submit, capabilities, now)
        except TokenloomError as error:
            session.outbox.reject(submit.handle, error)
            return
        span = tracer().start_span("engine.request", context=extract(submit.trace), kind=SpanKind.SERVER)
        span.set_attribute("tokenloom.request_id", submit.request_id)
        request.payload.trace = inject(context_of(span))
        age_s = submit.age_ms / 1000 if submit.HasField("age_ms") else 0.0
        stream = Stream(request, session, submit.handle, submit.group_id, now - age_s, span)
        self._engine.submit(session, stream, is_resubmission=submit.HasField("age_ms"))

    async def Abort(self, request: engine_pb2.AbortRequest, context: Any) -> engine_pb2.AbortResponse:
        """End a request of any session."""
        outcome = {
            True: engine_pb2.AbortResponse.OUTCOME_ABORTED,
            False: engine_pb2.AbortResponse.OUTCOME_ALREADY_FINISHED,
            None: engine_pb2.AbortResponse.OUTCOME_NOT_FOUND,
        }[self._engine.abort(request.request_id)]
        return engine_pb2.AbortResponse(outcome=outcome)

    async def GetLoad(self, request: engine_pb2.GetLoadRequest, context: Any) -> engine_pb2.GetLoadResponse:
        """How busy the engine is."""
        if self._engine.core is None:
            raise Unavailable("the engine is not ready: it waits for its executor", retry_after_s=1.0)
        return engine_pb2.GetLoadResponse(load=_load_proto(load_of(self._engine.core)))

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
                yield _step_proto(await queue.get(), watchers.take_num_dropped(queue))

    async def GetRecording(
        self, request: engine_pb2.GetRecordingRequest, context: Any
    ) -> AsyncIterator[engine_pb2.GetRecordingResponse]:
        """The flight recorder's ring, as of now."""
        if self._recorder.is_empty:
            raise FailedPrecondition("nothing is recorded: no step ran yet, or --record-steps is 0")
        for part in parts_of(self._recorder.chunks()):
            yield part


def _step_proto(record: StepRecord, num_dropped: int) -> engine_pb2.WatchStepsResponse:
    return engine_pb2.WatchStepsResponse(
        step_id=record.step_id,
        max_num_batched_tokens=record.max_num_batched_tokens,
        request_ids=record.request_ids,
        num_scheduled_tokens=record.num_scheduled_tokens,
        num_computed_tokens=record.num_computed_tokens,
        preempted_request_ids=record.preempted_request_ids,
        load=_load_proto(record.load),
        num_dropped=num_dropped,
    )


def _load_proto(load: LoadState) -> engine_pb2.Load:
    return engine_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
    )
