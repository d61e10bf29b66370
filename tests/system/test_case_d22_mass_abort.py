"""Case D22: when many clients go away at once, nothing of them is left and every gauge comes down without traffic."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import pytest

from tests.system.in_process import Stages, StagesOfModule, stages_of_module, total
from tokenloom.api.v1 import common_pb2, engine_pb2, inference_pb2

NUM_CALLS = 40
NUM_CHOICES = 50  # every fourth call has two
MAX_NUM_SEQS = 12
LIMIT_S = 5.0
RUNNING, WAITING = "tokenloom_num_requests_running", "tokenloom_num_requests_waiting"
USAGE = "tokenloom_kv_cache_usage_perc"
ABORTED = 'tokenloom_request_success_total{finished_reason="aborted"}'


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagesOfModule]:
    with stages_of_module(tmp_path_factory.mktemp("stack"), max_num_seqs=MAX_NUM_SEQS) as running:
        yield running


def prompt_of(number: int) -> list[int]:
    return [5 + number, 40, 41] * 7


async def over_http(stages: Stages, number: int) -> None:
    async for _ in stages.stream(prompt=prompt_of(number), max_tokens=900, n=2 if number % 4 == 0 else 1):
        pass


async def over_grpc(stages: Stages, number: int) -> None:
    options = inference_pb2.GenerationOptions(
        num_choices=2 if number % 4 == 0 else 1,
        stop=common_pb2.StopConditions(max_tokens=900, ignore_eos=True),
    )
    prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt_of(number)))
    call = stages.inference.Complete(inference_pb2.CompleteRequest(prompts=[prompt], options=options))
    try:
        async for _ in call:
            pass
    finally:
        call.cancel()


async def read_metrics(stages: Stages) -> dict[str, float]:
    """The page; no sample on it may be negative at any time."""
    metrics = await stages.metrics()
    negative = {name: value for name, value in metrics.items() if value < 0}
    assert not negative
    return metrics


def is_idle(metrics: Mapping[str, float]) -> bool:
    in_flight = "tokenloom_gateway_requests_in_flight"
    held = (RUNNING, WAITING, "tokenloom_tokenizer_active_requests", "tokenloom_tokenizer_active_choices")
    generating = sum(v for name, v in metrics.items() if name.startswith(in_flight) and "/v1/" in name)
    return not any(total(metrics, name) for name in held) and not generating


async def until(stages: Stages, holds: Any) -> dict[str, float]:
    """The metrics when they meet a condition. Raises: AssertionError if they do not within the limit."""
    deadline = time.monotonic() + LIMIT_S
    while not holds(metrics := await read_metrics(stages)):
        assert time.monotonic() < deadline, {name: v for name, v in metrics.items() if v and "requests" in name}
        await asyncio.sleep(0.02)
    return metrics


@pytest.mark.parametrize("call", [over_http, over_grpc])
def test_40_calls_given_up_at_once_leave_nothing_and_are_counted(stages: StagesOfModule, call: Any) -> None:
    """The engine counts choices, 50; the gateway and the tokenizer count calls, 40."""

    async def test(stages: Stages) -> None:
        before = await until(stages, is_idle)
        load_before = (await stages.engine.GetLoad(engine_pb2.GetLoadRequest())).load
        calls = [asyncio.create_task(call(stages, number)) for number in range(NUM_CALLS)]

        def is_full(now: Any) -> bool:
            running = total(now, RUNNING)
            return running == MAX_NUM_SEQS and running + total(now, WAITING) == NUM_CHOICES

        during = await until(stages, is_full)
        assert total(during, USAGE) > total(before, USAGE)
        for task in calls:
            task.cancel()
        for task in calls:
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await task
        after = await until(stages, is_idle)
        assert total(after, USAGE) == total(before, USAGE)
        load = (await stages.engine.GetLoad(engine_pb2.GetLoadRequest())).load
        assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 0, 0)
        assert load.num_free_blocks == load_before.num_free_blocks == load.num_blocks
        assert after[ABORTED] - before.get(ABORTED, 0) == NUM_CHOICES
        name = 'tokenloom_tokenizer_requests_total{kind="complete",outcome="cancelled"}'
        assert after[name] - before.get(name, 0) == NUM_CALLS
        if call is over_http:
            name = "tokenloom_gateway_requests_ended_early_total"
            assert total(after, name) - total(before, name) == NUM_CALLS

    stages.run(test)
