"""Tenants of a keys file over HTTP and gRPC: what each gets of the engine, what it is refused, what it cannot see."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from tests.system.in_process import Stages, StagesOfModule, greedy_body, num_cached_tokens, stages_of_module
from tests.system.step_log import StepLog, watch_steps
from tokenloom.api.v1 import common_pb2, inference_pb2
from tokenloom.common.errors import from_rpc_error

MAX_NUM_SEQS = 4
KEYS = {
    "light": 'tenant = "light"',
    "light-too": 'tenant = "light"',
    "flood": 'tenant = "flood"',
    "heavy": 'tenant = "heavy"',
    "narrow": 'tenant = "narrow"',
    "metered": 'tenant = "metered"',
    "humble": 'tenant = "humble"\nhighest_class = 2',
    "operator": 'tenant = "operator"\nscopes = ["control"]',
}
TENANTS = """
[tenant.heavy]
weight = 3.0

[tenant.narrow]
max_running = 1
max_queued = 2

[tenant.metered]
tokens_per_minute = 100
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagesOfModule]:
    folder = tmp_path_factory.mktemp("stack")
    keys_file = folder / "keys.toml"
    keys_file.write_text("".join(key_entry(name, entry) for name, entry in KEYS.items()) + TENANTS)
    keys = {"keys_file": str(keys_file)}
    with stages_of_module(folder, tokenizer=keys, gateway=keys, max_num_seqs=MAX_NUM_SEQS) as running:
        yield running


def key_of(name: str) -> str:
    return f"key-of-{name}"


def key_entry(name: str, entry: str) -> str:
    return f'[[key]]\nsha256 = "{hashlib.sha256(key_of(name).encode()).hexdigest()}"\n{entry}\n'


def headers(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(name)}"}


def prompt_of(number: int, num_tokens: int = 20) -> list[int]:
    return [5 + number % 500, *((7 * i * i + number) % 500 + 3 for i in range(num_tokens - 1))]


async def post(stages: Stages, name: str, **body: Any) -> httpx.Response:
    return await stages.client.post("/v1/completions", json=greedy_body(**body), headers=headers(name))


class Flood:
    """Many requests of one key at once; what is left of them is given up at the end."""

    def __init__(self, stages: Stages, name: str, max_tokens: int = 60) -> None:
        bodies = ({"prompt": prompt_of(number), "max_tokens": max_tokens} for number in range(40))
        self._tasks = [asyncio.create_task(stages.complete(headers(name), **body)) for body in bodies]

    async def __aenter__(self) -> Flood:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(end, dict | asyncio.CancelledError) for end in ends), ends


async def until_waiting(log: StepLog, count: int) -> None:
    """Wait until all rows are taken and so many requests wait."""
    async with asyncio.timeout(30):
        while not log.steps or log.steps[-1].load.num_waiting < count:
            await log.next_step()


def test_a_light_tenant_gets_its_first_token_soon_under_a_flood(stages: StagesOfModule) -> None:
    """Again and again, though each of the flood's requests runs for 500 steps."""

    async def test(stages: Stages) -> None:
        num_waited: list[int] = []
        async with watch_steps(stages) as log, Flood(stages, "flood", max_tokens=500):
            await until_waiting(log, 30)
            for number in range(25):
                last = log.last_step_id
                answer = await stages.complete(headers("light"), prompt=prompt_of(100 + number), max_tokens=1)
                while not (rows := log.rows_of(answer["id"])):
                    await log.next_step()
                num_waited.append(rows[0].step_id - last)
            assert log.steps[-1].load.num_waiting > 30, "the flood is still there"
            last = log.last_step_id
            while log.last_step_id < last + 5:
                await log.next_step()
            assert "flood" in log.steps[-1].tenants, "and goes on"
        assert statistics.median(num_waited) <= 10, num_waited
        assert sorted(num_waited)[-2] <= 50, num_waited

    stages.run(test)


