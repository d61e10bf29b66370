"""A request's time, from the caller to the engine, and what is told when it is up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.service.tokenizer_stack import (
    Answer,
    Gateway,
    TokenizerStack,
    chat_request,
    complete_request,
    run,
    tokenizer_on,
    until,
)
from tokenloom.common.errors import DeadlineExceeded
from tokenloom.common.metrics import REGISTRY
from tokenloom.tokenizer import generation

DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED
LONG: dict[str, Any] = {"max_model_len": 1 << 20}


def num_ended(outcome: str) -> float:
    labels = {"kind": "complete", "outcome": outcome}
    return REGISTRY.get_sample_value("tokenloom_tokenizer_requests_total", labels) or 0.0


async def opened(stack: TokenizerStack) -> Gateway:
    gateway = Gateway(stack)
    await gateway.open()
    gateway.read()
    return gateway


@pytest.mark.parametrize(
    ("asked_ms", "call_s", "at_most_ms"), [(60_000, 20.0, 20_000), (20_000, 60.0, 20_000), (20_000, None, 20_000)]
)
@pytest.mark.parametrize("kind", ["Chat", "Complete"])
def test_the_smaller_of_the_requests_and_the_calls_time_holds(
    tmp_path: Path, kind: str, asked_ms: int, call_s: float | None, at_most_ms: int
) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            options: dict[str, Any] = {"remaining_time_ms": asked_ms}
            request: Any = chat_request(**options) if kind == "Chat" else complete_request([5], **options)
            await stack.collect(getattr(stack.stub, kind)(request, timeout=call_s))
            # gRPC rounds the time of a call up, to about three digits
            assert at_most_ms - 10_000 < stack.engine.submits[0].remaining_time_ms <= at_most_ms * 1.05

    run(scenario())


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_request_that_expires_in_the_queue_was_never_accepted(tmp_path: Path, num_choices: int) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()
            gateway = await opened(stack)
            await gateway.start(complete_request([5], num_choices=num_choices, remaining_time_ms=100))
            await until(lambda: gateway.failed)
            assert gateway.accepted == {}
            assert gateway.failed[1].code == DEADLINE_EXCEEDED.value[0]
            answer = Answer()
            with pytest.raises(DeadlineExceeded, match="time was up"):
                await stack.complete([5], answer=answer, num_choices=num_choices, remaining_time_ms=100)
            assert answer.events == []
            assert stack.engine.num_living == 0
            assert sum(len(frame.failed) for frame in gateway.frames) == 1

    run(scenario())


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_request_that_expires_while_decoding_ends_with_one_error_and_no_finish(
    tmp_path: Path, num_choices: int
) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, engine=LONG) as stack:
            gateway = await opened(stack)
            await gateway.start(
                complete_request([5], num_choices=num_choices, remaining_time_ms=1000, max_tokens=1_000_000)
            )
            await until(lambda: gateway.failed)
            await until(lambda: stack.engine.num_living == 0)
            await asyncio.sleep(0.05)
            assert gateway.accepted.keys() == {1}
            assert all(gateway.texts[1, index] for index in range(num_choices))
            assert gateway.failed[1].code == DEADLINE_EXCEEDED.value[0]
            assert sum(len(frame.failed) for frame in gateway.frames) == 1
            assert (gateway.finished, gateway.completed) == ([], {})

            answer = Answer()
            with pytest.raises(DeadlineExceeded):
                await stack.complete([5], answer=answer, max_tokens=1_000_000, remaining_time_ms=1000)
            assert answer.texts[0]
            assert set(answer.kinds) == {"accepted", "delta"}

    run(scenario())


def test_a_choice_that_ended_in_time_does_not_end_its_late_request_well(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()
            gateway = await opened(stack)
            await gateway.start(complete_request([5], [6], remaining_time_ms=1500, max_tokens=1))
            await until(lambda: stack.engine.num_living == 2)
            stack.engine.hold(choice_index=1)
            stack.engine.may_step.set()
            await until(lambda: gateway.failed)
            assert gateway.finished == [(1, 0)]
            assert gateway.failed[1].code == DEADLINE_EXCEEDED.value[0]
            assert gateway.completed == {}

    run(scenario())


def test_the_calls_own_deadline_ends_the_request_at_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, engine=LONG) as stack:
            before = num_ended("deadline_exceeded")
            for is_prompt in (True, False):
                stack.engine.is_prompt = is_prompt
                call = stack.stub.Complete(complete_request([5], max_tokens=1_000_000), timeout=1.0)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
                assert caught.value.code() == DEADLINE_EXCEEDED
                await until(lambda: stack.engine.num_living == 0)
            await until(lambda: num_ended("deadline_exceeded") == before + 2)

    run(scenario())


def test_a_request_without_time_is_ended_without_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_DEADLINE_GRACE_S", 600.0)  # that is for the engine alone

    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            with pytest.raises(DeadlineExceeded):
                await stack.chat(remaining_time_ms=0)
            with pytest.raises(DeadlineExceeded):
                await stack.complete([5], remaining_time_ms=0)
            assert stack.engine.submits == []

    run(scenario())


def test_an_engine_that_keeps_no_time_holds_a_request_no_longer_than_a_moment(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.is_prompt = False
            stack.engine.may_step.clear()
            started_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await stack.complete([5], num_choices=2, remaining_time_ms=50)
            assert time.monotonic() - started_s < 5.0
            await until(lambda: len(stack.engine.cancelled) == 2)

    run(scenario())
