"""Case D23: SIGTERM to each stage while five streams run and five wait in the queue, with real processes.

Who has enough time ends what he has. A gateway that has not tells each client so; requests of other stages go on at
their successors instead. The tiny model's choices are clear, so text is compared exactly.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx

from tests.cluster import Cluster
from tests.openai_streams import joined
from tests.resuming_client import complete
from tokenloom.api.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tokenloom.common.channel import PUBLIC_MESSAGE_BYTES, client_options

PATH = "/v1/completions"
TEXT = "Write a short story about a brave little fox who wanted to learn mathematics, the moon, the stars, the sea"
NUM_RUNNING, NUM_QUEUED = 5, 5
NUM_TOKENS = 200
MANY_TOKENS = 400
SHORT_S = 0.3
STOP_LIMIT_S = 10.0  # behind the grace period, for a busy machine
LIMIT_S = 240.0
SETTINGS: dict[str, dict[str, object]] = {
    "gateway-1": {"grace_s": SHORT_S},
    "tokenizer-1": {"grace_s": SHORT_S},
    "scheduler": {"grace_s": SHORT_S, "max_num_seqs": NUM_RUNNING},
    "executor": {"grace_s": SHORT_S, "kv_cache_bytes": "16MiB"},
}


def body_of(number: int, **changes: Any) -> dict[str, Any]:
    """A request; every other one is seeded."""
    sampling = {"temperature": 0.6, "seed": number} if number % 2 else {"temperature": 0}
    return {"prompt": TEXT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, **sampling, **changes}


class Streams:
    """Ten streams through one gateway; five run, five wait.

    Attributes:
        texts: what came of each so far.
        statuses: HTTP status of each answer that has begun.
    """

    def __init__(self, client: httpx.AsyncClient, num_tokens: int = NUM_TOKENS) -> None:
        self.texts = [""] * (NUM_RUNNING + NUM_QUEUED)
        self.statuses: dict[int, int] = {}
        bodies = [body_of(number, max_tokens=num_tokens) for number in range(len(self.texts))]
        self._tasks = [asyncio.create_task(self._post(client, number, body)) for number, body in enumerate(bodies)]

    async def have_begun(self) -> None:
        """Wait until those that run have told some text, one row left for another caller."""
        while sum("text" in text for text in self.texts) < NUM_RUNNING - 1:
            assert not any(task.done() for task in self._tasks), self.texts
            await asyncio.sleep(0.005)

    async def answers(self) -> list[dict[str, Any]]:
        """All of them, when they have ended."""
        await asyncio.gather(*self._tasks)
        return [comparable(text) for text in self.texts]

    async def ends(self) -> list[BaseException | None]:
        """What cut each, if anything did."""
        return await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _post(self, client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> None:
        async with client.stream("POST", PATH, json=body) as response:
            self.statuses[number] = response.status_code
            async for part in response.aiter_text():
                self.texts[number] += part


def comparable(text: str) -> dict[str, Any]:
    """An answer without what depends on the batch."""
    answer = joined(text)
    choices = {index: (choice["text"], choice["ends"]) for index, choice in answer["choices"].items()}
    return {"choices": choices, "error": answer["error"], "is_done": answer["is_done"]}


@asynccontextmanager
async def ended_by(cluster: Cluster, stage: str, grace_s: float, code: int = 0) -> AsyncIterator[None]:
    """A stage is told to stop; at the end of the block it ends, within its time and with this exit code."""
    cluster.kill(stage, signal.SIGTERM)
    told_s = time.monotonic()
    yield
    while not cluster.exit_codes(stage):
        assert time.monotonic() - told_s < grace_s + STOP_LIMIT_S, f"{stage} does not end"
        await asyncio.sleep(0.01)
    assert cluster.exit_codes(stage) == [code], stage


async def gateway_with_time(cluster: Cluster, expected: list[dict[str, Any]]) -> None:
    async with cluster.async_client(0) as client:
        streams = Streams(client)
        await streams.have_begun()
        async with ended_by(cluster, "gateway-0", 30.0):
            while (ready := await client.get("/ready")).status_code == 200:
                pass
            assert ready.json() == {"status": "draining"}
            refused = await client.post(PATH, json=body_of(0))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
            assert await streams.answers() == expected


async def gateway_without_time(cluster: Cluster, expected: list[dict[str, Any]]) -> None:
    async with cluster.async_client(1) as client:
        streams = Streams(client, MANY_TOKENS)
        await streams.have_begun()
        whole = asyncio.create_task(client.post(PATH, json=body_of(0, stream=False, max_tokens=MANY_TOKENS)))
        await asyncio.sleep(0.05)
        async with ended_by(cluster, "gateway-1", SHORT_S):
            answers = await streams.answers()
            refused = await whole
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        for number, answer in enumerate(answers):
            assert not answer["is_done"]
            if streams.statuses[number] == 200:
                assert answer["error"]["code"] == "shutting_down"
                (text, ends), *_ = answer["choices"].values()
                assert ends == []
                whole_text = expected[number]["choices"][0][0]
                assert text.startswith(whole_text) or whole_text.startswith(text)
            else:  # it had not begun
                assert streams.statuses[number] == 503
                assert "shutting_down" in streams.texts[number]
        assert sum(status == 200 for status in streams.statuses.values()) >= NUM_RUNNING - 1


async def tokenizer_without_time(cluster: Cluster, expected: list[dict[str, Any]]) -> None:
    addresses = [cluster.address(name) for name in ("tokenizer-1", "tokenizer-0")]
    options = inference_pb2.GenerationOptions(
        sampling=common_pb2.SamplingParams(temperature=0.0),
        stop=common_pb2.StopConditions(max_tokens=200, ignore_eos=True),
    )
    prompts = [inference_pb2.Prompt(text=TEXT)]
    request = inference_pb2.CompleteRequest(prompts=prompts, options=options)
    alone = inference_pb2.CompleteRequest(prompts=prompts, options=options)
    undisturbed = await asyncio.to_thread(complete, [stub_of(addresses[1])], alone)
    direct = asyncio.create_task(asyncio.to_thread(complete, map(stub_of, addresses), request))
    async with cluster.async_client(0) as client:
        while not (request.options.resume_token_ids and request.options.resume_token_ids[0].ids):
            await asyncio.sleep(0.005)
        streams = Streams(client)
        await streams.have_begun()
        async with ended_by(cluster, "tokenizer-1", SHORT_S):
            assert await direct == undisturbed, "the caller was told, and goes on elsewhere"
            assert await streams.answers() == expected
    assert cluster.metrics("gateway-0")["tokenloom_gateway_resubmissions_total"] > 0, "some were not done in time"


def stub_of(address: str) -> Any:
    """A client of a tokenizer, without asyncio."""
    channel: Any = grpc.insecure_channel(address, options=client_options(PUBLIC_MESSAGE_BYTES))
    return inference_pb2_grpc.InferenceServiceStub(channel)


async def restarted_without_time(cluster: Cluster, stage: str, told: str, expected: list[dict[str, Any]]) -> None:
    """A stage is started again while requests are not done.

    Args:
        told: what the scheduler's log says then.
    """
    async with cluster.async_client(0) as client:
        streams = Streams(client)
        await streams.have_begun()
        async with ended_by(cluster, stage, SHORT_S):
            pass
        new = asyncio.create_task(client.post(PATH, json=body_of(0, stream=False)))
        cluster.start_stage(stage)
        assert await streams.answers() == expected
        answer = await new
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected[0]["choices"][0][0]
        assert told in cluster.log("scheduler")


async def second_signal(cluster: Cluster) -> None:
    async with cluster.async_client(0) as client:
        streams = Streams(client, MANY_TOKENS)
        await streams.have_begun()
        cluster.stages["gateway-0"].exit_codes.clear()
        async with ended_by(cluster, "gateway-0", 0.0, code=1):
            while (await client.get("/ready")).status_code == 200:
                pass
            cluster.kill("gateway-0", signal.SIGTERM)
        assert any(await streams.ends()), "they are cut"


def test_d23_each_stage_ends_well_and_no_stream_just_stops() -> None:
    async def scenario() -> None:
        names = ["executor", "scheduler", "tokenizer-0", "tokenizer-1", "gateway-0", "gateway-1"]
        async with Cluster(num_tokenizers=2, num_gateways=2, settings=SETTINGS, unsupervised=names) as cluster:
            async with cluster.async_client(0) as client:
                expected = await Streams(client).answers()
            assert all(answer["is_done"] and answer["error"] is None for answer in expected)
            await gateway_with_time(cluster, expected)
            cluster.start_stage("gateway-0")  # ready before it is needed
            await gateway_without_time(cluster, expected)
            while not cluster.ready(0):
                await asyncio.sleep(0.02)
            await tokenizer_without_time(cluster, expected)
            await restarted_without_time(cluster, "scheduler", "requests are left to the next engine", expected)
            await restarted_without_time(cluster, "executor", "requests wait for the next one", expected)
            await second_signal(cluster)
            left = ["tokenizer-0", "scheduler", "executor"]
            for stage in left:
                cluster.stages[stage].exit_codes.clear()
                async with ended_by(cluster, stage, 30.0):
                    pass
            assert all(cluster.pid(name) is None for name in names), "nothing is left running"
            for name in names:
                assert "Traceback" not in cluster.log(name), name

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
