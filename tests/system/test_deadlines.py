"""A request's time is up, in the queue or while it decodes: how its caller is told, and that nobody else notices."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.system.in_process import Stages, StagesOfModule, greedy_body, stages_of_module
from tests.system.step_log import StepLog, watch_steps
from tokenloom.api.v1 import common_pb2, engine_pb2, inference_pb2

# Long enough to begin even on a busy machine, far too short for 900 tokens.
TIMEOUT_S = 0.7
NUM_OUTPUT = 900
MAX_NUM_SEQS = 2
SUBJECT = [7, 8, 9] * 12  # longer than its neighbours' prompts
_alone: dict[int, list[int]] = {}
_salts = map(str, itertools.count())  # each request under test is computed from its first token on


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagesOfModule]:
    with stages_of_module(tmp_path_factory.mktemp("stack"), max_num_seqs=MAX_NUM_SEQS) as running:
        yield running


class Neighbour:
    """A stream that runs beside the request under test."""

    def __init__(self, number: int) -> None:
        self.prompt = [50 + number, 40, 41] * 5
        self.token_ids: list[int] = []
        self._news = asyncio.Event()

    async def read(self, stages: Stages) -> None:
        async with aclosing(stages.stream(prompt=self.prompt, max_tokens=NUM_OUTPUT)) as events:
            async for event in events:
                assert "error" not in event
                self.token_ids += event["choices"][0].get("token_ids", [])
                self._news.set()

    async def has(self, num_tokens: int) -> None:
        """Wait until so many tokens have come."""
        async with asyncio.timeout(30):
            while len(self.token_ids) < num_tokens:
                self._news.clear()
                await self._news.wait()


async def alone(stages: Stages, number: int, num_tokens: int) -> list[int]:
    """What a neighbour says when nobody is beside it."""
    if len(_alone.get(number, [])) < num_tokens:
        answer = await stages.complete(prompt=Neighbour(number).prompt, max_tokens=num_tokens + 100)
        _alone[number] = answer["choices"][0]["token_ids"]
    return _alone[number][:num_tokens]


@asynccontextmanager
async def neighbours(stages: Stages, count: int) -> AsyncIterator[None]:
    """Streams that run before, during and after what happens inside, and say what each says alone."""
    beside = [Neighbour(number) for number in range(count)]
    tasks = [asyncio.create_task(neighbour.read(stages)) for neighbour in beside]
    try:
        for neighbour in beside:
            await neighbour.has(3)
        yield
        assert not any(task.done() for task in tasks), "they go on"
        for neighbour in beside:
            await neighbour.has(len(neighbour.token_ids) + 5)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for number, neighbour in enumerate(beside):
        assert neighbour.token_ids == await alone(stages, number, len(neighbour.token_ids))


def subject(**body: Any) -> dict[str, Any]:
    """The request under test."""
    return greedy_body(prompt=SUBJECT, cache_salt=next(_salts), **body)


def ids_of_subject(log: StepLog) -> set[str]:
    """Ids under which its choices ran."""
    return {row.request_id for row in log.rows if (row.start, row.end) == (0, len(SUBJECT))}


async def load_of(stages: Stages) -> engine_pb2.Load:
    load: engine_pb2.Load = (await stages.engine.GetLoad(engine_pb2.GetLoadRequest())).load
    return load


async def assert_idle(stages: Stages) -> None:
    """Nothing runs, waits or holds a block, now or in a moment."""
    async with asyncio.timeout(5):
        while (load := await load_of(stages)).num_running or load.num_waiting:
            await asyncio.sleep(0.01)
    assert load.num_free_blocks == load.num_blocks


def assert_freed_within_two_steps(log: StepLog) -> None:
    """Two steps behind the last one in which it ran, its blocks are free."""
    ids = ids_of_subject(log)
    assert ids, "it ran"
    last = max(i for i, step in enumerate(log.steps) if ids & set(step.request_ids))
    held = log.steps[last].load
    behind = log.steps[last + 1 : last + 3]
    assert behind, "its neighbours go on"
    assert behind[-1].load.num_running < held.num_running
    assert behind[-1].load.num_free_blocks > held.num_free_blocks


def assert_time_was_up(status: int, body: dict[str, Any]) -> None:
    assert status == 504
    assert body["error"]["type"] == "timeout_error"
    assert "time" in body["error"]["message"]


FIELD: tuple[dict[str, Any], dict[str, str]] = ({"timeout": TIMEOUT_S}, {})
HEADER: tuple[dict[str, Any], dict[str, str]] = ({}, {"x-request-timeout": str(TIMEOUT_S)})
SMALLER_HEADER: tuple[dict[str, Any], dict[str, str]] = ({"timeout": 600}, {"x-request-timeout": str(TIMEOUT_S)})


@pytest.mark.parametrize(("extra", "headers"), [FIELD, HEADER, SMALLER_HEADER])
def test_time_that_is_up_in_the_queue_is_504_and_the_request_never_ran(
    stages: StagesOfModule, extra: dict[str, Any], headers: dict[str, str]
) -> None:
    async def test(stages: Stages) -> None:
        async with watch_steps(stages) as log, neighbours(stages, MAX_NUM_SEQS):
            began = time.monotonic()
            body = subject(max_tokens=3, stream=bool(headers), **extra)
            response = await stages.client.post("/v1/completions", json=body, headers=headers)
            took = time.monotonic() - began
            load = await load_of(stages)
        assert_time_was_up(response.status_code, response.json())
        assert TIMEOUT_S <= took < TIMEOUT_S + 5
        assert load.num_waiting == 0
        assert not ids_of_subject(log)
        await assert_idle(stages)

    stages.run(test)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_time_that_is_up_while_decoding_is_504_for_an_answer_that_is_not_streamed(
    stages: StagesOfModule, num_choices: int
) -> None:
    """With two choices one of them runs and the other one waits; both end."""

    async def test(stages: Stages) -> None:
        async with watch_steps(stages) as log, neighbours(stages, 1):
            body = subject(max_tokens=NUM_OUTPUT, n=num_choices, timeout=TIMEOUT_S)
            response = await stages.client.post("/v1/completions", json=body)
            load = await load_of(stages)
        assert_time_was_up(response.status_code, response.json())
        assert (load.num_running, load.num_waiting) == (1, 0)
        assert_freed_within_two_steps(log)
        await assert_idle(stages)

    stages.run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_time_that_is_up_in_a_stream_is_an_error_event_and_no_finish_reason(stages: StagesOfModule, path: str) -> None:
    async def test(stages: Stages) -> None:
        body = subject(max_tokens=NUM_OUTPUT, stream=True)
        body |= {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {}
        async with neighbours(stages, 1):
            response = await stages.client.post(path, json=body, headers={"x-request-timeout": str(TIMEOUT_S)})
        assert response.status_code == 200
        lines = [line for line in response.text.splitlines() if line]
        assert lines[0].startswith("data: {")
        assert "choices" in lines[0]
        assert "timeout_error" in lines[-1]
        assert "[DONE]" not in response.text
        assert '"length"' not in response.text
        assert '"stop"' not in response.text
        await assert_idle(stages)

    stages.run(test)


def grpc_request(**options: Any) -> inference_pb2.CompleteRequest:
    prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=SUBJECT))
    stop = common_pb2.StopConditions(max_tokens=NUM_OUTPUT, ignore_eos=True)
    told = inference_pb2.GenerationOptions(stop=stop, cache_salt=next(_salts), **options)
    return inference_pb2.CompleteRequest(prompts=[prompt], options=told)


async def read_events(call: Any, into: list[inference_pb2.GenerationEvent]) -> None:
    async for response in call:
        into.append(response.event)


@pytest.mark.parametrize("is_own_deadline", [True, False])
@pytest.mark.parametrize("num_beside", [1, MAX_NUM_SEQS])
def test_over_grpc_time_that_is_up_is_deadline_exceeded(
    stages: StagesOfModule, is_own_deadline: bool, num_beside: int
) -> None:
    """The call's own deadline, or `remaining_time_ms`; while it decodes, or in the queue behind two others."""

    async def test(stages: Stages) -> None:
        events: list[inference_pb2.GenerationEvent] = []
        async with watch_steps(stages) as log, neighbours(stages, num_beside):
            request = grpc_request(remaining_time_ms=None if is_own_deadline else round(TIMEOUT_S * 1000))
            call = stages.inference.Complete(request, timeout=TIMEOUT_S if is_own_deadline else 30)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_events(call, events)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not any(event.HasField("choice_finished") or event.HasField("completed") for event in events)
        if num_beside == 1:
            assert events[0].HasField("accepted")
            assert_freed_within_two_steps(log)
        else:
            assert not events
            assert not ids_of_subject(log)
        await assert_idle(stages)

    stages.run(test)


@pytest.mark.parametrize("header", ["0", "-1", "soon", "nan", "inf", "1e400", ""])
def test_a_header_that_is_no_time_is_refused_by_name(stages: StagesOfModule, header: str) -> None:
    async def test(stages: Stages) -> None:
        body = subject(max_tokens=1)
        response = await stages.client.post("/v1/completions", json=body, headers={"x-request-timeout": header})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-request-timeout"

    stages.run(test)


def test_time_that_suffices_changes_nothing(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        timely = await stages.complete({"x-request-timeout": "50"}, prompt=SUBJECT, max_tokens=8, timeout=40)
        free = await stages.complete(prompt=SUBJECT, max_tokens=8)
        assert timely["choices"] == free["choices"]
        assert timely["choices"][0]["finish_reason"] == "length"

    stages.run(test)
