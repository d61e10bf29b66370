"""The tokenizer stage's sessions: what a gateway sees."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.service.tokenizer_stack import (
    Gateway,
    chat_request,
    complete_request,
    run,
    small_window_channel,
    tokenizer_on,
    until,
)
from tokenloom.api.v1 import common_pb2, inference_pb2
from tokenloom.common.auth import digest_of
from tokenloom.common.errors import ResourceExhausted, TokenloomError, from_rpc_error


def test_what_a_step_brought_is_one_frame_of_columns(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            assert (await gateway.open()).model == "tiny"
            gateway.read()
            stack.engine.may_step.clear()
            prompts = [[5] * length for length in range(1, 17)]
            await gateway.start(*[complete_request(prompt) for prompt in prompts])
            await until(lambda: stack.engine.num_living == 16)
            stack.engine.may_step.set()
            await until(lambda: len(gateway.completed) == 16)

            expected = {(i, 0): stack.decode(stack.told(prompt, 20)) for i, prompt in enumerate(prompts, 1)}
            assert gateway.texts == expected
            # 20 steps of the engine: at most as many frames here, and never two rows of one choice in a frame.
            assert len(gateway.frames) <= len(stack.engine.frames) == 20
            for frame in gateway.frames:
                assert max(Counter(frame.outputs.handles).values()) == 1
            assert max(len(frame.outputs.handles) for frame in gateway.frames) == 16

    run(scenario())


def test_requests_of_one_turn_reach_the_engine_in_one_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            await gateway.start(*[complete_request([5, i], num_choices=4) for i in range(6, 16)])
            await until(lambda: len(gateway.completed) == 10)
            assert len(stack.engine.submits) == 40
            assert stack.engine.num_messages <= 3

    run(scenario())


def test_ids_and_logprobs_come_beside_the_columns(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            await gateway.start(
                complete_request([5] * 4),
                complete_request([6] * 5, return_token_ids=True, sampling={"num_logprobs": 1}),
            )
            await until(lambda: len(gateway.completed) == 2)
            told = stack.told([6] * 5, 20)
            assert 1 not in gateway.extras
            assert [i for delta in gateway.extras[2] for i in delta.token_ids] == told
            assert [p.token.token_id for delta in gateway.extras[2] for p in delta.logprobs] == told
            assert gateway.texts[2, 0] == stack.decode(told)
            assert gateway.accepted[2].prompts[0].ids == [6] * 5

    run(scenario())


def test_each_request_has_exactly_one_end_and_a_bad_one_harms_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            empty = inference_pb2.SessionRequest(starts=[inference_pb2.SessionStart(handle=5)])
            await gateway.start(
                chat_request(), complete_request([999]), complete_request("a", ""), chat_request(num_choices=3)
            )
            await gateway.call.write(empty)
            await until(lambda: len(gateway.completed) + len(gateway.failed) == 5)
            assert set(gateway.completed) == {1, 4}
            assert {handle: error.field for handle, error in gateway.failed.items()} == {
                2: "prompt",
                3: "prompt[1]",
                5: "",
            }
            assert all(error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0] for error in gateway.failed.values())
            assert set(gateway.accepted) == {1, 4}
            assert sorted(gateway.finished) == [(1, 0), (4, 0), (4, 1), (4, 2)]

    run(scenario())


def test_a_cancelled_handle_reaches_the_engine_and_says_nothing_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            await gateway.start(complete_request([5] * 4, request_id="gone"), complete_request([6] * 4))
            await until(lambda: stack.engine.num_living == 2)
            await gateway.cancel(1, 77)
            await until(lambda: stack.engine.cancelled == ["gone:0"])
            stack.engine.may_step.set()
            await until(lambda: gateway.completed)
            assert set(gateway.completed) == {2}
            assert 1 not in gateway.accepted
            assert not gateway.failed

    run(scenario())


def test_the_callers_key_is_checked_for_each_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, api_key=("one", "two"), cluster_token="cluster") as stack:
            for token in ("", "one"):
                refused = await stack.refusal(Gateway(stack, token).call)
                assert refused.code == grpc.StatusCode.UNAUTHENTICATED
            gateway = Gateway(stack, "cluster")
            await gateway.open()
            gateway.read()
            await gateway.start(chat_request(), key_digest=digest_of("two"))
            await gateway.start(chat_request(), first=2)
            await gateway.start(chat_request(), first=3, key_digest=digest_of("cluster"))
            await until(lambda: len(gateway.completed) + len(gateway.failed) == 3)
            assert set(gateway.completed) == {1}
            assert {error.code for error in gateway.failed.values()} == {grpc.StatusCode.UNAUTHENTICATED.value[0]}
            (submit,) = stack.engine.submits
            assert submit.tenant

    run(scenario())


def test_the_trace_of_a_frame_goes_on_to_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            await gateway.start(chat_request(), trace=common_pb2.TraceContext(traceparent=traceparent))
            await until(lambda: gateway.completed)
            assert stack.engine.submits[0].trace.traceparent.split("-")[1] == traceparent.split("-")[1]

    run(scenario())


def test_a_gateway_that_goes_away_cancels_its_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()
            gateway = Gateway(stack)
            await gateway.open()
            await gateway.start(complete_request([5] * 4), complete_request([6] * 4))
            await until(lambda: stack.engine.num_living == 2)
            gateway.call.cancel()
            await until(lambda: stack.engine.num_living == 0)
            assert stack.stage._generation.num_active == 0

    run(scenario())


def test_a_session_ends_well_after_its_gateway_has_said_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            await gateway.start(complete_request([5] * 4))
            await gateway.call.done_writing()
            assert gateway.reader is not None
            await gateway.reader
            assert set(gateway.completed) == {1}
            assert await gateway.call.code() == grpc.StatusCode.OK

    run(scenario())


def test_a_request_that_is_begun_and_cancelled_in_one_message_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            start = inference_pb2.SessionStart(handle=1, complete=complete_request([5] * 4))
            await gateway.call.write(inference_pb2.SessionRequest(starts=[start], cancelled_handles=[1]))
            await gateway.call.done_writing()
            assert gateway.reader is not None
            await gateway.reader
            assert not gateway.accepted
            assert await gateway.call.code() == grpc.StatusCode.OK

    run(scenario())


async def end_of(reading: Awaitable[None]) -> TokenloomError:
    """The error with which a stream ends."""
    try:
        await reading
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the stream ended well")


def test_a_gateway_that_does_not_read_loses_its_session_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            tokenizer_on(tmp_path, session_outbox_bytes=100_000) as stack,
            small_window_channel(stack.config.listen) as channel,
        ):
            stack.engine.may_step.clear()
            slow, quick = Gateway(stack, channel=channel), Gateway(stack)
            await slow.open()
            await quick.open()
            quick.read()
            wide: dict[str, Any] = {"max_tokens": 250, "sampling": {"num_logprobs": 20}}
            await slow.start(*[complete_request([5], request_id=name, **wide) for name in ("a", "b", "c")])
            await quick.start(complete_request([5] * 4, max_tokens=200))
            await until(lambda: stack.engine.num_living == 4)
            stack.engine.may_step.set()
            # Given up long before their end, while the gateway still does not read.
            await until(lambda: sorted(stack.engine.cancelled) == ["a:0", "b:0", "c:0"])
            await until(lambda: quick.completed)
            assert quick.texts[1, 0] == stack.decode(stack.told([5] * 4, 200))
            error = await end_of(slow._read())
            assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.reason == "SLOW_READER"

    run(scenario())


def test_a_request_that_fills_its_sessions_outbox_fails_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, session_outbox_bytes=20_000) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            prompts = [[5] * 200] * 40  # 32,000 bytes of ids
            await gateway.start(
                complete_request(*prompts, max_tokens=1),
                complete_request(*prompts, max_tokens=1, return_token_ids=True),
                complete_request([5] * 4, return_token_ids=True),
            )
            await until(lambda: len(gateway.completed) + len(gateway.failed) == 3)
            assert set(gateway.completed) == {1, 3}
            assert gateway.failed[2].code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert not gateway.accepted[1].prompts, "nobody asked for them"
            assert gateway.accepted[3].prompts[0].ids == [5] * 4
            assert 2 not in gateway.accepted

    run(scenario())


def test_values_that_no_message_can_carry_fail_their_request_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            bad = chat_request()
            bad.template_kwargs_json = '{"\\ud800": 1}'
            await gateway.start(bad, chat_request())
            await until(lambda: len(gateway.completed) + len(gateway.failed) == 2)
            assert set(gateway.completed) == {2}
            assert gateway.failed[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]

    run(scenario())


def test_only_a_gateways_resubmission_passes_the_bound_and_keeps_its_age(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, max_active_choices=1) as stack:
            stack.engine.may_step.clear()
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            known = [inference_pb2.TokenIds(ids=[40])]
            await gateway.start(complete_request([5] * 4, request_id="first"))
            await until(lambda: stack.engine.num_living == 1)
            await gateway.start(complete_request([6] * 4, request_id="new"), first=2)
            await gateway.start(complete_request([6] * 4, request_id="again"), first=3, age_ms=60_000)
            await gateway.start(complete_request([6] * 4, request_id="resumed", resume_token_ids=known), first=4)
            direct = stack.stub.Complete(complete_request([6] * 4, resume_token_ids=known))
            assert isinstance(await stack.refusal(direct), ResourceExhausted)
            await until(lambda: stack.engine.num_living == 3)
            stack.engine.may_step.set()
            await until(lambda: len(gateway.completed) == 3)
            assert gateway.failed.keys() == {2}
            first, again, resumed = stack.engine.submits
            assert not first.HasField("age_ms")
            assert 60_000 <= again.age_ms < 100_000
            assert resumed.HasField("age_ms")

    run(scenario())


def test_gateways_are_told_that_the_stage_drains_also_those_that_connect_then(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            stack.engine.may_step.clear()
            await gateway.start(chat_request())
            await until(lambda: stack.engine.num_living == 1)
            draining = asyncio.create_task(stack.stage.drain(10.0))
            await until(lambda: gateway.is_draining)
            late = Gateway(stack)
            await late.open()
            late.read()
            await until(lambda: late.is_draining)
            await late.start(chat_request())
            await until(lambda: late.failed)
            assert late.failed[1].code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert late.failed[1].reason == "DRAINING"
            stack.engine.may_step.set()
            await draining
            for session in (gateway, late):  # the stage ends them when there is nothing more to tell
                assert session.reader is not None
                await session.reader
            assert gateway.completed.keys() == {1}
            assert await gateway.call.code() is grpc.StatusCode.OK

    run(scenario())


def test_what_is_left_at_the_end_of_the_grace_period_is_given_back_to_the_gateway_which_knew_of_the_drain(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            await gateway.start(chat_request(), chat_request())
            await until(lambda: stack.engine.num_living == 2)
            await stack.stage.drain(0.0)
            assert gateway.reader is not None
            await gateway.reader
            assert [error.reason for error in gateway.failed.values()] == ["DRAINING"] * 2
            assert next(frame for frame in gateway.frames if frame.draining or frame.failed).draining
            assert await gateway.call.code() is grpc.StatusCode.OK

    run(scenario())


@pytest.mark.parametrize("revision", [3, 77])
def test_a_gateway_of_another_schema_is_refused(tmp_path: Path, revision: int) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            hello = inference_pb2.SessionHello(schema_revision=revision)
            call = stack.stub.Session(iter([inference_pb2.SessionRequest(hello=hello)]))
            assert (await stack.refusal(call)).code == grpc.StatusCode.FAILED_PRECONDITION
            call = stack.stub.Session(iter([inference_pb2.SessionRequest()]))
            assert (await stack.refusal(call)).code == grpc.StatusCode.INVALID_ARGUMENT

    run(scenario())
