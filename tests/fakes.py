"""Stand-ins for the neighbours of a stage under test, all in one place.

Each is a real gRPC servicer whose answers are a pure function of what it was asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.fake_executor import FakeExecutor as FakeExecutor
from tests.fake_executor import continuation as continuation
from tests.fake_executor import next_token as next_token
from tokenloom.api.v1 import (
    common_pb2,
    engine_pb2,
    engine_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from tokenloom.common.auth import load_api_keys
from tokenloom.common.channel import PUBLIC_MESSAGE_BYTES
from tokenloom.common.errors import FailedPrecondition, InvalidArgument, NotFound, TokenloomError, to_proto
from tokenloom.common.grpc_server import GrpcServer

EXECUTOR_SERVICE = "tokenloom.api.v1.ExecutorService"


FAKE_MODEL = "fake-model"
FAKE_WORDS = ("river", "čaj", "stone", "🌍", "漢字", "light", "seven", "ünder", "map", "quiet", "ash", "door")
_News = asyncio.Queue[inference_pb2.SessionResponse | None]  # None ends the session
_PROMPTS: dict[str, list[str]] = {}
"""What each request's prompt ids stand for, by request id: the tokenizers' shared vocabulary."""


def fake_tokens(prompt: str, seed: int, num_tokens: int) -> list[str]:
    """The texts that FakeTokenizerStage generates, one per token."""
    texts: list[str] = []
    for position in range(num_tokens):
        digest = hashlib.sha256(f"{prompt}|{seed}|{position}".encode()).digest()
        texts.append(" " + FAKE_WORDS[digest[0] % len(FAKE_WORDS)])
    return texts


def fake_prompts(start: inference_pb2.SessionStart) -> list[str]:
    """The prompts of a request as FakeTokenizerStage sees them; each word is a token.

    Raises: InvalidArgument if a request that is sent again does not have the ids that were told.
    """
    options = start.chat.options if start.HasField("chat") else start.complete.options
    if start.HasField("chat") and start.chat.HasField("prompt_token_ids"):
        return [_text_of(start.chat.prompt_token_ids, options.request_id, 0)]
    if start.HasField("complete") and options.resume_token_ids and options.request_id in _PROMPTS:
        prompts = start.complete.prompts
        return [p.text or _text_of(p.token_ids, options.request_id, i) for i, p in enumerate(prompts)]
    if start.HasField("chat"):
        return ["\n".join(f"{message.role}: {message.content}" for message in start.chat.messages)]
    return [
        prompt.text if prompt.HasField("text") else " ".join(map(str, prompt.token_ids.ids))
        for prompt in start.complete.prompts
    ]


def _text_of(ids: inference_pb2.TokenIds, request_id: str, index: int) -> str:
    text = _PROMPTS[request_id][index]
    if list(ids.ids) not in (list(range(len(text.split()))), [int(word) for word in text.split() if word.isdecimal()]):
        raise InvalidArgument(f"{ids.ids} are not the prompt's ids", field="prompt_token_ids")
    return text


@dataclass
class _FakeChoice:
    texts: list[str]
    prompt: str
    num_sent: int = 0
    num_cached_tokens: int = 0
    has_tail: bool = False
    is_finished: bool = False


@dataclass
class _FakeRequest:
    start: inference_pb2.SessionStart
    options: inference_pb2.GenerationOptions
    choices: list[_FakeChoice] = field(default_factory=list)


class FakeTokenizerStage(inference_pb2_grpc.InferenceServiceServicer):
    """A tokenizer stage without an engine: its session gives each choice one token per step.

    Args:
        address: a Unix socket.
        keys: API keys that requests need, beside those of `keys_file`; none: open.

    Attributes:
        starts: every request that came, in order.
        cancelled: ids of requests that were cancelled.
        num_tokens: tokens of a choice without max_tokens, after which it stops.
        lengths: tokens of a choice, by its index, whatever the request says.
        tail: text of no token that each choice's end sets free.
        holds_ends: choices tell their tail, but not their end.
        drops: frames of news after which a session ends, of each session to come.
        repeat: how often each token's text is repeated, to make large frames.
        refusal: answers every new request with this error.
        failure: ends every running request with this error after its next token.
        may_step: steps wait while it is cleared.
    """

    def __init__(self, address: str, keys: tuple[str, ...] = (), keys_file: str = "") -> None:
        add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        service = (add, self, "tokenloom.api.v1.InferenceService")
        self._server = GrpcServer(address, [service], max_message_bytes=PUBLIC_MESSAGE_BYTES)
        self._keys = load_api_keys(keys, keys_file)
        self._sessions: set[_News] = set()
        self.starts: list[inference_pb2.SessionStart] = []
        self.cancelled: list[str] = []
        self.num_tokens = 6
        self.lengths: dict[int, int] = {}
        self.tail = ""
        self.holds_ends = False
        self.drops: list[int] = []
        self.repeat = 1
        self.refusal: TokenloomError | None = None
        self.failure: TokenloomError | None = None
        self.may_step = asyncio.Event()
        self.may_step.set()

    async def start(self) -> None:
        """Listen, ready at once."""
        await self._server.start()
        await self._server.set_serving(True)

    async def set_serving(self, is_serving: bool) -> None:
        """Set the readiness."""
        await self._server.set_serving(is_serving)

    async def stop(self) -> None:
        """End everything at once, as a kill does."""
        await self._server.stop(0)

    def drop_sessions(self) -> None:
        """End every session; new ones are welcome."""
        for news in self._sessions:
            news.put_nowait(None)

    def ask_for_no_more(self) -> None:
        """Tell every session that the stage drains."""
        for news in self._sessions:
            news.put_nowait(inference_pb2.SessionResponse(draining=True))

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        """The one model."""
        model = inference_pb2.Model(id=FAKE_MODEL, created_s=1_700_000_000, max_model_len=4096)
        return inference_pb2.ListModelsResponse(models=[model])

    async def Session(
        self, request_iterator: AsyncIterator[inference_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[inference_pb2.SessionResponse]:
        """Welcome, then frames until the session ends or is dropped."""
        hello = (await anext(request_iterator)).hello
        welcome = inference_pb2.SessionWelcome(schema_revision=hello.schema_revision, model=FAKE_MODEL)
        yield inference_pb2.SessionResponse(welcome=welcome)
        running: dict[int, _FakeRequest] = {}
        news: _News = asyncio.Queue()
        self._sessions.add(news)
        listener = asyncio.create_task(self._listen(request_iterator, running, news))
        worker = asyncio.create_task(self._work(running, news, hello.wants_token_ids))
        num_left = self.drops.pop(0) if self.drops else None
        try:
            while num_left != 0 and (frame := await news.get()) is not None:
                yield frame
                num_left = None if num_left is None else num_left - 1
        finally:
            self._sessions.discard(news)
            listener.cancel()
            worker.cancel()

    async def _listen(
        self, frames: AsyncIterator[inference_pb2.SessionRequest], running: dict[int, _FakeRequest], news: _News
    ) -> None:
        async for frame in frames:
            for start in frame.starts:
                self.starts.append(start)
                try:
                    running[start.handle] = self._accept(start)
                except TokenloomError as error:
                    failed = inference_pb2.SessionFailed(handle=start.handle, error=to_proto(error))
                    news.put_nowait(inference_pb2.SessionResponse(failed=[failed]))
                else:
                    news.put_nowait(_acceptance(start, running[start.handle]))
            for handle in frame.cancelled_handles:
                if (request := running.pop(handle, None)) is not None:
                    self.cancelled.append(request.options.request_id)
        news.put_nowait(None)

    def _accept(self, start: inference_pb2.SessionStart) -> _FakeRequest:
        self._keys.check(start.key_digest)
        if self.refusal is not None:
            raise self.refusal
        options = start.chat.options if start.HasField("chat") else start.complete.options
        if options.model not in ("", FAKE_MODEL):
            raise NotFound(f"the model {options.model!r} is not served here", field="model", reason="MODEL_NOT_FOUND")
        request = _FakeRequest(start, options)
        prompts = fake_prompts(start)
        _PROMPTS[options.request_id] = prompts
        limit = options.stop.max_tokens if options.stop.HasField("max_tokens") else self.num_tokens
        for prompt in prompts:
            for choice in range(options.num_choices or 1):
                is_greedy = options.sampling.HasField("temperature") and options.sampling.temperature == 0
                seed = 0 if is_greedy else options.sampling.seed + choice
                num_tokens = self.lengths.get(len(request.choices), limit)
                request.choices.append(_FakeChoice(fake_tokens(prompt, seed, num_tokens), prompt))
        for index, found in enumerate(request.choices):
            self._resume(found, index, options)
            found.num_cached_tokens = options.num_cached_tokens.get(index, 3 if start.HasField("age_ms") else 1)
        return request

    def _resume(self, choice: _FakeChoice, index: int, options: inference_pb2.GenerationOptions) -> None:
        """Go on behind the ids that a choice has, which must be those that were told."""
        had = list(options.resume_token_ids[index].ids) if options.resume_token_ids else []
        if had != list(range(1000, 1000 + min(len(had), len(choice.texts)))):
            raise InvalidArgument(f"choice {index} never had the ids {had}", field="resume_token_ids")
        choice.num_sent = len(had)
        choice.is_finished = index in options.finished_choices

    async def _work(self, running: dict[int, _FakeRequest], news: _News, tells_ids: bool) -> None:
        while True:
            await asyncio.sleep(0.001)
            await self.may_step.wait()
            if not running or news.qsize() > 64:
                continue
            frame = inference_pb2.SessionResponse()
            for handle, request in list(running.items()):
                if self._step(frame, handle, request):
                    del running[handle]
            if tells_ids:
                rows = zip(frame.outputs.first_token_indexes, frame.outputs.num_tokens, strict=True)
                frame.outputs.token_ids.extend(1000 + first for first, count in rows if count)
            news.put_nowait(frame)

    def _step(self, frame: inference_pb2.SessionResponse, handle: int, request: _FakeRequest) -> bool:
        """Give each choice of a request a token. Returns: whether the request ended."""
        has_limit = request.options.stop.HasField("max_tokens")
        reason = inference_pb2.FINISH_REASON_LENGTH if has_limit else inference_pb2.FINISH_REASON_STOP
        for index, choice in enumerate(request.choices):
            if choice.num_sent < len(choice.texts):
                self._emit(frame, handle, index, request)
            if choice.num_sent < len(choice.texts) or choice.is_finished:
                continue
            if self.tail and not choice.has_tail:
                choice.has_tail = True
                _add_text_row(frame.outputs, handle, index, choice.num_sent, 0, self.tail)
            if not self.holds_ends:
                choice.is_finished = True
                finished = inference_pb2.ChoiceFinished(choice_index=index, reason=reason)
                frame.choices_finished.add(handle=handle, finished=finished)
        if self.failure is not None:
            frame.failed.add(handle=handle, error=to_proto(self.failure))
            return True
        if not all(choice.is_finished for choice in request.choices):
            return False
        usage = inference_pb2.Usage(
            num_prompt_tokens=sum(len(prompt.split()) for prompt in fake_prompts(request.start)),
            num_generated_tokens=sum(len(choice.texts) for choice in request.choices),
            num_cached_tokens=sum(c.num_cached_tokens for c in request.choices[:: request.options.num_choices or 1]),
        )
        frame.completed.add(handle=handle, usage=usage)
        return True

    def _emit(self, frame: inference_pb2.SessionResponse, handle: int, index: int, request: _FakeRequest) -> None:
        choice, outputs, sampling = request.choices[index], frame.outputs, request.options.sampling
        position = choice.num_sent
        rows = [(1, choice.texts[position] * self.repeat)]
        if position == 0 and request.start.complete.echo:
            rows.insert(0, (0, choice.prompt))
        for num_tokens, text in rows:
            _add_text_row(outputs, handle, index, position, num_tokens, text)
        choice.num_sent += 1
        delta = inference_pb2.Delta(choice_index=index, first_token_index=position, num_tokens=1)
        if request.options.return_token_ids:
            delta.token_ids.append(1000 + position)
        if sampling.HasField("num_logprobs"):
            delta.logprobs.append(_fake_logprobs(choice.texts[position], sampling.num_logprobs))
        is_first = position == 0 and index % (request.options.num_choices or 1) == 0
        if is_first and sampling.HasField("num_prompt_logprobs"):
            words = choice.prompt.split()[1:]
            delta.prompt_logprobs.extend(_fake_logprobs(f" {word}", sampling.num_prompt_logprobs) for word in words)
        if position == 0:
            delta.num_cached_tokens = choice.num_cached_tokens
        if position == 0 or delta.token_ids or delta.logprobs or delta.prompt_logprobs:
            outputs.extras.add(handle=handle, delta=delta)


def _add_text_row(
    outputs: inference_pb2.TextOutputs, handle: int, index: int, first: int, num_tokens: int, text: str
) -> None:
    outputs.handles.append(handle)
    outputs.choice_indexes.append(index)
    outputs.first_token_indexes.append(first)
    outputs.num_tokens.append(num_tokens)
    outputs.texts.append(text)


def _fake_logprobs(text: str, num_top: int) -> inference_pb2.TokenLogprobs:
    def entry(rank: int, text: str) -> inference_pb2.TokenLogprob:
        return inference_pb2.TokenLogprob(token_id=rank, text=text, utf8=text.encode(), logprob=-0.5 * (rank + 1))

    alternatives = [entry(rank, text if rank == 0 else f"{text}{rank}") for rank in range(num_top)]
    return inference_pb2.TokenLogprobs(token=entry(0, text), top=alternatives)


def _acceptance(start: inference_pb2.SessionStart, request: _FakeRequest) -> inference_pb2.SessionResponse:
    accepted = inference_pb2.Accepted(
        request_id=request.options.request_id,
        created_s=1,
        model=FAKE_MODEL,
        seed=request.options.sampling.seed,
        prompts=[inference_pb2.TokenIds(ids=range(len(prompt.split()))) for prompt in fake_prompts(start)],
        sampling=request.options.sampling,
        stop=request.options.stop,
    )
    taken = inference_pb2.SessionAccepted(handle=start.handle, accepted=accepted)
    return inference_pb2.SessionResponse(accepted=[taken])


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
        attached: handles and request ids of what was attached; nothing is told of it.
        tenants: every definition of a tenant that came, each with the number of submits that came before it.
        hellos: of every session that was opened; num_messages: what came after them.
        frames: every frame that was sent.
        tokens_per_step: how many tokens a step gives each request.
        refusal: answers every new request with this error.
        refused_choices: the indexes of the choices that `refusal` is for; None: all.
        is_prompt: requests whose time is up are ended; otherwise they go on, as with an engine that hangs.
        may_step: steps wait while it is cleared.
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
        self.attached: dict[int, str] = {}
        self.finished: list[tuple[str, int]] = []
        self.frames: list[engine_pb2.EngineServiceSessionResponse] = []
        self.tokens_per_step = 1
        self.refusal: TokenloomError | None = None
        self.refused_choices: set[int] | None = None
        self.is_prompt = True
        self.may_step = asyncio.Event()
        self.may_step.set()

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
        yield engine_pb2.EngineServiceSessionResponse(welcome=self.welcome)
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            while (frame := await session.news.get()) is not None:
                self.frames.append(frame)
                yield frame
        finally:
            reader.cancel()
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
