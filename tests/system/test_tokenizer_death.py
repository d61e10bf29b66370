"""`kill -9` of a tokenizer under load: every client gets the undisturbed answer, after a pause.

The tiny model's choices are clear, so text is compared exactly, though its kernels depend on the batch a little.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.openai_streams import joined, logprobs_of
from tests.resuming_client import complete
from tests.system.in_process import Stages, running_stages
from tests.system.stack import Stack, running_stack
from tests.tiny_models import write_tiny_model
from tokenloom.api.v1 import common_pb2, inference_pb2, inference_pb2_grpc

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "Write a short story about a brave little fox who wanted to learn mathematics, the moon, the stars, the sea"
MESSAGES = [{"role": "user", "content": TEXT}]
NUM_TOKENS = 160
SEEDED: dict[str, Any] = {"temperature": 0.6, "seed": 11}
GREEDY: dict[str, Any] = {"temperature": 0}
LIMIT_S = 60.0


@dataclass
class Load:
    """Requests that run at once.

    Attributes:
        bodies: path and body of each.
        num_events: events that came of each stream.
    """

    bodies: list[tuple[str, dict[str, Any]]]
    num_events: list[int] = field(default_factory=list)

    def begin(self, client: httpx.AsyncClient) -> asyncio.Future[list[dict[str, Any]]]:
        """The answers to come, put together."""
        self.num_events = [0] * len(self.bodies)
        return asyncio.gather(*(self._post(client, i, *case) for i, case in enumerate(self.bodies)))

    async def has_come(self, num_events: int) -> None:
        """Wait until each stream has so many events."""
        counts = [i for i, (_, body) in enumerate(self.bodies) if body["stream"]]
        await until(lambda: all(self.num_events[i] >= num_events for i in counts))

    async def _post(self, client: httpx.AsyncClient, number: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if not body["stream"]:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return comparable(whole(answer.json()))
        parts: list[str] = []
        async with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for text in response.aiter_text():
                parts.append(text)
                self.num_events[number] += text.count("data: ")
        return comparable(joined("".join(parts)))


def whole(body: dict[str, Any]) -> dict[str, Any]:
    """An answer in one piece, in the form of a stream's."""
    choices = {}
    for choice in body["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        ends = [(choice["finish_reason"], choice["stop_reason"])]
        choices[choice["index"]] = {"text": text, "logprobs": logprobs_of(choice), "ends": ends}
    return {"choices": choices, "usage": body["usage"], "error": None, "is_done": True}


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what the rounding in another batch may change; logprobs as tokens and `values`."""
    for choice in answer["choices"].values():
        entries = choice.pop("logprobs")
        choice["tokens"] = [entry["token"] if isinstance(entry, dict) else entry[:2] for entry in entries]
        values = [entry["logprob"] if isinstance(entry, dict) else entry[2] for entry in entries]
        choice["values"] = [0.0 if value is None else value for value in values]
    return answer


def with_usage(path: str, stream: bool, **body: Any) -> tuple[str, dict[str, Any]]:
    """A request whose answer says all that there is to compare."""
    asked = {"prompt": TEXT} if path == COMPLETIONS else {"messages": MESSAGES}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    return path, {**asked, "ignore_eos": True, "max_tokens": NUM_TOKENS, "stream": stream, **options, **body}


async def load_for(client: httpx.AsyncClient) -> Load:
    """Streams and whole answers, greedy and seeded, of which some end by a stop string in their second half."""
    path, body = with_usage(COMPLETIONS, False, **GREEDY)
    greedy = (await client.post(path, json=body)).json()["choices"][0]["text"]
    at = next(i for i in range(len(greedy) * 3 // 5, len(greedy)) if greedy.find(greedy[i : i + 8]) == i)
    stop = {"stop": [greedy[at : at + 8], "never to be found"]}
    chat_logprobs = {"logprobs": True, "top_logprobs": 3}
    return Load(
        [
            with_usage(COMPLETIONS, True, **GREEDY, **stop),
            with_usage(COMPLETIONS, True, **GREEDY, **stop, logprobs=2, echo=True),
            with_usage(COMPLETIONS, True, **SEEDED, n=2, return_token_ids=True),
            with_usage(COMPLETIONS, True, **SEEDED, prompt=[TEXT, TEXT[:50]], n=2, logprobs=1, max_tokens=100),
            with_usage(COMPLETIONS, True, **GREEDY, prompt=[5, 6, 7] * 20, min_tokens=80, return_token_ids=True),
            with_usage(COMPLETIONS, False, **GREEDY, **stop, include_stop_str_in_output=True),
            with_usage(CHAT, True, **SEEDED, **chat_logprobs, n=2, return_token_ids=True),
            with_usage(CHAT, True, **GREEDY, **stop, n=2),
            with_usage(CHAT, True, **SEEDED, repetition_penalty=1.1, logit_bias={"300": 1.5}, priority=1),
            with_usage(CHAT, False, **SEEDED, **chat_logprobs, n=3),
        ]
    )


async def undisturbed(load: Load, client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The answers with all prompts in the prefix cache, which is how they are found ever after."""
    await load.begin(client)
    answers = await load.begin(client)
    assert any(end[0] == "stop" for answer in answers for c in answer["choices"].values() for end in c["ends"])
    assert all(answer["is_done"] and answer["usage"]["completion_tokens"] for answer in answers)
    return answers


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Each answer is the undisturbed one."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name in ("error", "is_done", "usage"):
            assert one[name] == other[name], f"{name} of request {number}"
        assert one["choices"].keys() == other["choices"].keys(), f"choices of request {number}"
        for index, choice in one["choices"].items():
            for name, value in other["choices"][index].items():
                wanted = pytest.approx(value, abs=1e-3) if name == "values" else value
                assert choice[name] == wanted, f"{name} of choice {index} of request {number}"


async def kill_tokenizer(stack: Stack) -> None:
    """Kill the one that is there, or the next one that comes, and wait until another process is there."""
    killed = 0

    def found() -> int:
        return stack.stage_pids().get("tokenizer", killed)

    await until(found)
    killed = found()
    os.kill(killed, signal.SIGKILL)
    await until(lambda: found() != killed)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.002)


