"""The public gRPC interface: protobuf in, one call, protobuf out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tokenloom.api.v1 import inference_pb2, inference_pb2_grpc
from tokenloom.common.errors import InvalidArgument
from tokenloom.common.keys_file import Scope
from tokenloom.tokenizer import convert
from tokenloom.tokenizer.assets import TokenizerAssets
from tokenloom.tokenizer.auth import Authenticator
from tokenloom.tokenizer.chat_template import ChatTemplate
from tokenloom.tokenizer.detokenizer import Detokenizer
from tokenloom.tokenizer.direct_calls import DirectCall, DirectCalls
from tokenloom.tokenizer.domain import GenerationRequest, Trace
from tokenloom.tokenizer.encoder import Encoder
from tokenloom.tokenizer.engine_client import EngineClient
from tokenloom.tokenizer.gateway_session import GatewaySession
from tokenloom.tokenizer.generation import GenerationService
from tokenloom.tokenizer.outbox import Outbox, RequestSink
from tokenloom.tokenizer.validation import MAX_PROMPT_IDS, check_token_ids

_DIRECT_OUTBOX_BYTES = 16 << 20
_DIRECT_HANDLE = 1
_IDS_AT_ONCE = 32_768  # copied in one go; then others' requests go on
_DECODED_AT_ONCE = 256


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Text in, text out; see inference.proto for the contract."""

    def __init__(
        self,
        generation: GenerationService,
        assets: TokenizerAssets,
        encoder: Encoder,
        chat_template: ChatTemplate,
        engine: EngineClient,
        authenticator: Authenticator,
        converter: convert.EventConverter,
        *,
        model_id: str,
        session_outbox_bytes: int,
        heartbeat_s: float,
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._generation = generation
        self._assets = assets
        self._encoder = encoder
        self._chat_template = chat_template
        self._engine = engine
        self._authenticator = authenticator
        self._converter = converter
        self._model_id = model_id
        self._session_outbox_bytes = session_outbox_bytes
        self._created_s = int(time.time())
        self._sessions: set[GatewaySession] = set()
        self._direct_calls = DirectCalls()
        self._is_draining = False

    async def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> AsyncIterator[inference_pb2.ChatResponse]:
        """Continue a conversation."""
        metadata = _metadata(context)
        caller = self._authenticator.direct_caller(metadata, Scope.INFERENCE)
        wanted = convert.chat_request(request, caller, _trace(metadata), context.time_remaining())
        async for event in self._events(wanted):
            yield inference_pb2.ChatResponse(event=event)

    async def Complete(
        self, request: inference_pb2.CompleteRequest, context: Any
    ) -> AsyncIterator[inference_pb2.CompleteResponse]:
        """Continue prompts."""
        metadata = _metadata(context)
        caller = self._authenticator.direct_caller(metadata, Scope.INFERENCE)
        wanted = convert.complete_request(request, caller, _trace(metadata), context.time_remaining())
        async for event in self._events(wanted):
            yield inference_pb2.CompleteResponse(event=event)

    async def Session(
        self, request_iterator: AsyncIterator[inference_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[inference_pb2.SessionResponse]:
        """Serve a gateway's requests over one stream."""
        self._authenticator.check_gateway(_metadata(context))
        session = GatewaySession(
            self._generation,
            self._authenticator,
            self._converter,
            model_id=self._model_id,
            max_outbox_bytes=self._session_outbox_bytes,
            heartbeat_s=self._heartbeat_s,
            load=self._session_load,
        )
        self._sessions.add(session)
        if self._is_draining:
            session.tell_draining()
        try:
            async for response in session.run(request_iterator):
                yield response
        finally:
            self._sessions.discard(session)

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        """Text to ids."""
        self._authenticator.direct_caller(_metadata(context), Scope.INFERENCE)
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        ids = await self._encoder.encode(request.text, add_special_tokens=add_special_tokens)
        response = inference_pb2.TokenizeResponse(max_model_len=self._engine.info.max_model_len)
        for start in range(0, len(ids), _IDS_AT_ONCE):
            response.token_ids.extend(ids[start : start + _IDS_AT_ONCE])
            await asyncio.sleep(0)
        return response

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        """Ids to text."""
        self._authenticator.direct_caller(_metadata(context), Scope.INFERENCE)
        ids, info = request.token_ids, self._engine.info
        if len(ids) > MAX_PROMPT_IDS:
            raise InvalidArgument(f"{len(ids)} tokens; at most {MAX_PROMPT_IDS} are accepted", field="tokens")
        skipped = self._assets.special_token_ids if request.skip_special_tokens else frozenset()
        detokenizer = Detokenizer(self._assets.tokenizer, skipped)
        texts: list[str] = []
        for start in range(0, len(ids), _DECODED_AT_ONCE):
            part = ids[start : start + _DECODED_AT_ONCE]
            check_token_ids(part, info, "tokens")
            texts += map(detokenizer.push, part)
            await asyncio.sleep(0)
        return inference_pb2.DetokenizeResponse(text="".join((*texts, detokenizer.flush())))

    async def RenderChat(
        self, request: inference_pb2.RenderChatRequest, context: Any
    ) -> inference_pb2.RenderChatResponse:
        """What Chat would send to the model."""
        self._authenticator.direct_caller(_metadata(context), Scope.INFERENCE)
        rendered = await self._chat_template.render(convert.chat_input(request.chat))
        limit = self._engine.info.max_model_len
        ids = await self._encoder.encode_segments(rendered.segments, max_model_len=limit)
        return inference_pb2.RenderChatResponse(text=rendered.text, token_ids=ids)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """The model served."""
        self._authenticator.direct_caller(_metadata(context), scope=None)
        limit = self._engine.info.max_model_len
        model = inference_pb2.Model(id=self._model_id, created_s=self._created_s, max_model_len=limit)
        return inference_pb2.ListModelsResponse(models=[model])

    def tell_load(self) -> None:
        """Tell all gateways how busy the stage is, and whether its engine has an executor."""
        for session in self._sessions:
            session.tell_load()

    def _session_load(self) -> inference_pb2.SessionLoad:
        return inference_pb2.SessionLoad(
            num_choices=self._generation.num_choices, waits_for_executor=self._engine.waits_for_executor
        )

    def tell_draining(self) -> None:
        """Ask all gateways for no new requests, those that connect from now on included."""
        self._is_draining = True
        for session in self._sessions:
            session.tell_draining()

    def end_sessions(self) -> None:
        """End the gateways' sessions, each when its requests have ended."""
        for session in self._sessions:
            session.end()

    async def _events(self, request: GenerationRequest) -> AsyncIterator[inference_pb2.GenerationEvent]:
        """The events of one direct call; leaving it early cancels the request."""
        outbox = Outbox(_DIRECT_OUTBOX_BYTES, on_full=lambda: _cancel(task))
        task = asyncio.get_running_loop().create_task(
            self._generation.run(request, RequestSink(outbox, _DIRECT_HANDLE))
        )
        task.add_done_callback(lambda _: outbox.wake())
        call, loop = DirectCall(outbox), asyncio.get_running_loop()
        self._direct_calls.add(call)
        try:
            while not task.done() or outbox.has_news:
                for _, event in await outbox.take():
                    call.busy_since_s = loop.time()
                    yield self._converter.event(event)
                call.busy_since_s = None
            await task
        finally:
            self._direct_calls.remove(call)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # seen, if the call ended for another reason


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _metadata(context: Any) -> Mapping[str, str]:
    """A call's metadata, text entries only."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _trace(metadata: Mapping[str, str]) -> Trace:
    return Trace(metadata.get("traceparent", ""), metadata.get("tracestate", ""))
