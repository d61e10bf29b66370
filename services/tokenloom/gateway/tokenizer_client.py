"""The gateway's end of one tokenizer: a Session that carries all requests, and the stage's health.

Three tasks per tokenizer: one keeps a session open (reads frames, reconnects with backoff), one writes what is to be
sent as merged frames, one watches grpc.health.v1. When a session is lost, its requests go back to the pool, and so do
single requests that a tokenizer gives up because it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenloom.api.v1 import inference_pb2, inference_pb2_grpc
from tokenloom.common.channel import PUBLIC_MESSAGE_BYTES, bearer_metadata, make_channel
from tokenloom.common.errors import FailedPrecondition, Unavailable, from_rpc_error
from tokenloom.common.schema import SCHEMA_REVISION, check_revision
from tokenloom.common.silence import STALL_TIMEOUT_S, Silence, read_while_heard, silence_limit_s
from tokenloom.gateway import convert, metrics
from tokenloom.gateway.generation import Generation
from tokenloom.gateway.model_info import ModelInfo

log = logging.getLogger(__name__)
SERVICE = "tokenloom.api.v1.InferenceService"
# A frame and its framing must stay under the limit of a message.
MAX_START_BYTES = PUBLIC_MESSAGE_BYTES - (64 << 10)
_WELCOME_LIMIT_S = 10.0
_UNARY_LIMIT_S = 5.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_GIVEN_BACK_PAUSE_S = 0.2
# Tokenizers with the same engine have all said by then that it waits.
_LEAVES_ENGINE_AFTER_S = 1.0
_FRAME_BYTES = 1 << 20
_MAX_U32 = 2**32 - 1
# Reasons of a tokenizer that takes no requests, or keeps none, because it is about to stop; and of one whose engine is
# gone, or has no executor.
_STOPS = frozenset({"DRAINING"})
_TAKEN_OVER = frozenset({"SUPERSEDED", "TAKEN_OVER"})
_LOST_ENGINE = frozenset({"EXECUTOR_LOST", "ENGINE_UNAVAILABLE"})


@dataclass(slots=True)
class Call:
    """A generation, what starts it anywhere, since when it is here and when its time is up (the loop's clock).

    Attributes:
        is_sent: a session had it, so it is no new request any more.
        num_attempts: sessions that it was sent through since it last went on.
        num_tokens: tokens that it had then.
        give_up: the timer of its wait for another session.
    """

    generation: Generation
    start: convert.Start
    began_s: float
    deadline_s: float
    is_sent: bool = False
    num_attempts: int = 0
    num_tokens: int = 0
    give_up: asyncio.TimerHandle | None = None
    num_choices: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_choices = convert.num_choices_of(self.start)

    def note_progress(self) -> None:
        """Its session was lost: it has all its attempts again if it went on in there."""
        num_tokens = self.generation.progress.num_tokens
        if num_tokens > self.num_tokens:
            self.num_attempts, self.num_tokens = 0, num_tokens

    def end_wait(self) -> None:
        """It waits no more."""
        if self.give_up is not None:
            self.give_up.cancel()
            self.give_up = None


class Outbox:
    """What the session has still to send; whatever piles up while a frame is written goes into the next one."""

    def __init__(self) -> None:
        self._starts: dict[int, convert.Start] = {}
        self._cancelled: list[int] = []
        self._detached: list[int] = []
        self._has_work = asyncio.Event()

    def add_start(self, start: convert.Start) -> None:
        """Begin a request; its handle is set."""
        self._starts[start.handle] = start
        self._has_work.set()

    def add_cancel(self, handle: int) -> None:
        """End a request. One that was not sent yet is simply forgotten."""
        if self._starts.pop(handle, None) is None:
            self._cancelled.append(handle)
            self._has_work.set()

    def add_detach(self, handle: int) -> None:
        """Read a request no longer, whose client may return; else as `add_cancel`."""
        if self._starts.pop(handle, None) is None:
            self._detached.append(handle)
            self._has_work.set()

    async def next_frame(self) -> inference_pb2.SessionRequest:
        """A frame of about 1 MiB at most, unless one request alone is larger."""
        await self._has_work.wait()
        frame = inference_pb2.SessionRequest(cancelled_handles=self._cancelled, detached_handles=self._detached)
        self._cancelled.clear()
        self._detached.clear()
        size = 0
        for handle, start in list(self._starts.items()):
            size += start.ByteSize()
            if frame.starts and size > _FRAME_BYTES:
                break
            frame.starts.append(self._starts.pop(handle))
        if not self._starts:
            self._has_work.clear()
        return frame


class TokenizerClient:
    """A tokenizer as the pool sees it.

    Args:
        address: `unix:PATH` or `host:port`.
        cluster_token: credential between stages; empty: none.
        client_id: this gateway's name in the tokenizer's logs.
        on_lost: told the calls of a session that ended, and whether something was too large for it; or calls that a
            tokenizer that stops gave back.
        on_up: told when a session is open, and when the tokenizer became healthy.

    Attributes:
        is_up: a session is open.
        is_draining: the tokenizer asked for no new requests.
        is_serving: its health says SERVING.
        has_served: it did so in this session, so its engine is known there: it keeps requests while that is away.
        left_at_s: when a session last ended because the tokenizer stopped; the loop's clock.
        waits_for_executor: it takes requests, which wait until its engine has an executor again.
        num_choices: our own choices in flight there.
        has_other: asked whether another tokenizer is there that serves.
    """

    def __init__(
        self,
        address: str,
        cluster_token: str,
        client_id: str,
        on_lost: Callable[[list[Call], bool], None],
        on_up: Callable[[], None],
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self.address = address
        self.is_up = False
        self.is_draining = False
        self.is_serving = False
        self.has_served = False
        self.left_at_s = -math.inf
        self.waits_for_executor = False
        self._waits_since_s = 0.0
        self.has_other: Callable[[], bool] = lambda: False
        self._stall_timeout_s = stall_timeout_s
        self._client_id = client_id
        self._metadata = bearer_metadata(cluster_token)
        self._on_lost = on_lost
        self._on_up = on_up
        self._channel = make_channel(address, max_message_bytes=PUBLIC_MESSAGE_BYTES)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._outbox = Outbox()
        self._calls: dict[int, Call] = {}
        self._generations: dict[int, Generation] = {}
        self._last_handle = 0
        self._num_others = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.num_choices = 0

    @property
    def load(self) -> int:
        """Choices in flight there: those of others, as it said last, and our own, as they are now."""
        return self._num_others + self.num_choices

    def start(self) -> None:
        """Begin to connect."""
        self._tasks = [asyncio.create_task(self._keep_session()), asyncio.create_task(self._watch_health())]

    async def stop(self) -> None:
        """Close the session; its calls are handed to `on_lost`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    def submit(self, call: Call) -> None:
        """Send a call. It needs an open session."""
        assert self.is_up
        self._last_handle += 1
        handle = self._last_handle
        call.start.handle = handle
        now_s = asyncio.get_running_loop().time()
        if call.is_sent:
            call.start.age_ms = min(round((now_s - call.began_s) * 1000), _MAX_U32)
        call.is_sent = True
        call.num_attempts += 1
        remaining_s = call.deadline_s - now_s
        convert.options_of(call.start).remaining_time_ms = min(max(1, round(remaining_s * 1000)), _MAX_U32)
        call.generation.on_abandoned = lambda: self._leave(handle)
        self._calls[handle] = call
        self._generations[handle] = call.generation
        self.num_choices += call.num_choices
        self._outbox.add_start(call.start)

    async def list_models(self, api_key: str) -> list[ModelInfo]:
        """The models served there, asked with our credential or, without one, with the caller's key.

        Raises: TokenloomError.
        """
        try:
            request = inference_pb2.ListModelsRequest()
            metadata = self._metadata or bearer_metadata(api_key)
            response = await self._stub.ListModels(request, timeout=_UNARY_LIMIT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return [convert.model_info(model) for model in response.models]

    def _leave(self, handle: int) -> None:
        if (call := self._remove(handle)) is not None:
            leave = self._outbox.add_detach if call.generation.is_detached else self._outbox.add_cancel
            leave(handle)

    async def _keep_session(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            is_overfull = False
            try:
                await self._run_session()
                why = "it closed the session"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
                is_overfull = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            except (FailedPrecondition, Unavailable) as error:
                why = error.message
            except Exception:
                log.exception("unexpected error in the session with tokenizer %s", self.address)
                why = "unexpected error"
            finally:
                was_draining = self.is_draining
                was_up = self._lose_session(is_overfull)
            level = logging.DEBUG if not was_up else logging.INFO if was_draining else logging.WARNING
            log.log(level, "no session with tokenizer %s: %s", self.address, why)
            backoff_s = _FIRST_BACKOFF_S if was_up else min(backoff_s * 2, _MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _run_session(self) -> None:
        """Hold one session until it ends."""
        stream: Any = self._stub.Session(metadata=self._metadata)  # type: ignore[call-arg]  # written to, not iterated
        writer: asyncio.Task[None] | None = None
        try:
            welcome = await self._greet(stream)
            self._outbox = Outbox()
            writer = asyncio.create_task(self._write(stream, self._outbox))
            self.is_up, self.has_served = True, self.is_serving
            metrics.SESSIONS.labels(self.address).set(1)
            self._on_up()
            silence = Silence()
            limit_s = silence_limit_s(self._stall_timeout_s, welcome.heartbeat_ms)
            await read_while_heard(self._read(stream, silence), silence, limit_s, "tokenizer")
        finally:
            if writer is not None:
                writer.cancel()
            stream.cancel()

    async def _read(self, stream: Any, silence: Silence) -> None:
        while isinstance(frame := await stream.read(), inference_pb2.SessionResponse):
            silence.end()
            await self._take(frame)

    async def _greet(self, stream: Any) -> inference_pb2.SessionWelcome:
        hello = inference_pb2.SessionHello(
            schema_revision=SCHEMA_REVISION, client_id=self._client_id, wants_token_ids=True
        )
        try:
            async with asyncio.timeout(_WELCOME_LIMIT_S):
                await stream.write(inference_pb2.SessionRequest(hello=hello))
                first = await stream.read()
        except TimeoutError:
            raise Unavailable(f"no welcome within {_WELCOME_LIMIT_S:.0f} s") from None
        if not isinstance(first, inference_pb2.SessionResponse) or not first.HasField("welcome"):
            raise Unavailable("the session ended before its welcome")
        check_revision(first.welcome.schema_revision, "tokenizer")
        log.info("session with tokenizer %s, model %s", self.address, first.welcome.model)
        return first.welcome

    async def _take(self, frame: inference_pb2.SessionResponse) -> None:
        self.is_draining = self.is_draining or frame.draining
        if frame.HasField("load"):
            self._take_load(frame.load)
        ended, given_back = await convert.deliver(frame, self._generations.get, self._is_given_back)
        for handle in ended:
            self._remove(handle)
        calls = [call for handle in given_back if (call := self._remove(handle)) is not None]
        if calls:  # if it did not say yet that it drains, it is about to
            pause_s = 0.0 if self.is_draining else _GIVEN_BACK_PAUSE_S
            asyncio.get_running_loop().call_later(pause_s, self._on_lost, calls, False)

    def _remove(self, handle: int) -> Call | None:
        """A call is in flight there no more; returns it, unless it left before."""
        if (call := self._calls.pop(handle, None)) is not None:
            del self._generations[handle]
            self.num_choices -= call.num_choices
        return call

    def _take_load(self, load: inference_pb2.SessionLoad) -> None:
        self._num_others = max(0, load.num_choices - self.num_choices)
        now_s = asyncio.get_running_loop().time()
        if not self.waits_for_executor:
            self._waits_since_s = now_s
        self.waits_for_executor = load.waits_for_executor
        if self.waits_for_executor:
            self._on_up()
            if now_s - self._waits_since_s >= _LEAVES_ENGINE_AFTER_S and self.has_other():
                self._move_elsewhere()

    def _move_elsewhere(self) -> None:
        """Let requests go on through a tokenizer with another engine, which has its executor."""
        calls = [call for call in self._calls.values() if call.generation.can_go_on]
        if calls:
            log.warning("%d requests leave tokenizer %s, whose engine has no executor", len(calls), self.address)
        for call in calls:
            self._leave(call.start.handle)
        self._on_lost(calls, False)

    def _is_given_back(self, failed: inference_pb2.SessionFailed) -> bool:
        """A request that failed so can go on: elsewhere, or here again.

        A tokenizer that was stopped, and goes on, may submit what went on elsewhere meanwhile, before it learns that
        its session is over. The engine lets it take the request over, and here it looks superseded.
        """
        reason, generation = failed.error.reason, self._generations.get(failed.handle)
        if reason in _TAKEN_OVER:
            return generation is not None and not generation.may_return  # else its client is back elsewhere
        return reason in _STOPS or (reason in _LOST_ENGINE and self.has_other())

    @staticmethod
    async def _write(stream: Any, outbox: Outbox) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader tells why
            while True:
                await stream.write(await outbox.next_frame())

    def _lose_session(self, is_overfull: bool) -> bool:
        """Give the session's calls back. Returns: whether there was one."""
        was_up = self.is_up
        if was_up and self.is_draining:
            self.left_at_s = asyncio.get_running_loop().time()
        self.is_up = self.is_draining = self.has_served = self.waits_for_executor = False
        metrics.SESSIONS.labels(self.address).set(0)
        lost = list(self._calls.values())
        self._calls.clear()
        self._generations.clear()
        self._last_handle = self._num_others = self.num_choices = 0
        if was_up:
            self._on_lost(lost, is_overfull)
        return was_up

    async def _watch_health(self) -> None:
        stub = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        while True:
            try:
                async for response in stub.Watch(request):
                    self.is_serving = response.status == health_pb2.HealthCheckResponse.SERVING
                    if self.is_serving:
                        self.has_served = self.is_up
                        self._on_up()
            except grpc.aio.AioRpcError as error:
                log.debug("no health from tokenizer %s: %s", self.address, error.details())
            except Exception:
                log.exception("unexpected error in the health of tokenizer %s", self.address)
            self.is_serving = False
            await asyncio.sleep(random.uniform(0.1, 0.3))
