"""Stand-ins for the neighbours of a stage under test, all in one place.

Each is a real gRPC servicer whose answers are a pure function of what it was asked.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.fake_executor import FakeExecutor as FakeExecutor
from tests.fake_executor import continuation as continuation
from tests.fake_executor import next_token as next_token
from tests.fake_tokenizer import FAKE_MODEL as FAKE_MODEL
from tests.fake_tokenizer import FakeTokenizerStage as FakeTokenizerStage
from tests.fake_tokenizer import fake_tokens as fake_tokens
from tokenloom.api.v1 import (
    common_pb2,
    engine_pb2,
    engine_pb2_grpc,
)
from tokenloom.common.errors import FailedPrecondition, TokenloomError, to_proto
from tokenloom.common.grpc_server import GrpcServer
from tokenloom.common.pulse import Pulse

EXECUTOR_SERVICE = "tokenloom.api.v1.ExecutorService"


@dataclass(eq=False)
class _FakeChoiceState:
    submit: engine_pb2.Submit
    outputs: list[int]
    is_started: bool = False
    is_held: bool = False
    arrived_s: float = field(default_factory=time.monotonic)

    @property
    def is_late(self) -> bool:
        """Its time is up."""
        passed_ms = (time.monotonic() - self.arrived_s) * 1000
        return self.submit.HasField("remaining_time_ms") and passed_ms >= self.submit.remaining_time_ms


@dataclass(eq=False)
class _FakeEngineSession:
    choices: dict[int, _FakeChoiceState] = field(default_factory=dict)
    news: asyncio.Queue[engine_pb2.EngineServiceSessionResponse | None] = field(default_factory=asyncio.Queue)


class FakeEngine(engine_pb2_grpc.EngineServiceServicer):
    """A scheduler without an executor: every step gives each request of every session one token.

    Args:
        address: a Unix socket.
        vocab_size: of the tokenizer before it.
        next_id: all ids of a request so far to its next one; default: `next_token`.

    Attributes:
        submits: every Submit that came, in order; cancelled and finished: request ids, the latter with tokens kept.
        detached: request ids of choices whose clients may come back; nothing more is told of them.
        attached: handles and request ids of what was attached; nothing is told of it.
        tenants: every definition of a tenant that came, each with the number of submits that came before it.
        hellos: of every session that was opened; num_messages: what came after them.
        frames: every frame that was sent.
        tokens_per_step: how many tokens a step gives each request.
        refusal: answers every new request with this error.
        refused_choices: the indexes of the choices that `refusal` is for; None: all.
        is_prompt: requests whose time is up are ended; otherwise they go on, as with an engine that hangs.
        may_step: steps wait while it is cleared.
        is_awake: the fake says nothing at all while it is cleared, as a process that is stopped.
    """

    def __init__(
        self,
        address: str,
        vocab_size: int,
        *,
        next_id: Callable[[list[int]], int] | None = None,
        eos_token_ids: tuple[int, ...] = (2,),
        max_model_len: int = 256,
        default_sampling: common_pb2.SamplingParams | None = None,
        cluster_token: str = "",
    ) -> None:
        add = engine_pb2_grpc.add_EngineServiceServicer_to_server
        services = [(add, self, "tokenloom.api.v1.EngineService")]
        self._server = GrpcServer(address, services, cluster_token=cluster_token)
        self._next_id = next_id or (lambda ids: next_token(ids, vocab_size))
        self._sessions: set[_FakeEngineSession] = set()
        self._stepper: asyncio.Task[None] | None = None
        self.welcome = engine_pb2.Welcome(
            schema_revision=1,
            engine_epoch=uuid.uuid4().hex,
            vocab_size=vocab_size,
            block_size=16,
            max_model_len=max_model_len,
            max_num_waiting=64,
            max_num_logprobs=20,
            eos_token_ids=eos_token_ids,
            default_sampling=default_sampling,
        )
        self.submits: list[engine_pb2.Submit] = []
        self.tenants: list[tuple[engine_pb2.TenantPolicy, int]] = []
        self.hellos: list[engine_pb2.Hello] = []
        self.num_messages = 0
        self.cancelled: list[str] = []
        self.detached: list[str] = []
        self.attached: dict[int, str] = {}
        self.finished: list[tuple[str, int]] = []
        self.frames: list[engine_pb2.EngineServiceSessionResponse] = []
        self.tokens_per_step = 1
        self.refusal: TokenloomError | None = None
        self.refused_choices: set[int] | None = None
        self.is_prompt = True
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.is_awake = asyncio.Event()
        self.is_awake.set()

    @property
    def num_living(self) -> int:
        """Choices that run."""
        return sum(len(session.choices) for session in self._sessions)

    async def start(self) -> None:
        """Listen and step."""
        await self._server.start()
        self._stepper = asyncio.create_task(self._step_on())

    async def stop(self) -> None:
        """End everything at once, as a kill does."""
        if self._stepper is not None:
            self._stepper.cancel()
        await self._server.stop(0)

    def drain(self) -> None:
        """Ask for no new requests."""
        for session in self._sessions:
            session.news.put_nowait(engine_pb2.EngineServiceSessionResponse(draining=True))

    def tell(self, frame: engine_pb2.EngineServiceSessionResponse) -> None:
        """Send a frame to every session."""
        for session in self._sessions:
            session.news.put_nowait(frame)

    def hold(self, choice_index: int) -> None:
        """Let the choices of one index get no more tokens."""
        for session in self._sessions:
            for choice in session.choices.values():
                choice.is_held |= choice.submit.choice_index == choice_index

    def displace(self, error: TokenloomError, choice_index: int, as_finished: bool = False) -> None:
        """End the choices of one index with an error, as those that give way in a full queue."""
        for session in self._sessions:
            for handle, choice in list(session.choices.items()):
                if choice.submit.choice_index != choice_index:
                    continue
                del session.choices[handle]
                frame = engine_pb2.EngineServiceSessionResponse()
                if as_finished:
                    reason = engine_pb2.ENGINE_FINISH_REASON_ERROR
                    frame.finished.add(handle=handle, reason=reason, error=to_proto(error))
                else:
                    frame.rejected.add(handle=handle, error=to_proto(error))
                session.news.put_nowait(frame)

    async def Session(
        self, request_iterator: AsyncIterator[engine_pb2.EngineServiceSessionRequest], context: Any
    ) -> AsyncIterator[engine_pb2.EngineServiceSessionResponse]:
        first = await anext(request_iterator)
        self.hellos.append(first.hello)
        session = _FakeEngineSession()
        await self.is_awake.wait()
        yield engine_pb2.EngineServiceSessionResponse(welcome=self.welcome)
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(session, request_iterator))
        beat = engine_pb2.EngineServiceSessionResponse()
        pulse = Pulse(self.welcome.heartbeat_ms / 1000, lambda: session.news.put_nowait(beat))
        try:
            while (frame := await session.news.get()) is not None:
                await self.is_awake.wait()
                self.frames.append(frame)
                yield frame
        finally:
            reader.cancel()
            pulse.stop()
            self._sessions.discard(session)

    async def Abort(self, request: engine_pb2.AbortRequest, context: Any) -> engine_pb2.AbortResponse:
        for session in self._sessions:
            for handle, choice in list(session.choices.items()):
                if request.request_id in (choice.submit.request_id, choice.submit.group_id):
                    del session.choices[handle]
                    reason = engine_pb2.ENGINE_FINISH_REASON_ABORTED
                    finished = engine_pb2.Finished(handle=handle, reason=reason)
                    session.news.put_nowait(engine_pb2.EngineServiceSessionResponse(finished=[finished]))
        return engine_pb2.AbortResponse(outcome=engine_pb2.AbortResponse.OUTCOME_ABORTED)

    async def GetLoad(self, request: Any, context: Any) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(load=engine_pb2.Load(num_running=self.num_living))

    async def FlushPrefixCache(self, request: Any, context: Any) -> engine_pb2.FlushPrefixCacheResponse:
        return engine_pb2.FlushPrefixCacheResponse()  # it has no cache

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[engine_pb2.WatchStepsResponse]:
        for number, _ in enumerate(self.frames):
            yield engine_pb2.WatchStepsResponse(step_id=number)

    async def WatchCacheEvents(self, request: Any, context: Any) -> AsyncIterator[engine_pb2.WatchCacheEventsResponse]:
        yield engine_pb2.WatchCacheEventsResponse(cleared=True)  # it has no cache

    async def GetRecording(self, request: Any, context: Any) -> AsyncIterator[engine_pb2.GetRecordingResponse]:
        raise FailedPrecondition("nothing is recorded")
        yield

    async def _read(self, session: _FakeEngineSession, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            self.num_messages += 1
            self.tenants += [(policy, len(self.submits)) for policy in message.tenants]
            for submit in message.submits:
                self.submits.append(submit)
                is_refused = self.refused_choices is None or submit.choice_index in self.refused_choices
                if self.refusal is not None and is_refused:
                    rejected = engine_pb2.Rejected(handle=submit.handle, error=to_proto(self.refusal))
                    session.news.put_nowait(engine_pb2.EngineServiceSessionResponse(rejected=[rejected]))
                else:
                    session.choices[submit.handle] = _FakeChoiceState(submit, list(submit.resume_token_ids))
            self.attached |= {attach.handle: attach.request_id for attach in message.attaches}
            for finish in message.finishes:
                if (choice := session.choices.pop(finish.handle, None)) is not None:
                    self.finished.append((choice.submit.request_id, finish.num_tokens_kept))
            for cancel in message.cancels:
                if (choice := session.choices.pop(cancel.handle, None)) is not None:
                    self.cancelled.append(choice.submit.request_id)
                elif cancel.handle in self.attached:
                    self.cancelled.append(self.attached[cancel.handle])
            for detach in message.detaches:
                if (choice := session.choices.pop(detach.handle, None)) is not None:
                    self.detached.append(choice.submit.request_id)
        session.news.put_nowait(None)

    async def _step_on(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            for session in self._sessions:
                if self.is_prompt:
                    self._expire(session)
                if session.choices and self.may_step.is_set():
                    session.news.put_nowait(self._step(session))

    @staticmethod
    def _expire(session: _FakeEngineSession) -> None:
        """End requests whose time is up, in one frame."""
        late = [handle for handle, choice in session.choices.items() if choice.is_late]
        reason = engine_pb2.ENGINE_FINISH_REASON_DEADLINE
        ends = [engine_pb2.Finished(handle=handle, reason=reason) for handle in late]
        for handle in late:
            del session.choices[handle]
        if ends:
            session.news.put_nowait(engine_pb2.EngineServiceSessionResponse(finished=ends))

    def _step(self, session: _FakeEngineSession) -> engine_pb2.EngineServiceSessionResponse:
        frame = engine_pb2.EngineServiceSessionResponse()
        for handle, choice in [item for item in session.choices.items() if not item[1].is_held]:
            if not choice.is_started:
                choice.is_started = True
                frame.accepted.add(handle=handle, num_cached_tokens=0)
                self._add_prompt_logprobs(frame, handle, choice)
            first = len(choice.outputs)
            ended = engine_pb2.ENGINE_FINISH_REASON_UNSPECIFIED
            while len(choice.outputs) < first + self.tokens_per_step and not ended:
                choice.outputs.append(self._next_id([*choice.submit.prompt_token_ids, *choice.outputs]))
                ended = self._end_of(choice)
            _add_fake_row(frame.outputs, handle, first, choice)
            if ended:
                frame.finished.add(handle=handle, reason=ended, num_generated_tokens=len(choice.outputs))
                del session.choices[handle]
        return frame

    def _end_of(self, choice: _FakeChoiceState) -> engine_pb2.EngineFinishReason.ValueType:
        stop = choice.submit.stop
        ends = set(stop.stop_token_ids) | (set() if stop.ignore_eos else set(self.welcome.eos_token_ids))
        if choice.outputs[-1] in ends:
            return engine_pb2.ENGINE_FINISH_REASON_STOP_TOKEN
        if len(choice.outputs) >= stop.max_tokens:
            return engine_pb2.ENGINE_FINISH_REASON_LENGTH
        return engine_pb2.ENGINE_FINISH_REASON_UNSPECIFIED

    @staticmethod
    def _add_prompt_logprobs(
        frame: engine_pb2.EngineServiceSessionResponse, handle: int, choice: _FakeChoiceState
    ) -> None:
        sampling = choice.submit.sampling
        if not sampling.HasField("num_prompt_logprobs"):
            return
        ids, width = choice.submit.prompt_token_ids[1:], sampling.num_prompt_logprobs + 1
        entries = [entry for token_id in ids for entry in _fake_entries(token_id, width)]
        logprobs = [value for _ in ids for value in _fake_values(width)]
        frame.prompt_logprobs.add(
            handle=handle, first_position=1, num_per_token=width, token_ids=entries, logprobs=logprobs
        )


def _add_fake_row(outputs: engine_pb2.StepOutputs, handle: int, first: int, choice: _FakeChoiceState) -> None:
    """A row of new tokens; the most likely tokens are the token itself and the ids behind it, at -0.5, -1.5, ..."""
    sampling, ids = choice.submit.sampling, choice.outputs[first:]
    width = sampling.num_logprobs + 1 if sampling.HasField("num_logprobs") else 0
    outputs.handles.append(handle)
    outputs.first_token_indexes.append(first)
    outputs.num_tokens.append(len(ids))
    outputs.token_ids.extend(ids)
    outputs.num_logprobs_per_token.append(width)
    for token_id in ids:
        outputs.logprob_token_ids.extend(_fake_entries(token_id, width))
        outputs.logprobs.extend(_fake_values(width))


def _fake_entries(token_id: int, width: int) -> list[int]:
    return [token_id, *range(token_id, token_id + width - 1)][:width]


def _fake_values(width: int) -> list[float]:
    return [-0.5, *[-0.5 - rank for rank in range(width - 1)]][:width]
