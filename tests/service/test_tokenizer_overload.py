"""What callers are told when the engine has no room for them, and how busy it says it is."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from prometheus_client import generate_latest

from tests.service.tokenizer_stack import (
    Answer,
    Gateway,
    TokenizerStack,
    complete_request,
    run,
    tokenizer_on,
    until,
)
from tokenloom.api.v1 import engine_pb2
from tokenloom.common.errors import ResourceExhausted
from tokenloom.common.metrics import REGISTRY

RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
REFUSALS = [
    ResourceExhausted("too many requests wait", reason="QUEUE_FULL", retry_after_s=2.5),
    ResourceExhausted("too many requests of the tenant wait", reason="TENANT_QUEUE_FULL", retry_after_s=1.0),
    ResourceExhausted("the tenant used its tokens of this minute", reason="TOKEN_RATE", retry_after_s=41.0),
]


async def has_ended(stack: TokenizerStack) -> None:
    """Nothing is left at the engine, and the stage takes requests."""
    await until(lambda: stack.engine.num_living == 0)
    stack.engine.refusal = None
    stack.engine.may_step.set()
    assert (await stack.complete([5])).usage.num_generated_tokens == 20


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.reason)
def test_a_refusal_has_reason_and_retry_info_and_comes_at_once(tmp_path: Path, refusal: ResourceExhausted) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()  # the engine steps no more; a refusal needs no step
            stack.engine.refusal = refusal
            started_s = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stack.stub.Complete(complete_request([5])).read()
            assert time.monotonic() - started_s < 2.0
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.details() == refusal.message
            status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
            assert status is not None
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            assert any(detail.Unpack(info) for detail in status.details)
            assert any(detail.Unpack(retry) for detail in status.details)
            assert info.reason == refusal.reason
            assert retry.retry_delay.ToMilliseconds() == refusal.retry_after_s * 1000  # type: ignore[operator]
            await has_ended(stack)

    run(scenario())


@pytest.mark.parametrize("refused", [0, 2, 4])
@pytest.mark.parametrize("prompts", [[[5]], [[5], [6], [7], [8], [9]]], ids=["n", "prompts"])
def test_the_refusal_of_one_choice_is_that_of_all_and_leaves_no_orphan(
    tmp_path: Path, refused: int, prompts: list[list[int]]
) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()
            stack.engine.refusal = REFUSALS[0]
            stack.engine.refused_choices = {refused}
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            await gateway.start(complete_request(*prompts, num_choices=5 // len(prompts), request_id="r"))
            await until(lambda: gateway.failed)
            await until(lambda: len(stack.engine.cancelled) == 4)
            assert gateway.accepted == {}
            assert gateway.failed[1].code == RESOURCE_EXHAUSTED
            assert (gateway.failed[1].reason, gateway.failed[1].retry_after_ms) == ("QUEUE_FULL", 2500)
            assert f"r:{refused}" not in stack.engine.cancelled
            await has_ended(stack)
            assert sum(len(frame.failed) for frame in gateway.frames) == 1

    run(scenario())


@pytest.mark.parametrize("as_finished", [False, True])
def test_a_request_that_gave_way_in_the_queue_was_never_accepted(tmp_path: Path, as_finished: bool) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()
            answer = Answer()
            call = stack.stub.Complete(complete_request([5], num_choices=3))
            collected = asyncio.create_task(stack.collect(call, answer))
            await until(lambda: stack.engine.num_living == 3)
            await asyncio.sleep(0.05)
            stack.engine.displace(REFUSALS[0], choice_index=1, as_finished=as_finished)
            with pytest.raises(ResourceExhausted, match="too many requests wait") as caught:
                await collected
            assert (caught.value.reason, caught.value.retry_after_s) == ("QUEUE_FULL", 2.5)
            assert answer.events == []
            await until(lambda: len(stack.engine.cancelled) == 2)
            await has_ended(stack)

    run(scenario())


def test_a_choice_refused_while_another_runs_ends_the_whole_request_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, engine={"max_model_len": 4096}) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            await gateway.start(complete_request([5], num_choices=2, max_tokens=4000))
            await until(lambda: (1, 0) in gateway.texts)
            stack.engine.displace(REFUSALS[0], choice_index=1)
            await until(lambda: gateway.failed)
            await until(lambda: stack.engine.num_living == 0)
            assert gateway.failed[1].code == RESOURCE_EXHAUSTED
            assert sum(len(frame.failed) for frame in gateway.frames) == 1
            assert gateway.completed == {}
            assert gateway.finished == []

    run(scenario())


def test_how_busy_the_engine_says_it_is_is_shown_until_it_is_gone(tmp_path: Path) -> None:
    def shown() -> tuple[float | None, float | None]:
        name = "tokenloom_tokenizer_engine_{}_requests"
        return tuple(REGISTRY.get_sample_value(name.format(what)) for what in ("running", "waiting"))  # type: ignore[return-value]

    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            load = engine_pb2.Load(num_running=3, num_waiting=7, num_blocks=64, tokens_per_second=1.5)
            load.MergeFromString(b"\xf8\x7f\x05")  # a field of a later revision
            stack.engine.tell(engine_pb2.EngineServiceSessionResponse(load=load))
            await until(lambda: shown() == (3.0, 7.0))
            assert b"tokenloom_tokenizer_engine_waiting_requests 7.0" in generate_latest(REGISTRY)

            stack.engine.may_step.clear()
            request = asyncio.create_task(stack.complete([5]))
            await until(lambda: stack.engine.num_living == 1)
            for num_waiting in range(5):
                stack.engine.tell(
                    engine_pb2.EngineServiceSessionResponse(load=engine_pb2.Load(num_waiting=num_waiting))
                )
                await asyncio.sleep(0.01)
            stack.engine.may_step.set()
            assert (await request).usage.num_generated_tokens == 20
            assert shown() == (0.0, 4.0)

            await stack.kill_engine()
            await until(lambda: shown() == (0.0, 0.0))

    run(scenario())
