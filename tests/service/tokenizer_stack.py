"""A tokenizer stage on a Unix socket before a fake engine, for tests that speak gRPC."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes import FakeEngine
from tests.tiny_models import VOCAB_SIZE, write_tiny_tokenizer
from tokenloom.api.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tokenloom.common.channel import PUBLIC_MESSAGE_BYTES, bearer_metadata, make_channel
from tokenloom.common.config import ProcessSettings
from tokenloom.common.errors import TokenloomError, from_rpc_error
from tokenloom.tokenizer.assets import read_folder
from tokenloom.tokenizer.config import TokenizerConfig
from tokenloom.tokenizer.stage import SERVICE_NAME, TokenizerStage

LIMIT_S = 30.0
STORY = "The quick brown fox 🦊 jumps over the lazy dog. Ein Käse für 漢字! And so it goes on and on. "


def run(test: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(test, LIMIT_S))


async def until(holds: Callable[[], Any], limit_s: float = 10.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(0.005)


class Answer:
    """The events of a direct call, joined by choice."""

    def __init__(self) -> None:
        self.events: list[inference_pb2.GenerationEvent] = []
        self.accepted = inference_pb2.Accepted()
        self.texts: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.num_tokens: dict[int, int] = {}
        self.logprobs: dict[int, list[inference_pb2.TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, list[inference_pb2.TokenLogprobs]] = {}
        self.finished: dict[int, inference_pb2.ChoiceFinished] = {}
        self.usage = inference_pb2.Usage()

    def take(self, event: inference_pb2.GenerationEvent) -> None:
        """Add an event; checks that deltas follow one another without gap or overlap."""
        self.events.append(event)
        match event.WhichOneof("kind"):
            case "accepted":
                self.accepted = event.accepted
            case "delta":
                delta, i = event.delta, event.delta.choice_index
                assert i not in self.finished
                if delta.num_tokens:
                    expected = self.num_tokens.setdefault(i, delta.first_token_index)
                    assert delta.first_token_index == expected
                    self.num_tokens[i] += delta.num_tokens
                self.texts[i] = self.texts.get(i, "") + delta.text
                self.token_ids.setdefault(i, []).extend(delta.token_ids)
                self.logprobs.setdefault(i, []).extend(delta.logprobs)
                self.prompt_logprobs.setdefault(i, []).extend(delta.prompt_logprobs)
            case "choice_finished":
                assert event.choice_finished.choice_index not in self.finished
                self.finished[event.choice_finished.choice_index] = event.choice_finished
            case "completed":
                self.usage = event.completed.usage

    @property
    def kinds(self) -> list[str]:
        """What came, in order."""
        return [str(event.WhichOneof("kind")) for event in self.events]


class TokenizerStack:
    """The stage, its fake engine and a client."""

    def __init__(self, folder: Path, engine_options: dict[str, Any], changes: dict[str, Any]) -> None:
        self.model_folder = folder / "tiny"
        self.model_folder.mkdir(exist_ok=True)
        write_tiny_tokenizer(self.model_folder)
        (self.model_folder / "config.json").write_text("{}")
        (self.model_folder / "model.safetensors").touch()
        self.tokenizer = read_folder(self.model_folder).tokenizer
        self.story = self.encode(STORY)
        self._engine_address = f"unix:{folder}/scheduler.sock"
        self._engine_options = {"next_id": self.next_of_story, **engine_options}
        process = ProcessSettings(cluster_token=changes.pop("cluster_token", ""))
        self.config = TokenizerConfig(
            process,
            model=str(self.model_folder),
            listen=f"unix:{folder}/tokenizer.sock",
            scheduler=self._engine_address,
            **changes,
        )
        self.engine = self._new_engine()
        self.stage = TokenizerStage(self.config)
        self.channel: Any = make_channel(self.config.listen, max_message_bytes=PUBLIC_MESSAGE_BYTES)
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)

    def _new_engine(self) -> FakeEngine:
        token = self.config.process.cluster_token
        return FakeEngine(self._engine_address, VOCAB_SIZE, cluster_token=token, **self._engine_options)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens."""
        return self.tokenizer.decode(list(ids))

    def next_of_story(self, ids: list[int]) -> int:
        """The fake model: tells a story, at a place that depends on how many tokens there are."""
        return self.story[len(ids) % len(self.story)]

    def told(self, prompt_ids: Iterable[int], count: int) -> list[int]:
        """The ids that the fake model generates behind a prompt."""
        ids = list(prompt_ids)
        first = len(ids)
        for _ in range(count):
            ids.append(self.next_of_story(ids))
        return ids[first:]

    async def kill_engine(self) -> FakeEngine:
        """End the engine at once; returns it."""
        killed = self.engine
        await killed.stop()
        return killed

    async def revive_engine(self) -> None:
        """Start another engine at the same address."""
        self.engine = self._new_engine()
        await self.engine.start()

    async def health(self) -> int:
        """The service's readiness."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        return int(answer.status)

    async def until_health(self, status: int) -> None:
        """Wait for a readiness."""
        async with asyncio.timeout(10.0):
            while await self.health() != status:
                await asyncio.sleep(0.01)

    async def chat(self, text: str = "hi", key: str = "", answer: Answer | None = None, **options: Any) -> Answer:
        """Ask the user's question; an error of the call is raised as TokenloomError."""
        return await self.collect(self.stub.Chat(chat_request(text, **options), metadata=bearer_metadata(key)), answer)

    async def complete(self, *prompts: str | list[int], answer: Answer | None = None, **options: Any) -> Answer:
        """Continue prompts."""
        return await self.collect(self.stub.Complete(complete_request(*prompts, **options)), answer)

    async def collect(self, call: Any, answer: Answer | None = None) -> Answer:
        """All events of a call."""
        answer = answer or Answer()
        try:
            async for response in call:
                answer.take(response.event)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return answer

    async def refusal(self, call: Any) -> TokenloomError:
        """The error with which a call ends, stream or not."""
        try:
            if hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        raise AssertionError("the call succeeded")