def run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test, LIMIT_S)

    asyncio.run(limited())


@pytest.fixture(scope="module")
def tiny_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")
    with running_stack(f"--model={model}", "--dtype=float32") as stack:
        yield stack


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=httpx.Limits(max_connections=None), verify=False)


def test_the_only_tokenizer_is_killed_early_in_the_middle_and_twice_while_all_goes_on_again(tiny_stack: Stack) -> None:
    async def scenario() -> None:
        async with client_of(tiny_stack.url) as client:
            load = await load_for(client)
            expected = await undisturbed(load, client)
            answers = load.begin(client)
            await load.has_come(1)
            await kill_tokenizer(tiny_stack)
            assert_same(await answers, expected)
            answers = load.begin(client)
            await load.has_come(40)
            for is_back in (False, False, True):
                if is_back:  # and has just been sent everything again
                    await until(tiny_stack.is_ready)
                await kill_tokenizer(tiny_stack)
            assert_same(await answers, expected)
            metrics = tiny_stack.metrics()
            assert metrics["tokenloom_gateway_resubmissions_total"] >= 2 * len(load.bodies)
            assert metrics["tokenloom_num_requests_running"] == metrics["tokenloom_num_requests_waiting"] == 0

    run(scenario())


def test_tokenizer_scheduler_and_executor_are_killed_at_once(tiny_stack: Stack) -> None:
    async def scenario() -> None:
        async with client_of(tiny_stack.url) as client:
            load = await load_for(client)
            expected = await load.begin(client)
            answers = load.begin(client)
            await load.has_come(20)
            pids = tiny_stack.stage_pids()
            for stage in ("tokenizer", "scheduler", "executor"):
                os.kill(pids[stage], signal.SIGKILL)
            found = await answers
            for answer in (*found, *expected):
                del answer["usage"]["prompt_tokens_details"]  # a new engine's cache is empty
            assert_same(found, expected)

    run(scenario())


def direct_request() -> inference_pb2.CompleteRequest:
    """A completion for the gRPC interface."""
    options = inference_pb2.GenerationOptions(
        sampling=common_pb2.SamplingParams(temperature=0.6, seed=5),
        stop=common_pb2.StopConditions(max_tokens=300, ignore_eos=True),
    )
    return inference_pb2.CompleteRequest(prompts=[inference_pb2.Prompt(text=TEXT)], options=options)


def stub_of(address: str) -> Any:
    """A client of a tokenizer, without asyncio."""
    channel: Any = grpc.insecure_channel(address)
    return inference_pb2_grpc.InferenceServiceStub(channel)


@asynccontextmanager
async def tokenizer_process(folder: Path, listen: str, scheduler: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A second tokenizer, as a process that can be killed."""
    argv = ["-m", "tokenloom.tokenizer", f"--model={folder / 'tiny-llama'}", f"--listen={listen}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, f"--scheduler={scheduler}", stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_of_two_tokenizers_one_is_killed_and_its_streams_go_on_through_the_other(tmp_path: Path) -> None:
    lasting, mortal = (f"unix:{tmp_path}/{name}" for name in ("tokenizer", "mortal"))

    async def kill_one(stages: Stages, process: asyncio.subprocess.Process) -> None:
        load = await load_for(stages.client)
        expected = await undisturbed(load, stages.client)
        direct = direct_request()
        expected_text = await asyncio.to_thread(complete, [stub_of(lasting)], direct_request())
        direct_text = asyncio.create_task(asyncio.to_thread(complete, map(stub_of, (mortal, lasting)), direct))
        answers = load.begin(stages.client)
        await load.has_come(20)
        await until(lambda: len(direct.options.resume_token_ids[0].ids) >= 20)
        process.kill()
        assert_same(await answers, expected)
        assert await direct_text == expected_text
        metrics = await stages.metrics()
        assert 0 < metrics["tokenloom_gateway_resubmissions_total"] < len(load.bodies), "those of one of the two"
        assert metrics["tokenloom_num_requests_running"] == metrics["tokenloom_num_requests_waiting"] == 0

    async def scenario() -> None:
        async with (
            running_stages(tmp_path, gateway={"tokenizer": (lasting, mortal)}) as stages,
            tokenizer_process(tmp_path, mortal, f"unix:{tmp_path}/scheduler") as process,
        ):
            session = f'tokenloom_gateway_tokenizer_session{{address="{mortal}"}}'
            async with asyncio.timeout(LIMIT_S):
                while not (await stages.metrics()).get(session):
                    await asyncio.sleep(0.05)
            await kill_one(stages, process)

    run(scenario())
