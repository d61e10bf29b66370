"""Case D24: large messages work on every hop below the documented limits, and are refused by name above them.

Neighbours go on meanwhile, and the connection or channel that carried too much serves the next request.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import orjson
import pytest

from tests.system.in_process import Stages, StagesOfModule, stages_of_module
from tokenloom.api.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tokenloom.common.channel import PUBLIC_MESSAGE_BYTES, make_channel

MIB = 1 << 20
CONTEXT = 16_384
PROMPT = [3 + (i * i) % 400 for i in range(8000)]
BATCH = [[3 + number % 400, 3 + number // 400, *range(40, 64)] for number in range(500)]
WITH_LOGPROBS: dict[str, Any] = {"logprobs": 20, "echo": True, "max_tokens": 2}
STORY = "the fox and the moon "
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagesOfModule]:
    settings: dict[str, Any] = {"max_positions": CONTEXT, "max_num_batched_tokens": 2048}
    with stages_of_module(tmp_path_factory.mktemp("stack"), **settings) as running:
        yield running


@asynccontextmanager
async def neighbour(stages: Stages) -> Any:
    """A stream beside what the block does. It must give what it gives alone."""
    body: dict[str, Any] = {"prompt": [11, 12, 13], "max_tokens": 60}
    alone = (await stages.complete(**body))["choices"][0]["token_ids"]
    stream = asyncio.create_task(ids_of_stream(stages, body))
    try:
        yield
        assert await stream == alone
    finally:
        stream.cancel()


async def ids_of_stream(stages: Stages, body: dict[str, Any]) -> list[int]:
    ids: list[int] = []
    async for event in stages.stream(**body):
        for choice in event["choices"]:
            ids += choice.get("token_ids") or ()
    return ids


def run(stages: StagesOfModule, test: Any) -> None:
    async def beside_a_neighbour(running: Stages) -> None:
        async with neighbour(running):
            await test(running)

    stages.run(beside_a_neighbour)


def request(*prompts: Any, num_logprobs: int | None = None, max_tokens: int = 4) -> inference_pb2.CompleteRequest:
    """A greedy Complete with ids told; prompts are texts or ids."""
    return inference_pb2.CompleteRequest(
        prompts=[
            inference_pb2.Prompt(text=prompt)
            if isinstance(prompt, str)
            else inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt))
            for prompt in prompts
        ],
        options=inference_pb2.GenerationOptions(
            sampling=common_pb2.SamplingParams(
                temperature=0, num_logprobs=num_logprobs, num_prompt_logprobs=num_logprobs
            ),
            stop=common_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
            return_token_ids=True,
        ),
        echo=num_logprobs is not None,
    )


async def events_of(call: Any) -> list[inference_pb2.GenerationEvent]:
    return [response.event async for response in call]


async def refusal_of(call: Coroutine[Any, Any, Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


# --- over HTTP --------------------------------------------------------------------------------------------------------


def test_a_prompt_of_8000_tokens_with_20_logprobs_each_comes_back_whole(stages: StagesOfModule) -> None:
    async def test(running: Stages) -> None:
        answer = await running.complete(prompt=PROMPT, **WITH_LOGPROBS)
        logprobs = answer["choices"][0]["logprobs"]
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(PROMPT) + 2
        assert logprobs["token_logprobs"][0] is None
        assert all(logprobs["top_logprobs"][1:])

    run(stages, test)


@pytest.mark.slow
def test_its_stream_tells_the_same(stages: StagesOfModule) -> None:
    async def test(running: Stages) -> None:
        answer = await running.complete(prompt=PROMPT, **WITH_LOGPROBS)
        streamed: list[Any] = []
        async for event in running.stream(prompt=PROMPT, **WITH_LOGPROBS):
            for choice in event["choices"]:
                streamed += (choice.get("logprobs") or {}).get("token_logprobs", ())
        told = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert streamed[0] is told[0] is None
        assert streamed[1:] == pytest.approx(told[1:], abs=1e-3)

    run(stages, test)


def test_a_batch_of_500_prompts_gives_what_each_gives_alone(stages: StagesOfModule) -> None:
    async def test(running: Stages) -> None:
        answer = await running.complete(prompt=BATCH, **WITH_LOGPROBS)
        assert len(orjson.dumps(answer)) > 4 * MIB
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(BATCH)))
        assert answer["usage"]["completion_tokens"] == 2 * len(BATCH)
        for number in (0, 250, 499):
            alone = await running.complete(prompt=BATCH[number], max_tokens=2)
            assert alone["choices"][0]["token_ids"] == answer["choices"][number]["token_ids"]

    run(stages, test)


@pytest.mark.parametrize("path", [PATH, pytest.param("/v1/chat/completions", marks=pytest.mark.slow)])
def test_a_text_of_6_mb_is_refused_since_the_context_is_shorter(stages: StagesOfModule, path: str) -> None:
    async def test(running: Stages) -> None:
        text = STORY * (6 * MIB // len(STORY))
        body = {"prompt": text} if path == PATH else {"messages": [{"role": "user", "content": text}]}
        answer = await running.client.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"] == ("prompt" if path == PATH else "messages")
        assert str(CONTEXT) in error["message"]
        assert len(answer.content) < 1000

    run(stages, test)


@pytest.mark.parametrize("num_bytes", [PUBLIC_MESSAGE_BYTES + 1, PUBLIC_MESSAGE_BYTES - 100, 40 * MIB])
def test_a_body_above_16_mib_is_413_and_its_connection_serves_the_next_request(
    stages: StagesOfModule, num_bytes: int
) -> None:
    """A body of just under 16 MiB would become a message of more than that with what goes on with it: 413 too."""

    def post_both(host: str, port: int) -> list[tuple[int, Any]]:
        answers = []
        connection = http.client.HTTPConnection(host, port, timeout=30)
        empty = orjson.dumps({"prompt": "", "max_tokens": 2})
        large = empty.replace(b'""', b'"' + b"x" * (num_bytes - len(empty)) + b'"')
        for body in (large, orjson.dumps({"prompt": "The fox", "max_tokens": 2})):
            connection.request("POST", PATH, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answers.append((answer.status, orjson.loads(answer.read())))
        connection.close()
        return answers

    async def test(running: Stages) -> None:
        url = running.client.base_url
        (status, refusal), (next_status, _) = await asyncio.to_thread(post_both, url.host, url.port or 0)
        assert (status, refusal["error"]["code"]) == (413, "body_too_large")
        assert str(PUBLIC_MESSAGE_BYTES)[:3] in refusal["error"]["message"]
        assert next_status == 200

    run(stages, test)


# --- over gRPC --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["batch", pytest.param("prompt", marks=pytest.mark.slow)])
def test_over_grpc_the_same_comes_back_also_to_a_client_whose_messages_have_at_most_4_mib(
    stages: StagesOfModule, kind: str
) -> None:
    prompts = BATCH if kind == "batch" else [PROMPT]

    async def test(running: Stages) -> None:
        async with grpc.aio.insecure_channel(running.addresses["tokenizer"]) as channel:  # a client that sets nothing
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            events = await events_of(stub.Complete(request(*prompts, num_logprobs=20)))
        assert sum(len(event.delta.prompt_logprobs) for event in events) == sum(map(len, prompts)) - len(prompts)
        assert sum(event.ByteSize() for event in events) > 3 * MIB
        assert events[-1].completed.usage.num_generated_tokens == 4 * len(prompts)

    run(stages, test)


@pytest.mark.parametrize("kind", ["ids", pytest.param("text", marks=pytest.mark.slow)])
def test_over_grpc_a_prompt_of_6_mb_is_refused_since_the_context_is_shorter(stages: StagesOfModule, kind: str) -> None:
    async def test(running: Stages) -> None:
        prompt: Any = [300] * (3 * MIB) if kind == "ids" else STORY * (6 * MIB // len(STORY))
        assert request(prompt).ByteSize() > 5 * MIB
        error = await refusal_of(events_of(running.inference.Complete(request(prompt))))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "tokens" in str(error.details())

    run(stages, test)


@pytest.mark.parametrize("limit", [PUBLIC_MESSAGE_BYTES, 64 * MIB], ids=["our client", "a client without limit"])
def test_over_grpc_a_message_above_16_mib_is_refused_by_name_and_the_channel_stays_usable(
    stages: StagesOfModule, limit: int
) -> None:
    async def test(running: Stages) -> None:
        async with make_channel(running.addresses["tokenizer"], max_message_bytes=limit) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            beside = asyncio.create_task(events_of(stub.Complete(request([5, 6, 7], max_tokens=40))))
            error = await refusal_of(events_of(stub.Complete(request("x" * (17 * MIB)))))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(PUBLIC_MESSAGE_BYTES) in str(error.details())
            assert (await beside)[-1].completed.usage.num_generated_tokens == 40
            assert (await events_of(stub.Complete(request([5, 6, 7]))))[-1].HasField("completed")

    run(stages, test)