@asynccontextmanager
async def tokenizer_on(
    folder: Path, *, engine: dict[str, Any] | None = None, has_engine: bool = True, **changes: Any
) -> AsyncIterator[TokenizerStack]:
    """A tokenizer stage that is ready (unless it has no engine); `changes` are settings."""
    stack = TokenizerStack(folder, engine or {}, changes)
    if has_engine:
        await stack.engine.start()
    await stack.stage.start()
    try:
        if has_engine:
            await stack.until_health(health_pb2.HealthCheckResponse.SERVING)
        yield stack
    finally:
        await stack.channel.close()
        await stack.stage.stop()
        await stack.engine.stop()


class Gateway:
    """A session driven by hand; collects what it is told by handle."""

    def __init__(self, stack: TokenizerStack, token: str = "", channel: Any = None) -> None:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel or stack.channel)
        self.call: Any = stub.Session(metadata=bearer_metadata(token))
        self.frames: list[inference_pb2.SessionResponse] = []
        self.loads: list[inference_pb2.SessionLoad] = []
        self.texts: dict[tuple[int, int], str] = {}
        self.extras: dict[int, list[inference_pb2.Delta]] = {}
        self.token_ids: dict[tuple[int, int], list[int]] = {}
        self.accepted: dict[int, inference_pb2.Accepted] = {}
        self.finished: list[tuple[int, int]] = []
        self.completed: dict[int, inference_pb2.Usage] = {}
        self.failed: dict[int, common_pb2.Error] = {}
        self.is_draining = False
        self.reader: asyncio.Task[None] | None = None

    async def open(self, revision: int = 1, wants_ids: bool = False) -> inference_pb2.SessionWelcome:
        hello = inference_pb2.SessionHello(schema_revision=revision, client_id="test", wants_token_ids=wants_ids)
        await self.call.write(inference_pb2.SessionRequest(hello=hello))
        welcome: inference_pb2.SessionResponse = await self.call.read()
        return welcome.welcome

    def read(self) -> None:
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while isinstance(frame := await self.call.read(), inference_pb2.SessionResponse):
            self._take(frame)

    def _take(self, frame: inference_pb2.SessionResponse) -> None:
        if frame.HasField("load"):
            self.loads.append(frame.load)
            return
        self.frames.append(frame)
        for accepted in frame.accepted:
            assert accepted.handle not in self.accepted
            self.accepted[accepted.handle] = accepted.accepted
        rows = frame.outputs
        columns = (rows.handles, rows.choice_indexes, rows.first_token_indexes, rows.num_tokens, rows.texts)
        ids = iter(rows.token_ids)
        for handle, choice, _, num_tokens, text in zip(*columns, strict=True):
            assert handle in self.accepted
            self.texts[handle, choice] = self.texts.get((handle, choice), "") + text
            self.token_ids.setdefault((handle, choice), []).extend(itertools.islice(ids, num_tokens))
        assert next(ids, None) is None
        for extra in rows.extras:
            assert extra.delta.text == ""
            self.extras.setdefault(extra.handle, []).append(extra.delta)
        self.finished += [(item.handle, item.finished.choice_index) for item in frame.choices_finished]
        self.completed |= {item.handle: item.usage for item in frame.completed}
        self.failed |= {item.handle: item.error for item in frame.failed}
        self.is_draining |= frame.draining

    async def start(
        self, *requests: inference_pb2.ChatRequest | inference_pb2.CompleteRequest, first: int = 1, **parts: Any
    ) -> None:
        message = inference_pb2.SessionRequest()
        for handle, request in enumerate(requests, first):
            kind = "chat" if isinstance(request, inference_pb2.ChatRequest) else "complete"
            message.starts.add(handle=handle, **{kind: request}, **parts)
        await self.call.write(message)

    async def cancel(self, *handles: int) -> None:
        await self.call.write(inference_pb2.SessionRequest(cancelled_handles=handles))

    async def detach(self, *handles: int) -> None:
        await self.call.write(inference_pb2.SessionRequest(detached_handles=handles))


