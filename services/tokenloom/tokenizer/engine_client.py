"""The stage's one session to the scheduler, which carries all choices in flight.

What is queued during one turn of the event loop goes out as one message; what a step brought is handled in one go.

**Loss of the session.** A scheduler that promised signs of life and is silent counts as lost, too. Choices in flight
stay registered. The client opens a new session, with backoff, and submits each of them again: same request id, same
seed, the ids it already has as `resume_token_ids`, its age. Rows carry the index of their first token, so what arrives
twice is cut off by arithmetic and a gap is a fault. A choice whose tokens were all there already is ended here. After
`takeover_limit_s` without a session, everything in flight fails with Unavailable, and so does every new submission
until a session is up again. **An engine that is about to stop** runs what it has, gives back what is new, and ends the
session at last. What it gave back waits for the next session, as do the choices that it did not get done.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from tokenloom.api.v1 import engine_pb2, engine_pb2_grpc
from tokenloom.common.channel import bearer_metadata, make_channel
from tokenloom.common.errors import (
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    TokenloomError,
    Unavailable,
    from_proto,
    from_rpc_error,
)
from tokenloom.common.keys_file import Tenant
from tokenloom.common.schema import SCHEMA_REVISION, check_revision
from tokenloom.common.silence import STALL_TIMEOUT_S, Silence, read_while_heard, silence_limit_s
from tokenloom.tokenizer import convert
from tokenloom.tokenizer.domain import EngineInfo, EngineLoad
from tokenloom.tokenizer.engine_outbox import EngineListener, EngineOutbox, InFlight
from tokenloom.tokenizer.metrics import (
    ENGINE_CONNECTED,
    ENGINE_RUNNING,
    ENGINE_SESSIONS,
    ENGINE_WAITING,
    GENERATION_TOKENS,
)

log = logging.getLogger(__name__)
_WELCOME_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_MAX_HANDLE = (1 << 32) - 1
_RETRY_AFTER_S = 1.0
_DRAINING = "DRAINING"
_MAX_TOKENS_PER_TURN = 1024  # their text takes a few milliseconds


class EngineClient:
    """Submits choices and hands their tokens to listeners.

    Args:
        address: the scheduler.
        cluster_token: credential of the session; empty: none.
        model_id: must be the engine's.
        tokenizer_fingerprint: must be the engine's.
        takeover_limit_s: how long choices in flight wait for a new session.
        stall_timeout_s: how long the engine may be silent.
        max_queued_ids: bound on prompt ids that wait to be written.
        tenants: what the engine is told of tenants at the begin of each session.
        on_state: called with True and False as the engine becomes and ceases to be able to serve; requests are taken
            all the same while only its executor is missing.
    """

    def __init__(
        self,
        address: str,
        *,
        cluster_token: str,
        model_id: str,
        tokenizer_fingerprint: str,
        takeover_limit_s: float = 30.0,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        max_queued_ids: int = 16 << 20,
        tenants: Iterable[Tenant] = (),
        on_state: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._address = address
        self._metadata = bearer_metadata(cluster_token)
        client_id = f"tokenizer-{os.getpid()}-{secrets.token_hex(4)}"
        self._hello = engine_pb2.Hello(
            schema_revision=SCHEMA_REVISION,
            client_id=client_id,
            model_id=model_id,
            tokenizer_fingerprint=tokenizer_fingerprint,
        )
        self._takeover_limit_s = takeover_limit_s
        self._stall_timeout_s = stall_timeout_s
        self._max_queued_ids = max_queued_ids
        self._tenants = tuple(tenants)
        self._on_state = on_state
        self._living: dict[int, InFlight] = {}
        self._outbox = EngineOutbox()
        self._next_handle = 1
        self._info: EngineInfo | None = None
        self._load: EngineLoad | None = None
        self._is_up = False
        self._waits_for_executor = False
        self._is_draining = False
        self._is_lost = False
        self._down_reason = ""
        self._runner: asyncio.Task[None] | None = None
        self._give_up: asyncio.TimerHandle | None = None

    @property
    def is_up(self) -> bool:
        """A session is up and runs new requests."""
        return self._is_up and not self._is_draining

    @property
    def waits_for_executor(self) -> bool:
        """A session is up, but nothing runs in its engine: there is no executor, or it hangs."""
        return self._is_up and self._waits_for_executor

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself last.

        Raises: Unavailable if there never was a session, or there is none and will not be one soon.
        """
        if self._info is None or self._is_lost:
            raise Unavailable("the engine is not there yet", reason="ENGINE_UNAVAILABLE", retry_after_s=_RETRY_AFTER_S)
        return self._info

    @property
    def load(self) -> EngineLoad | None:
        """How busy the engine said it is, last; None: it has not said so in the session that is up, or none is."""
        return self._load

    def start(self) -> None:
        """Begin to connect, for as long as it takes."""
        self._runner = asyncio.get_running_loop().create_task(self._run(), name="engine-session")

    async def close(self) -> None:
        """End the session; choices in flight hear no more."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        if self._give_up is not None:
            self._give_up.cancel()

    def submit(self, listener: EngineListener) -> int:
        """Put a choice in flight and return its handle.

        Without a session it waits for the next one, within the takeover limit.

        Raises: Unavailable if there is no engine; ResourceExhausted if too many wait to be written. Nothing was changed
            then.
        """
        _ = self.info
        if self._outbox.num_submitted_ids > self._max_queued_ids:
            raise ResourceExhausted("too many requests wait for the engine", retry_after_s=_RETRY_AFTER_S)
        handle = self._new_handle()
        entry = self._living[handle] = InFlight(listener)
        if self._is_up:
            self._outbox.add_submit(handle, entry)
        return handle

    def finish(self, handle: int, num_tokens_kept: int) -> None:
        """Tell the engine that a choice is complete (a stop string); later tokens of it are ignored."""
        if self._leave(handle):
            self._outbox.finishes[handle] = num_tokens_kept
            self._outbox.filled.set()

    def cancel(self, handle: int, why: str) -> None:
        """Tell the engine that nobody waits for a choice; nothing more is heard of it."""
        if self._leave(handle):
            self._outbox.cancels[handle] = why
            self._outbox.filled.set()

    def detach(self, handle: int) -> None:
        """Tell the engine that a resumable choice's client may come back for it; nothing more is heard of it.

        One that the engine of this session has not seen is as its last session left it.
        """
        entry = self._living.pop(handle, None)
        is_waiting = self._outbox.drop_submit(handle)
        if entry is not None and self._is_up and entry.is_in_session and not is_waiting:
            self._outbox.detaches.append(handle)
            self._outbox.filled.set()

    def abandon(self, request_id: str, why: str) -> None:
        """End a choice that a lost session may have left behind in the engine; nothing is heard of it."""
        if self._is_up:
            handle = self._new_handle()
            self._outbox.attaches[handle] = (request_id, _MAX_HANDLE)  # none of its tokens
            self._outbox.cancels[handle] = why
            self._outbox.filled.set()

    def forget(self, handle: int) -> None:
        """Hear nothing more of a choice and tell the engine nothing: a later submission took it over."""
        self._living.pop(handle, None)
        self._outbox.drop_submit(handle)

    def _new_handle(self) -> int:
        while self._next_handle in self._living:
            self._next_handle = self._next_handle % _MAX_HANDLE + 1
        handle = self._next_handle
        self._next_handle = handle % _MAX_HANDLE + 1
        return handle

    def _leave(self, handle: int) -> bool:
        """Take a choice out of flight; True if the engine must be told of its end, under this handle.

        A choice that this session has not seen yet is attached first, or the engine would not know the handle.
        """
        entry = self._living.pop(handle, None)
        is_waiting = self._outbox.drop_submit(handle)
        if entry is None or not self._is_up:
            return False
        if entry.is_in_session and not is_waiting:
            return True
        if entry.was_sent:
            listener = entry.listener
            self._outbox.attaches[handle] = (listener.submission.request_id, len(listener.token_ids))
        return entry.was_sent

    # --- the session's life ---

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        async with make_channel(self._address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            while True:
                try:
                    await self._session(stub)
                except (TokenloomError, grpc.aio.AioRpcError, TimeoutError) as error:
                    backoff_s = _FIRST_BACKOFF_S if self._is_up else min(backoff_s * 2, _MAX_BACKOFF_S)
                    self._on_down(_reason_of(error))
                except Exception:
                    log.exception("unexpected error in the engine session")
                    self._on_down("internal error")
                finally:
                    self._is_up = False
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _session(self, stub: engine_pb2_grpc.EngineServiceStub) -> None:
        """One session, from Hello to its loss; always ends with an exception."""
        call: Any = stub.Session(metadata=self._metadata)  # type: ignore[call-arg]
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                await call.write(engine_pb2.EngineServiceSessionRequest(hello=self._hello))
                first = await call.read()
            if first is EOF:
                raise Unavailable(await call.details() or "the scheduler ended the session")
            self._on_up(self._checked(first))
            writer = asyncio.get_running_loop().create_task(self._write(call), name="engine-session-writer")
            await self._take(first)
            silence = Silence()
            limit_s = silence_limit_s(self._stall_timeout_s, first.welcome.heartbeat_ms)
            await read_while_heard(self._read(call, silence), silence, limit_s, "scheduler")
            raise Unavailable(await call.details() or "the scheduler ended the session")
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.wait([writer])

    async def _read(self, call: Any, silence: Silence) -> None:
        while (frame := await call.read()) is not EOF:
            silence.end()
            await self._take(frame)

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._outbox.filled.wait()
                for message in self._outbox.messages():
                    await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader tells of the loss
        except Exception:
            log.exception("unexpected error while writing to the engine")
            call.cancel()

    def _checked(self, frame: engine_pb2.EngineServiceSessionResponse) -> EngineInfo:
        """What Welcome says. Raises: FailedPrecondition if this engine is not the one the stage was started for."""
        welcome = frame.welcome
        if not frame.HasField("welcome"):
            raise FailedPrecondition("the scheduler did not begin with a welcome")
        check_revision(welcome.schema_revision, "scheduler")
        for name in ("model_id", "tokenizer_fingerprint"):
            ours, theirs = getattr(self._hello, name), getattr(welcome, name)
            if ours and theirs and ours != theirs:
                raise FailedPrecondition(f"the scheduler's {name} is {theirs}, this stage's {ours}")
        return convert.engine_info(welcome)

    def _on_up(self, info: EngineInfo) -> None:
        log.info(
            "engine session up: model %s, epoch %s, %d choices to resume", info.model_id, info.epoch, self.num_living
        )
        self._info, self._is_up, self._is_lost, self._is_draining = info, True, False, False
        self._outbox.clear()
        self._outbox.add_tenants(self._tenants)
        for entry in self._living.values():
            entry.is_in_session = False
            entry.was_sent_before = entry.was_sent
        for handle, entry in list(self._living.items()):
            if self._tell(handle, "end_if_complete"):
                self._living.pop(handle, None)
            elif handle in self._living:  # the end of another choice may have ended this one's request
                self._outbox.add_submit(handle, entry)
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        ENGINE_SESSIONS.inc()
        ENGINE_CONNECTED.set(1)
        self._tell_state()

    def _on_down(self, why: str) -> None:
        if self._is_up or why != self._down_reason:  # each reason once, however often it is tried again
            is_expected = self._info is None or self._is_draining
            log.log(logging.INFO if is_expected else logging.WARNING, "no engine session: %s", why)
        self._down_reason = why
        self._is_up = False
        self._take_load(None)
        ENGINE_CONNECTED.set(0)
        self._tell_state()
        if self._give_up is None and not self._is_lost and self._info is not None:
            loop = asyncio.get_running_loop()
            self._give_up = loop.call_later(self._takeover_limit_s, self._fail_all)

    def _fail_all(self) -> None:
        self._give_up = None
        self._is_lost = True
        lost, self._living = self._living, {}
        log.error("no engine session for %.0f s; %d choices fail", self._takeover_limit_s, len(lost))
        for entry in lost.values():
            entry.listener.on_failed(
                Unavailable("the engine was lost", reason="ENGINE_UNAVAILABLE", retry_after_s=_RETRY_AFTER_S)
            )

    @property
    def num_living(self) -> int:
        """Choices in flight."""
        return len(self._living)

    # --- frames ---

    async def _take(self, frame: engine_pb2.EngineServiceSessionResponse) -> None:
        """Hand what a frame brought to the listeners, in the order of its fields; others run within a large one."""
        for rejected in frame.rejected:
            if rejected.error.reason == _DRAINING:
                self._keep(rejected.handle)
                continue
            self._tell(rejected.handle, "on_failed", from_proto(rejected.error))
            self._living.pop(rejected.handle, None)
        for accepted in frame.accepted:
            self._tell(accepted.handle, "on_started", accepted.num_cached_tokens)
        for run in frame.prompt_logprobs:
            self._tell(run.handle, "on_prompt_logprobs", run.first_position, convert.prompt_positions(run))
        if frame.HasField("outputs"):
            GENERATION_TOKENS.inc(len(frame.outputs.token_ids))
            num_in_turn = 0
            for row in convert.token_rows(frame.outputs):
                num_in_turn += len(row.token_ids)
                if num_in_turn > _MAX_TOKENS_PER_TURN:
                    num_in_turn = 0
                    await asyncio.sleep(0)
                self._tell(row.handle, "on_tokens", row.first_token_index, row.token_ids, row.logprobs)
        for finished in frame.finished:
            self._tell(finished.handle, "on_finished", convert.engine_finish(finished))
            self._living.pop(finished.handle, None)
        if frame.HasField("load"):
            self._take_load(convert.engine_load(frame.load))
        if frame.draining and not self._is_draining:
            log.info("the engine is about to stop")
            self._is_draining = True
            self._tell_state()

    def _keep(self, handle: int) -> None:
        """Keep a choice that the engine gave back because it stops, for the next session."""
        if (entry := self._living.get(handle)) is not None:
            entry.is_in_session, entry.was_sent = False, entry.was_sent_before

    def _take_load(self, load: EngineLoad | None) -> None:
        """Note what the engine said last; None: nothing is known."""
        self._load = load
        ENGINE_RUNNING.set(load.num_running if load else 0)
        ENGINE_WAITING.set(load.num_waiting if load else 0)
        if load is not None and load.waits_for_executor != self._waits_for_executor:
            log.log(
                logging.WARNING if load.waits_for_executor else logging.INFO,
                "the engine waits for its executor" if load.waits_for_executor else "the engine has its executor back",
            )
            self._waits_for_executor = load.waits_for_executor
            self._tell_state()

    def _tell_state(self) -> None:
        self._on_state(self.is_up and not self._waits_for_executor)

    def _tell(self, handle: int, event: str, *details: Any) -> Any:
        """Call a method of a choice's listener and return its answer; a fault in it ends that choice alone."""
        if (entry := self._living.get(handle)) is None:
            return None  # finished or cancelled here; the engine did not know yet
        try:
            return getattr(entry.listener, event)(*details)
        except Exception as error:
            submission = entry.listener.submission
            if not isinstance(error, TokenloomError):
                log.exception("unexpected error in a choice", extra={"request_id": submission.request_id})
                error = Internal("internal error; the server's log has the details")
            self.cancel(handle, "tokenizer_error")
            entry.listener.on_failed(error)
            return None


def _reason_of(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        error = from_rpc_error(error)
    return str(error) or type(error).__name__
