"""The tokenizer stage: its parts, put together from the outside in, and their life."""

from __future__ import annotations

import asyncio
import logging

from tokenloom.api.v1 import inference_pb2_grpc
from tokenloom.common.address import parse_address
from tokenloom.common.auth import load_api_keys
from tokenloom.common.channel import PUBLIC_MESSAGE_BYTES
from tokenloom.common.errors import SetupError
from tokenloom.common.grpc_server import GrpcServer
from tokenloom.common.model_files import resolve_model
from tokenloom.tokenizer.assets import load_assets
from tokenloom.tokenizer.auth import Authenticator
from tokenloom.tokenizer.chat_template import ChatTemplate
from tokenloom.tokenizer.config import TokenizerConfig
from tokenloom.tokenizer.convert import EventConverter
from tokenloom.tokenizer.encoder import Encoder
from tokenloom.tokenizer.engine_client import EngineClient
from tokenloom.tokenizer.generation import GenerationService
from tokenloom.tokenizer.servicer import InferenceServicer
from tokenloom.tokenizer.token_text import TokenTexts

log = logging.getLogger(__name__)
SERVICE_NAME = "tokenloom.api.v1.InferenceService"


class TokenizerStage:
    """Listens at once, is ready while the session to the scheduler is up.

    Raises: SetupError if the model has no usable tokenizer, or the keys cannot be used.
    """

    name = "tokenizer"

    def __init__(self, config: TokenizerConfig) -> None:
        self._config = config
        keys = load_api_keys(config.api_key, config.keys_file)
        _check_sessions_are_guarded(config)
        source = resolve_model(config.model)
        assets = load_assets(source)
        self._encoder = Encoder(
            assets.tokenizer,
            max_text_bytes=config.max_text_bytes,
            cache_bytes=config.encoding_cache_bytes,
            max_queued_bytes=config.max_queued_text_bytes,
        )
        self._chat_template = ChatTemplate(
            assets.chat_templates,
            assets.special_tokens,
            () if config.allow_special_tokens else assets.special_token_texts,
            timeout_s=config.template_timeout_s,
        )
        self._engine = EngineClient(
            config.scheduler,
            cluster_token=config.process.cluster_token,
            model_id=source.model_id,
            tokenizer_fingerprint=source.tokenizer_fingerprint(),
            takeover_limit_s=config.takeover_limit_s,
            stall_timeout_s=config.stall_timeout_s,
            tenants=keys.tenants,
            on_state=self._on_engine_state,
        )
        self._generation = GenerationService(
            assets,
            self._encoder,
            self._chat_template,
            self._engine,
            model_id=source.model_id,
            max_active_choices=config.max_active_choices,
        )
        self._servicer = InferenceServicer(
            self._generation,
            assets,
            self._encoder,
            self._chat_template,
            self._engine,
            Authenticator(keys, config.process.cluster_token),
            EventConverter(TokenTexts(assets.tokenizer)),
            model_id=source.model_id,
            session_outbox_bytes=config.session_outbox_bytes,
            heartbeat_s=config.heartbeat_s,
        )
        add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        services = [(add, self._servicer, SERVICE_NAME)]
        self._server = GrpcServer(config.listen, services, max_message_bytes=PUBLIC_MESSAGE_BYTES)
        self._is_draining = False
        self._readiness: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        return self._server.port

    async def start(self) -> None:
        """Listen, and begin to connect to the scheduler."""
        await self._server.start()
        self._engine.start()
        log.info("listening on %s, waiting for the scheduler at %s", self._config.listen, self._config.scheduler)

    async def drain(self, grace_s: float) -> None:
        """Stop being ready, refuse new requests, let running ones finish.

        What is left after `grace_s` is given back to the gateways, which go on elsewhere, or fails.
        """
        self._is_draining = True
        await self._server.set_serving(False)
        self._servicer.tell_draining()
        await self._generation.drain(grace_s)
        self._servicer.end_sessions()

    async def stop(self) -> None:
        """End everything."""
        await self._server.stop(0.5)
        await self._engine.close()
        self._encoder.close()
        self._chat_template.close()

    def _on_engine_state(self, is_serving: bool) -> None:
        """Be ready while the engine is."""
        self._servicer.tell_load()
        task = asyncio.get_running_loop().create_task(self._server.set_serving(is_serving and not self._is_draining))
        self._readiness.add(task)
        task.add_done_callback(self._readiness.discard)


def _check_sessions_are_guarded(config: TokenizerConfig) -> None:
    """Raise SetupError if a digest from the keys file, which is no secret, would open a session to those outside."""
    for text in config.listen.split(","):
        address = parse_address(text.strip())
        if config.keys_file and not config.process.cluster_token and not address.is_local:
            raise SetupError(
                f"{address} can be reached from outside: set --cluster-token too where --keys-file is set, or listen "
                "at 127.0.0.1 or unix:PATH; sessions are trusted to send the digests of their callers' keys"
            )