def chat_request(text: str = "hi", **options: Any) -> inference_pb2.ChatRequest:
    """A chat with one user message; `options` as for `generation_options`."""
    message = inference_pb2.ChatMessage(role="user", content=text)
    return inference_pb2.ChatRequest(messages=[message], options=generation_options(**options))


def complete_request(*prompts: str | list[int], echo: bool = False, **options: Any) -> inference_pb2.CompleteRequest:
    """A completion of texts or ids."""
    return inference_pb2.CompleteRequest(
        prompts=[
            inference_pb2.Prompt(text=prompt)
            if isinstance(prompt, str)
            else inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt))
            for prompt in prompts
        ],
        options=generation_options(**options),
        echo=echo,
    )


def generation_options(
    *, sampling: dict[str, Any] | None = None, stop: dict[str, Any] | None = None, max_tokens: int = 20, **rest: Any
) -> inference_pb2.GenerationOptions:
    """Options from plain values; 0 `max_tokens` leaves it out."""
    limits = {**({"max_tokens": max_tokens} if max_tokens else {}), **(stop or {})}
    options = inference_pb2.GenerationOptions(**rest)
    for name, value in (sampling or {}).items():
        if isinstance(value, dict):
            getattr(options.sampling, name).update(value)
        else:
            setattr(options.sampling, name, value)
    for name, value in limits.items():
        if isinstance(value, list):
            getattr(options.stop, name).extend(value)
        else:
            setattr(options.stop, name, value)
    return options


def small_window_channel(address: str) -> grpc.aio.Channel:
    """A channel whose window stays at 64 KiB, so that a reader who does not read is soon felt."""
    options = [("grpc.http2.bdp_probe", 0)]
    return grpc.aio.insecure_channel(address, options=options)