def test_tenants_that_both_flood_are_served_by_weight(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        async with watch_steps(stages) as log, Flood(stages, "light"):
            await until_waiting(log, 30)
            async with Flood(stages, "heavy"):
                while len(set(log.steps[-1].tenants)) < 2 or log.steps[-1].load.num_waiting < 50:
                    await log.next_step()
                first = len(log.steps)
                while len(log.steps) < first + 150:
                    await log.next_step()
            window = log.steps[first : first + 150]
        served = Counter(
            tenant for step in window for tenant, samples in zip(step.tenants, step.samples, strict=True) if samples
        )
        assert 2 <= served["heavy"] / served["light"] <= 4.5, served

    stages.run(test)


def test_a_tenants_limits_of_running_and_queued_requests_hold_and_are_told(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        async with watch_steps(stages) as log:
            running = asyncio.create_task(stages.complete(headers("narrow"), prompt=prompt_of(0), max_tokens=400))
            while not log.steps or "narrow" not in log.steps[-1].tenants:
                await log.next_step()
            queued = [asyncio.create_task(post(stages, "narrow", prompt=prompt_of(i), max_tokens=4)) for i in (1, 2)]
            while log.steps[-1].load.num_waiting < 2:
                await log.next_step()
            refused = await post(stages, "narrow", prompt=prompt_of(3), max_tokens=4)
            beside = await post(stages, "light", prompt=prompt_of(4), max_tokens=4)
            assert not running.done()
            ended = [await task for task in queued]
            await running
            again = await post(stages, "narrow", prompt=prompt_of(3), max_tokens=4)
            await log.catch_up(stages, headers("light"))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["code"] == "tenant_queue_full"
        assert [answer.status_code for answer in (*ended, beside, again)] == [200] * 4
        assert max(list(step.tenants).count("narrow") for step in log.steps) == 1

    stages.run(test)


def test_tokens_beyond_a_minutes_worth_are_refused_until_there_are_some_again(stages: StagesOfModule) -> None:
    """100 a minute: 2 x (40 + 20) are taken on credit, and 40 more have to wait for 60 tokens, which takes 36 s."""

    async def test(stages: Stages) -> None:
        taken = [await post(stages, "metered", prompt=prompt_of(i, 40), max_tokens=20) for i in range(2)]
        refused = await post(stages, "metered", prompt=prompt_of(2, 40), max_tokens=20)
        beside = await post(stages, "light", prompt=prompt_of(2, 40), max_tokens=20)
        assert [answer.status_code for answer in (*taken, beside)] == [200] * 3
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "token_rate"
        assert 10 <= int(refused.headers["retry-after"]) <= 37
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await over_grpc(stages, "metered", prompt_of(3, 40))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 10 <= (from_rpc_error(caught.value).retry_after_s or 0) <= 37

    stages.run(test)


async def over_grpc(stages: Stages, name: str, prompt: list[int], **options: Any) -> list[Any]:
    request = inference_pb2.CompleteRequest(
        prompts=[inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt))],
        options=inference_pb2.GenerationOptions(
            stop=common_pb2.StopConditions(max_tokens=2, ignore_eos=True), **options
        ),
    )
    call = stages.inference.Complete(request, metadata=tuple(headers(name).items()), timeout=30)
    return [response.event async for response in call]


@pytest.mark.parametrize(("asked", "got"), [(None, 2), (2, 2), (3, 3), (99, 3)])
def test_a_key_gets_its_highest_class_or_the_lower_one_that_it_asks_for(
    stages: StagesOfModule, asked: int | None, got: int
) -> None:
    async def test(stages: Stages) -> None:
        async with watch_steps(stages) as log:
            answer = await stages.complete(headers("humble"), prompt=prompt_of(0), max_tokens=1, priority=asked)
            await log.catch_up(stages, headers("light"))
        ids = {row.request_id for row in log.rows_of(answer["id"])}
        classes = {
            priority_class
            for step in log.steps
            for request_id, priority_class in zip(step.request_ids, step.priority_classes, strict=True)
            if request_id in ids
        }
        assert classes == {got}

    stages.run(test)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_class_above_the_keys_highest_is_403(stages: StagesOfModule, asked: int) -> None:
    async def test(stages: Stages) -> None:
        response = await post(stages, "humble", prompt=prompt_of(0), max_tokens=1, priority=asked)
        assert response.status_code == 403
        assert response.json()["error"]["param"] == "priority"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await over_grpc(stages, "humble", prompt_of(0), priority_class=asked)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED

    stages.run(test)


def test_who_has_no_key_or_one_for_other_things_is_turned_away(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        body = greedy_body(prompt=prompt_of(0), max_tokens=1)
        statuses = [
            (await stages.client.post("/v1/completions", json=body, headers=sent)).status_code
            for sent in ({}, headers("nobody"), headers("operator"), headers("light"))
        ]
        assert statuses == [401, 401, 403, 200]

    stages.run(test)


@pytest.mark.parametrize("salt", [None, "a salt"])
def test_tenants_do_not_find_each_others_prefixes_and_keys_of_one_tenant_do(
    stages: StagesOfModule, salt: str | None
) -> None:
    async def test(stages: Stages) -> None:
        prompt = prompt_of(200 if salt else 201, 50)
        callers = ("light", "flood", "light", "light-too", "flood", "heavy")
        answers = [
            await stages.complete(headers(name), prompt=prompt, max_tokens=4, cache_salt=salt) for name in callers
        ]
        assert [num_cached_tokens(answer) for answer in answers] == [0, 0, 48, 48, 48, 0]
        assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 1

    stages.run(test)
