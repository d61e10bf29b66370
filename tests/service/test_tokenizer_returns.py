"""Clients of resumable requests that go away and come back, to the tokenizer stage: over gRPC, and through gateways."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.service.tokenizer_stack import (
    Answer,
    Gateway,
    TokenizerStack,
    complete_request,
    run,
    tokenizer_on,
    until,
)
from tokenloom.api.v1 import engine_pb2, inference_pb2
from tokenloom.common.errors import Cancelled, InvalidArgument

PROMPT = [5] * 4
NUM_TOKENS = 40


def resumable(**options: Any) -> inference_pb2.CompleteRequest:
    """A request that its client may come back for."""
    asked = {"request_id": "r", "sampling": {"seed": 5}, "max_tokens": NUM_TOKENS, "resumable": True}
    return complete_request(PROMPT, **{**asked, **options})


def is_idle(stack: TokenizerStack) -> bool:
    return stack.stage._generation.num_active == 0


async def text_of(stack: TokenizerStack, request: inference_pb2.CompleteRequest) -> Answer:
    return await stack.collect(stack.stub.Complete(request))


def test_a_direct_client_goes_on_behind_the_tokens_that_it_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            asked: dict[str, Any] = {
                "num_choices": 2,
                "stop_strings": ["never said", "lazy"],
                "sampling": {"seed": 5, "num_logprobs": 1},
                "return_token_ids": True,
            }
            whole = await text_of(stack, resumable(**asked))
            deltas = [event.delta for event in whole.events if event.HasField("delta") and event.delta.num_tokens]
            for cut in range(0, len(deltas), 5):
                skipped = {d.choice_index: d.first_token_index + d.num_tokens for d in deltas[:cut]}
                answer = await text_of(stack, resumable(**asked, num_skipped_tokens=skipped))
                for i in (0, 1):
                    had = "".join(d.text for d in deltas[:cut] if d.choice_index == i)
                    num_had = skipped.get(i, 0)
                    assert had + answer.texts.get(i, "") == whole.texts[i]
                    assert answer.token_ids.get(i, []) == whole.token_ids[i][num_had:]
                    assert answer.logprobs.get(i, []) == whole.logprobs[i][num_had:]
                assert answer.finished == whole.finished
                assert answer.usage == whole.usage
            first, *others = [submit for submit in stack.engine.submits if submit.choice_index == 0]
            assert all(submit.resumable and not submit.resume_token_ids for submit in others)
            assert all(submit.sampling == first.sampling and submit.stop == first.stop for submit in others)

    run(scenario())


def test_choices_whose_ends_were_told_count_by_their_numbers_and_are_not_made_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            asked: dict[str, Any] = {"num_choices": 2, "num_skipped_tokens": {0: 7, 1: 40}, "num_cached_tokens": {0: 3}}
            answer = await text_of(stack, resumable(**asked, finished_choices=[0]))
            assert set(answer.finished) == {1}
            assert answer.usage.num_generated_tokens == 7 + 40
            assert answer.usage.num_cached_tokens == 3
            assert [submit.choice_index for submit in stack.engine.submits] == [1]
            answer = await text_of(stack, resumable(**asked, finished_choices=[0, 1]))
            assert answer.kinds == ["accepted", "completed"]
            assert answer.usage.num_generated_tokens == 7 + 40
            asked["num_skipped_tokens"] = {0: 0, 1: 40}
            answer = await text_of(stack, resumable(**asked, finished_choices=[0, 1]))
            assert answer.kinds == ["accepted", "completed"], "not told again, whatever the number"

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"resumable": False}, "num_skipped_tokens"),
        ({"request_id": ""}, "request_id"),
        ({"sampling": {}}, "seed"),
        ({"num_skipped_tokens": {2: 1}}, "num_skipped_tokens"),
        ({"num_skipped_tokens": {0: NUM_TOKENS + 1}}, "num_skipped_tokens"),
        ({"num_skipped_tokens": {0: 300}, "max_tokens": 0}, "num_skipped_tokens"),
        ({"resume_token_ids": [inference_pb2.TokenIds(ids=[4])] * 2}, "num_skipped_tokens"),
        ({"finished_choices": [0]}, "finished_choices"),
        ({"finished_choices": [1, 2]}, "finished_choices"),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            request = resumable(**{"num_choices": 2, "num_skipped_tokens": {1: 3}, **changes})
            error = await stack.refusal(stack.stub.Complete(request))
            assert isinstance(error, InvalidArgument)
            assert error.field == field
            assert not stack.engine.submits

    run(scenario())


def test_a_client_that_leaves_its_gateway_detaches_its_request_and_cancels_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            await gateway.start(resumable(num_choices=2, max_tokens=200), resumable(request_id="x", resumable=False))
            await until(lambda: len(gateway.accepted) == 2)
            stack.engine.may_step.clear()
            await gateway.detach(1, 2)
            await until(lambda: is_idle(stack))
            await until(lambda: len(stack.engine.detached) == 2 and stack.engine.cancelled)
            assert sorted(stack.engine.detached) == ["r:0", "r:1"]
            assert stack.engine.cancelled == ["x:0"]
            assert not gateway.failed

    run(scenario())


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_lost_client_or_gateway_detaches_what_is_resumable(tmp_path: Path, is_direct: bool) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            if is_direct:
                call = stack.stub.Complete(resumable(max_tokens=200))
                await call.read()
                call.cancel()
            else:
                gateway = Gateway(stack)
                await gateway.open()
                await gateway.start(resumable(max_tokens=200))
                await until(lambda: stack.engine.num_living)
                gateway.call.cancel()
            await until(lambda: stack.engine.detached == ["r:0"])
            await until(lambda: is_idle(stack))
            assert not stack.engine.cancelled

    run(scenario())


def test_what_a_gateway_cancels_ends_also_if_it_was_resumable(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            await gateway.start(resumable(max_tokens=200))
            await until(lambda: gateway.accepted)
            await gateway.cancel(1)
            await until(lambda: stack.engine.cancelled == ["r:0"])

    run(scenario())


def test_a_client_that_is_back_before_it_was_missed_takes_its_request_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            old, new = Gateway(stack), Gateway(stack)
            for gateway in (old, new):
                await gateway.open()
                gateway.read()
            await old.start(resumable(num_choices=2, max_tokens=200))
            await until(lambda: old.texts)
            stack.engine.may_step.clear()
            await new.start(resumable(num_choices=2, max_tokens=200, num_skipped_tokens={0: 1, 1: 1}))
            await until(lambda: old.failed)
            assert old.failed[1].reason == "TAKEN_OVER"
            stack.engine.may_step.set()
            await until(lambda: new.completed)
            assert new.completed[1].num_generated_tokens == 400
            assert not stack.engine.cancelled
            assert not stack.engine.detached

    run(scenario())


def test_what_another_tokenizer_took_over_is_left_alone(tmp_path: Path) -> None:
    """Both choices are over there, or will be soon."""

    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            await gateway.start(resumable(num_choices=2, max_tokens=200))
            await until(lambda: gateway.texts)
            superseded = Cancelled("another session took the request over", reason="SUPERSEDED")
            stack.engine.displace(superseded, choice_index=0, as_finished=True)
            await until(lambda: gateway.failed)
            await until(lambda: stack.engine.detached == ["r:1"])
            assert not stack.engine.cancelled

    run(scenario())


def test_an_operators_abort_of_one_choice_cancels_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            call = asyncio.create_task(stack.refusal(stack.stub.Complete(resumable(num_choices=2, max_tokens=200))))
            await until(lambda: stack.engine.num_living == 2)
            reason = engine_pb2.ENGINE_FINISH_REASON_ABORTED
            handle = stack.engine.submits[0].handle
            stack.engine.tell(
                engine_pb2.EngineServiceSessionResponse(finished=[engine_pb2.Finished(handle=handle, reason=reason)])
            )
            assert isinstance(await call, Cancelled)
            await until(lambda: stack.engine.cancelled)
            assert not stack.engine.detached

    run(scenario())


def test_the_engine_may_die_while_tokens_are_skipped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            whole = await text_of(stack, resumable(max_tokens=200))
            call = asyncio.create_task(text_of(stack, resumable(max_tokens=200, num_skipped_tokens={0: 150})))
            await until(lambda: stack.engine.num_living)
            await asyncio.sleep(0.03)
            await stack.kill_engine()
            await stack.revive_engine()
            answer = await call
            assert whole.texts[0].endswith(answer.texts[0])
            assert answer.events[1].delta.first_token_index == 150
            assert stack.engine.submits[0].resume_token_ids

    run(scenario())


def test_a_long_answer_that_comes_at_once_is_told_in_parts_and_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, engine={"max_model_len": 4000}) as stack:
            stack.engine.tokens_per_step = 3000
            asked: dict[str, Any] = {"max_tokens": 3000, "sampling": {"seed": 1, "num_logprobs": 2}}
            answer = await text_of(stack, resumable(**asked, return_token_ids=True, num_skipped_tokens={0: 500}))
            assert answer.token_ids[0] == stack.told(PROMPT, 3000)[500:]
            assert len(answer.logprobs[0]) == 2500
            assert max(len(event.delta.logprobs) for event in answer.events) * 3 <= 512

    run(scenario())
