"""A tokenizer stage without an engine, for tests of the gateway; it answers by what it is asked alone."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tokenloom.api.v1 import inference_pb2, inference_pb2_grpc
from tokenloom.common.auth import load_api_keys
from tokenloom.common.channel import PUBLIC_MESSAGE_BYTES
from tokenloom.common.errors import InvalidArgument, NotFound, TokenloomError, to_proto
from tokenloom.common.grpc_server import GrpcServer
from tokenloom.common.pulse import Pulse

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
    goes_on = bool(options.resume_token_ids or options.num_skipped_tokens)
    if start.HasField("complete") and goes_on and options.request_id in _PROMPTS:
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
        cancelled: ids of requests that were cancelled; detached: of those whose clients may return.
        num_tokens: tokens of a choice without max_tokens, after which it stops.
        lengths: tokens of a choice, by its index, whatever the request says.
        tail: text of no token that each choice's end sets free.
        holds_ends: choices tell their tail, but not their end.
        drops: frames of news after which a session ends, of each session to come.
        repeat: how often each token's text is repeated, to make large frames.
        refusal: answers every new request with this error.
        failure: ends every running request with this error after its next token.
        may_step: steps wait while it is cleared.
        is_awake: the fake says nothing at all while it is cleared, as a process that is stopped.
        heartbeat_s: its load is told so often; 0: never.
        load: what is told then.
    """

    def __init__(self, address: str, keys: tuple[str, ...] = (), keys_file: str = "") -> None:
        add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        service = (add, self, "tokenloom.api.v1.InferenceService")
        self._server = GrpcServer(address, [service], max_message_bytes=PUBLIC_MESSAGE_BYTES)
        self._keys = load_api_keys(keys, keys_file)
        self._sessions: set[_News] = set()
        self.starts: list[inference_pb2.SessionStart] = []
        self.cancelled: list[str] = []
        self.detached: list[str] = []
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
        self.is_awake = asyncio.Event()
        self.is_awake.set()
        self.heartbeat_s = 0.0
        self.load = inference_pb2.SessionLoad()

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

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

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
        welcome.heartbeat_ms = round(self.heartbeat_s * 1000)
        await self.is_awake.wait()
        yield inference_pb2.SessionResponse(welcome=welcome)
        running: dict[int, _FakeRequest] = {}
        news: _News = asyncio.Queue()
        self._sessions.add(news)
        listener = asyncio.create_task(self._listen(request_iterator, running, news))
        worker = asyncio.create_task(self._work(running, news, hello.wants_token_ids))
        pulse = Pulse(self.heartbeat_s, lambda: self.tell_load(news))
        num_left = self.drops.pop(0) if self.drops else None
        try:
            while num_left != 0 and (frame := await news.get()) is not None:
                await self.is_awake.wait()
                yield frame
                num_left = None if num_left is None else num_left - 1
        finally:
            self._sessions.discard(news)
            listener.cancel()
            worker.cancel()
            pulse.stop()

    def tell_load(self, *sessions: _News) -> None:
        """Tell some sessions, or all, how busy the stage is."""
        for news in sessions or self._sessions:
            news.put_nowait(inference_pb2.SessionResponse(load=self.load))

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
            for handle in frame.detached_handles:
                if (request := running.pop(handle, None)) is not None:
                    self.detached.append(request.options.request_id)
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
        """Go on behind the ids that a choice has, which must be those that were told, or behind their number."""
        had = list(options.resume_token_ids[index].ids) if options.resume_token_ids else []
        if had != list(range(1000, 1000 + min(len(had), len(choice.texts)))):
            raise InvalidArgument(f"choice {index} never had the ids {had}", field="resume_token_ids")
        choice.num_sent = len(had) or options.num_skipped_tokens.get(index, 0)
        if choice.num_sent > len(choice.texts):
            raise InvalidArgument(f"choice {index} never had {choice.num_sent} tokens", field="num_skipped_tokens")
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
