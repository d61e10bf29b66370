"""A neighbour that promised signs of life and is silent counts as lost; readiness tells what is missing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from tests.openai_streams import joined
from tests.service.gateway_stack import GatewayStack, running_gateway
from tests.service.test_gateway_recovery import BODY, CHAT, in_thread, post
from tests.service.tokenizer_stack import Answer, Gateway, chat_request, run, tokenizer_on, until
from tokenloom.api.v1 import engine_pb2
from tokenloom.common.errors import Cancelled, Unavailable

STALL_S = 0.5
HEARTBEAT_S = 0.1
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PROMISE = engine_pb2.Welcome(heartbeat_ms=100)


# --- the tokenizer and its scheduler ---


def test_a_scheduler_that_is_silent_counts_as_lost_and_its_requests_go_on_when_it_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, has_engine=False, stall_timeout_s=STALL_S) as stack:
            stack.engine.welcome.MergeFrom(PROMISE)
            await stack.engine.start()
            await stack.until_health(SERVING)
            await asyncio.sleep(2 * STALL_S)
            assert len(stack.engine.hellos) == 1, "its signs of life keep the session"
            stack.engine.may_step.clear()
            answer = Answer()
            options: dict[str, Any] = {"max_tokens": 40, "return_token_ids": True}
            task = asyncio.create_task(stack.complete([5] * 4, answer=answer, **options))
            await until(lambda: stack.engine.num_living == 1)
            stack.engine.may_step.set()
            await until(lambda: answer.num_tokens.get(0, 0) > 3)
            stack.engine.is_awake.clear()
            began_s = time.monotonic()
            await stack.until_health(NOT_SERVING)
            assert 0.5 * STALL_S <= time.monotonic() - began_s <= STALL_S + 2
            stack.engine.is_awake.set()
            await stack.until_health(SERVING)
            await task
            assert answer.token_ids[0] == stack.told([5] * 4, 40)

    run(scenario())


def test_an_engine_that_promised_nothing_may_be_silent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, stall_timeout_s=0.1) as stack:
            await asyncio.sleep(0.5)
            assert len(stack.engine.hellos) == 1
            assert await stack.health() == SERVING

    run(scenario())


def test_a_silent_scheduler_fails_requests_after_the_takeover_limit_and_refuses_new_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        changes: dict[str, Any] = {"stall_timeout_s": STALL_S, "takeover_limit_s": 0.3}
        async with tokenizer_on(tmp_path, has_engine=False, **changes) as stack:
            stack.engine.welcome.MergeFrom(PROMISE)
            await stack.engine.start()
            await stack.until_health(SERVING)
            stack.engine.is_awake.clear()
            error = await stack.refusal(stack.stub.Chat(chat_request()))
            assert (type(error), error.reason) == (Unavailable, "ENGINE_UNAVAILABLE")
            began_s = time.monotonic()
            assert (await stack.refusal(stack.stub.Chat(chat_request()))).reason == "ENGINE_UNAVAILABLE"
            assert time.monotonic() - began_s < 0.2, "at once now"
            stack.engine.is_awake.set()
            await stack.until_health(SERVING)

    run(scenario())


def test_a_stage_whose_engine_waits_for_its_executor_is_not_ready_but_takes_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            stack.engine.may_step.clear()
            load = engine_pb2.Load(waits_for_executor=True)
            stack.engine.tell(engine_pb2.EngineServiceSessionResponse(load=load))
            await stack.until_health(NOT_SERVING)
            await until(lambda: bool(gateway.loads) and gateway.loads[-1].waits_for_executor)
            task = asyncio.create_task(stack.complete([5] * 4))
            await until(lambda: stack.engine.num_living == 1)
            stack.engine.tell(engine_pb2.EngineServiceSessionResponse(load=engine_pb2.Load()))
            await stack.until_health(SERVING)
            await until(lambda: not gateway.loads[-1].waits_for_executor)
            stack.engine.may_step.set()
            assert (await task).usage.num_generated_tokens == 20

    run(scenario())


# --- the gateway and its tokenizers ---


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[GatewayStack]:
    with running_gateway(tmp_path, num_tokenizers=2, stall_timeout_s=STALL_S, takeover_limit_s=1.0) as running:
        running.wait_for(lambda: all(tokenizer.num_sessions for tokenizer in running.tokenizers))
        running.do(lambda: promise(running))
        running.wait_for(lambda: not any(tokenizer.num_sessions for tokenizer in running.tokenizers))
        running.wait_for(lambda: all(tokenizer.num_sessions for tokenizer in running.tokenizers))
        yield running


def promise(stack: GatewayStack) -> None:
    """Let the fakes promise signs of life, in sessions that begin now."""
    for tokenizer in stack.tokenizers:
        tokenizer.heartbeat_s = HEARTBEAT_S
        tokenizer.drop_sessions()


def waits_for(stack: GatewayStack) -> str | None:
    """What /ready says the gateway waits for; None: it is ready."""
    answer = stack.http.get("/ready")
    assert stack.http.get("/health").status_code == 200
    status: str = answer.json()["status"]
    assert answer.status_code == (200 if status == "ready" else 503)
    return None if status == "ready" else status.removeprefix("waiting for the ")


def busy_one(stack: GatewayStack) -> int:
    """The number of the fake that has the newest request."""
    stack.wait_for(lambda: any(tokenizer.starts for tokenizer in stack.tokenizers))
    return next(number for number, tokenizer in enumerate(stack.tokenizers) if tokenizer.starts)


def test_a_silent_tokenizers_requests_go_on_through_another_one(stack: GatewayStack) -> None:
    body = {**BODY, "max_tokens": 12, "stream": True}
    undisturbed = joined(post(stack, CHAT, body).text)
    for tokenizer in stack.tokenizers:
        tokenizer.starts.clear()
        stack.do(tokenizer.may_step.clear)
    thread, answers = in_thread(stack, body)
    busy = busy_one(stack)
    stack.do(stack.tokenizers[busy].is_awake.clear)
    stack.do(stack.tokenizers[1 - busy].may_step.set)
    thread.join(10)
    assert joined(answers[0].text) == undisturbed
    assert waits_for(stack) is None, "one is left"


def test_without_another_tokenizer_requests_fail_with_503_and_all_is_well_when_one_wakes(stack: GatewayStack) -> None:
    for tokenizer in stack.tokenizers:
        stack.do(tokenizer.is_awake.clear)
    thread, answers = in_thread(stack, BODY)
    stack.wait_for(lambda: waits_for(stack) == "tokenizer")
    thread.join(10)
    assert answers[0].status_code == 503
    stack.do(stack.tokenizers[1].is_awake.set)
    stack.wait_for(lambda: waits_for(stack) is None)
    assert post(stack, CHAT, BODY).status_code == 200


def test_requests_are_sent_where_they_wait_for_an_executor_if_there_is_nothing_better(stack: GatewayStack) -> None:
    def begin_to_wait() -> None:
        for tokenizer in stack.tokenizers:
            tokenizer.load.waits_for_executor = True
            tokenizer.may_step.clear()
            tokenizer.starts.clear()
            tokenizer.tell_load()

    stack.do(begin_to_wait)
    for tokenizer in stack.tokenizers:
        stack.run(tokenizer.set_serving(False))
    stack.wait_for(lambda: waits_for(stack) == "executor")
    stack.do(stack.tokenizers[0].drop_sessions)  # no session was lost so long ago that nobody waits for another one
    thread, answers = in_thread(stack, BODY)
    busy = busy_one(stack)
    threading.Event().wait(1.3)  # longer than the takeover limit
    assert not answers

    def cease_to_wait() -> None:
        for tokenizer in stack.tokenizers:
            tokenizer.load.waits_for_executor = False
            tokenizer.may_step.set()
            tokenizer.tell_load()

    stack.do(cease_to_wait)
    for tokenizer in stack.tokenizers:
        stack.run(tokenizer.set_serving(True))
    thread.join(10)
    assert answers[0].status_code == 200
    assert [len(tokenizer.starts) for tokenizer in stack.tokenizers] == [busy == 0, busy == 1]
    stack.wait_for(lambda: waits_for(stack) is None)


def test_requests_leave_an_engine_without_executor_for_one_that_has_its_own(stack: GatewayStack) -> None:
    body = {**BODY, "max_tokens": 12, "stream": True}
    undisturbed = joined(post(stack, CHAT, body).text)
    for tokenizer in stack.tokenizers:
        tokenizer.starts.clear()
        stack.do(tokenizer.may_step.clear)
    thread, answers = in_thread(stack, body)
    busy = busy_one(stack)
    stack.tokenizers[busy].load.waits_for_executor = True
    stack.run(stack.tokenizers[busy].set_serving(False))
    stack.do(stack.tokenizers[1 - busy].may_step.set)
    thread.join(10)
    assert joined(answers[0].text) == undisturbed
    stack.wait_for(lambda: len(stack.tokenizers[busy].cancelled) == 1)


@pytest.mark.parametrize("may_return", [False, True])
def test_a_request_that_a_tokenizer_took_over_which_was_stopped_goes_on(stack: GatewayStack, may_return: bool) -> None:
    """A stale Submit of it reached the engine; unless its client may be back elsewhere, and have taken it over."""
    taken = Cancelled("another session took the request over", reason="SUPERSEDED")
    for tokenizer in stack.tokenizers:
        tokenizer.failure = taken
        stack.do(tokenizer.may_step.clear)
    thread, answers = in_thread(stack, {**BODY, "stream": True, "resumable": may_return})
    busy = busy_one(stack)
    stack.tokenizers[1 - busy].failure = None
    stack.run(stack.tokenizers[busy].set_serving(False))
    for tokenizer in stack.tokenizers:
        stack.do(tokenizer.may_step.set)
    thread.join(10)
    if may_return:
        assert '"code":"superseded"' in answers[0].text
    else:
        assert joined(answers[0].text)["is_done"]


def test_what_a_tokenizer_without_an_engine_gives_up_goes_on_elsewhere_or_fails(stack: GatewayStack) -> None:
    lost = Unavailable("the engine lost its executor", reason="EXECUTOR_LOST", retry_after_s=1.0)
    for tokenizer in stack.tokenizers:
        stack.do(tokenizer.may_step.clear)
    thread, answers = in_thread(stack, BODY)
    busy = busy_one(stack)
    stack.run(stack.tokenizers[busy].set_serving(False))
    stack.tokenizers[busy].failure = lost
    for tokenizer in stack.tokenizers:
        stack.do(tokenizer.may_step.set)
    thread.join(10)
    assert answers[0].status_code == 200
    assert len(stack.tokenizers[1 - busy].starts) == 1

    def begin_to_wait() -> None:
        for tokenizer in stack.tokenizers:
            tokenizer.failure = lost
            tokenizer.load.waits_for_executor = True
            tokenizer.tell_load()

    stack.run(stack.tokenizers[1 - busy].set_serving(False))
    stack.do(begin_to_wait)
    stack.wait_for(lambda: waits_for(stack) == "executor")
    answer = post(stack, CHAT, BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "executor_lost")
