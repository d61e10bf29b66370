"""The public gRPC interface: protobuf in, one call, protobuf out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tokenloom.api.v1 import inference_pb2, inference_pb2_grpc
from tokenloom.tokenizer import convert
from tokenloom.tokenizer.assets import TokenizerAssets
from tokenloom.tokenizer.auth import Authenticator
from tokenloom.tokenizer.chat_template import ChatTemplate
from tokenloom.tokenizer.detokenizer import decode_whole
from tokenloom.tokenizer.domain import GenerationRequest, Trace
from tokenloom.tokenizer.encoder import Encoder
from tokenloom.tokenizer.engine_client import EngineClient
from tokenloom.tokenizer.gateway_session import GatewaySession
from tokenloom.tokenizer.generation import GenerationService
from tokenloom.tokenizer.outbox import Outbox, RequestSink
from tokenloom.tokenizer.validation import check_token_ids

_DIRECT_OUTBOX_BYTES = 16 << 20
_DIRECT_HANDLE = 1
_SHORT_DECODE_TOKENS = 1024


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
    ) -> None:
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

    async def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> AsyncIterator[inference_pb2.ChatResponse]:
        """Continue a conversation."""
        metadata = _metadata(context)
        caller = self._authenticator.direct_caller(metadata)
        wanted = convert.chat_request(request, caller, _trace(metadata), context.time_remaining())
        async for event in self._events(wanted):
            yield inference_pb2.ChatResponse(event=event)

    async def Complete(
        self, request: inference_pb2.CompleteRequest, context: Any
    ) -> AsyncIterator[inference_pb2.CompleteResponse]:
        """Continue prompts."""
        metadata = _metadata(context)
        caller = self._authenticator.direct_caller(metadata)
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
        )
        self._sessions.add(session)
        try:
            async for response in session.run(request_iterator):
                yield response
        finally:
            self._sessions.discard(session)

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        """Text to ids."""
        self._authenticator.direct_caller(_metadata(context))
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        ids = await self._encoder.encode(request.text, add_special_tokens=add_special_tokens)
        return inference_pb2.TokenizeResponse(token_ids=ids, max_model_len=self._engine.info.max_model_len)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        """Ids to text."""
        self._authenticator.direct_caller(_metadata(context))
        check_token_ids(request.token_ids, self._engine.info, "tokens")
        decode = (self._assets.tokenizer, request.token_ids, request.skip_special_tokens)
        if len(request.token_ids) <= _SHORT_DECODE_TOKENS:
            return inference_pb2.DetokenizeResponse(text=decode_whole(*decode))
        return inference_pb2.DetokenizeResponse(text=await asyncio.to_thread(decode_whole, *decode))

    async def RenderChat(
        self, request: inference_pb2.RenderChatRequest, context: Any
    ) -> inference_pb2.RenderChatResponse:
        """What Chat would send to the model."""
        self._authenticator.direct_caller(_metadata(context))
        rendered = await self._chat_template.render(convert.chat_input(request.chat))
        ids = await self._encoder.encode_segments(rendered.segments)
        return inference_pb2.RenderChatResponse(text=rendered.text, token_ids=ids)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """The model served."""
        self._authenticator.direct_caller(_metadata(context))
        limit = self._engine.info.max_model_len
        model = inference_pb2.Model(id=self._model_id, created_s=self._created_s, max_model_len=limit)
        return inference_pb2.ListModelsResponse(models=[model])

    def tell_draining(self) -> None:
        """Ask all gateways for no new requests."""
        for session in self._sessions:
            session.tell_draining()

    async def _events(self, request: GenerationRequest) -> AsyncIterator[inference_pb2.GenerationEvent]:
        """The events of one direct call; leaving it early cancels the request."""
        outbox = Outbox(_DIRECT_OUTBOX_BYTES, on_full=lambda: _cancel(task))
        task = asyncio.get_running_loop().create_task(
            self._generation.run(request, RequestSink(outbox, _DIRECT_HANDLE))
        )
        task.add_done_callback(lambda _: outbox.wake())
        try:
            while not task.done() or outbox.has_news:
                for _, event in await outbox.take():
                    yield self._converter.event(event)
            await task
        finally:
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
