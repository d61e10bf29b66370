"""The tokenizer stage when its scheduler dies and comes back: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.service.tokenizer_stack import (
    Answer,
    TokenizerStack,
    chat_request,
    complete_request,
    run,
    tokenizer_on,
    until,
)
from tests.unit.tokenizer.loop_lag import LIMIT_S, largest_lag_s, median_lag_s
from tokenloom.api.v1 import engine_pb2, inference_pb2
from tokenloom.common.errors import InvalidArgument, Unavailable
from tokenloom.tokenizer.domain import CompleteInput, GenerationRequest, Options, StopConditions
from tokenloom.tokenizer.events import Event


class ListSink:
    """Keeps the events of a request."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def put(self, event: Event) -> None:
        self._events.append(event)


async def step(stack: TokenizerStack, answer: Answer, num_tokens: int) -> None:
    """Let the engine step until the reader has so many tokens of choice 0, then hold it."""
    stack.engine.may_step.set()
    await until(lambda: answer.num_tokens.get(0, 0) >= num_tokens)
    stack.engine.may_step.clear()


@pytest.mark.parametrize("num_kills", [1, 3])
def test_a_killed_engine_costs_no_token_and_repeats_none(tmp_path: Path, num_kills: int) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()
            answer = Answer()
            options: dict[str, Any] = {
                "num_choices": 2,
                "max_tokens": 90,
                "return_token_ids": True,
                "sampling": {"num_logprobs": 1, "seed": 5},
                "request_id": "r",
            }
            task = asyncio.create_task(stack.complete([5] * 4, answer=answer, **options))
            await until(lambda: stack.engine.num_living == 2)
            before = {submit.request_id: submit for submit in stack.engine.submits}
            for kill in range(num_kills):
                await step(stack, answer, 10 * (kill + 1))
                await stack.kill_engine()
                await stack.revive_engine()
                await until(lambda: stack.engine.num_living == 2)
                for again in stack.engine.submits:
                    first = before[again.request_id]
                    assert again.sampling == first.sampling
                    assert again.prompt_token_ids == first.prompt_token_ids
                    assert again.stop == first.stop
                    assert again.HasField("age_ms")
                    assert list(again.resume_token_ids) == stack.told([5] * 4, len(again.resume_token_ids))
                    assert len(again.resume_token_ids) >= 10 * (kill + 1)
            stack.engine.may_step.set()
            await task
            told = stack.told([5] * 4, 90)
            for choice in (0, 1):
                assert answer.token_ids[choice] == told
                assert answer.texts[choice] == stack.decode(told)
                assert [entry.token.token_id for entry in answer.logprobs[choice]] == told
            assert answer.kinds.count("accepted") == 1
            assert answer.usage.num_generated_tokens == 180

    run(scenario())


def test_a_stop_string_over_the_place_of_the_loss_is_still_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            told = stack.told([5] * 4, 60)
            whole = stack.decode(told)
            stop = whole[30:42]
            place = next(i for i in range(60) if len(stack.decode(told[:i])) >= 36)
            stack.engine.may_step.clear()
            submitted = asyncio.create_task(stack.complete([5] * 4, max_tokens=60, stop_strings=[stop]))
            await until(lambda: stack.engine.num_living == 1)
            stack.engine.may_step.set()
            (entry,) = stack.stage._engine._living.values()
            await until(lambda: len(entry.listener.token_ids) >= place)
            await stack.kill_engine()
            await stack.revive_engine()
            answer = await submitted
            assert answer.texts[0] == whole[: whole.find(stop)]
            assert answer.finished[0].stop_string == stop

    run(scenario())


def test_a_choice_whose_end_was_lost_is_ended_without_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()
            task = asyncio.create_task(stack.complete([5] * 4, max_tokens=3, sampling={"seed": 1}))
            await until(lambda: stack.engine.submits)
            ids = stack.told([5] * 4, 3)
            outputs = engine_pb2.StepOutputs(handles=[1], first_token_indexes=[0], num_tokens=[3], token_ids=ids)
            (session,) = stack.engine._sessions
            session.news.put_nowait(engine_pb2.EngineServiceSessionResponse(outputs=outputs))
            (entry,) = stack.stage._engine._living.values()
            await until(lambda: len(entry.listener.token_ids) == 3)
            await stack.kill_engine()
            await stack.revive_engine()
            answer = await task
            assert answer.texts[0] == stack.decode(ids)
            assert answer.finished[0].reason == inference_pb2.FINISH_REASON_LENGTH
            assert stack.engine.submits == []

    run(scenario())


def test_a_request_that_comes_while_the_engine_is_away_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            await stack.kill_engine()
            await until(lambda: not stack.stage._engine.is_up)
            waiting = asyncio.create_task(stack.complete([5] * 4))
            gone = stack.stub.Complete(complete_request([6] * 4))
            await until(lambda: stack.stage._generation.num_active == 2)
            gone.cancel()
            await until(lambda: stack.stage._generation.num_active == 1)
            await stack.revive_engine()
            assert (await waiting).texts[0] == stack.decode(stack.told([5] * 4, 20))
            (submit,) = stack.engine.submits
            assert not submit.HasField("age_ms")

    run(scenario())


def test_an_engine_that_stays_away_fails_requests_after_the_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, takeover_limit_s=0.3) as stack:
            stack.engine.may_step.clear()
            call = stack.stub.Complete(complete_request([5] * 4))
            await until(lambda: stack.engine.num_living == 1)
            await stack.kill_engine()
            error = await stack.refusal(call)
            assert isinstance(error, Unavailable)
            assert error.retry_after_s is not None
            assert isinstance(await stack.refusal(stack.stub.Chat(chat_request())), Unavailable)
            await stack.revive_engine()
            await until(lambda: stack.stage._engine.is_up)
            assert (await stack.complete([5] * 4)).usage.num_generated_tokens == 20

    run(scenario())


def test_what_the_engine_sends_again_is_cut_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()
            answer = Answer()
            task = asyncio.create_task(stack.complete([5] * 4, answer=answer, return_token_ids=True))
            await until(lambda: stack.engine.num_living == 1)
            told = stack.told([5] * 4, 20)
            (session,) = stack.engine._sessions
            for first, end in ((0, 5), (3, 9), (0, 9)):
                ids = told[first:end]
                outputs = engine_pb2.StepOutputs(
                    handles=[1], first_token_indexes=[first], num_tokens=[len(ids)], token_ids=ids
                )
                session.news.put_nowait(engine_pb2.EngineServiceSessionResponse(outputs=outputs))
            session.choices[1].outputs = told[:9]
            stack.engine.may_step.set()
            await task
            assert answer.token_ids[0] == told

    run(scenario())


def test_a_client_resumes_from_the_ids_it_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            told = stack.told([5] * 4, 20)
            for num_known in (0, 1, 9, 20):
                known = inference_pb2.TokenIds(ids=told[:num_known])
                answer = await stack.complete(
                    [5] * 4, resume_token_ids=[known], return_token_ids=True, sampling={"seed": 5}
                )
                assert answer.token_ids.get(0, []) == told[num_known:]
                assert answer.usage.num_generated_tokens == 20
                assert stack.decode(told).endswith(answer.texts.get(0, ""))
            assert [len(submit.resume_token_ids) for submit in stack.engine.submits] == [0, 1, 9]
            assert not any(submit.HasField("age_ms") for submit in stack.engine.submits), "the engine's bounds hold"

    run(scenario())


@pytest.mark.parametrize("ids", [[40] * 21, [40] * 100_000, [600]])
def test_a_client_cannot_resume_from_more_than_it_asks_for_or_from_no_tokens(tmp_path: Path, ids: list[int]) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            known = inference_pb2.TokenIds(ids=ids)
            request = complete_request([5] * 4, max_tokens=20, resume_token_ids=[known])
            error = await stack.refusal(stack.stub.Complete(request))
            assert isinstance(error, InvalidArgument)
            assert error.field == "resume_token_ids"
            request = complete_request([5] * 250, max_tokens=0, resume_token_ids=[inference_pb2.TokenIds(ids=[40] * 7)])
            assert isinstance(await stack.refusal(stack.stub.Complete(request)), InvalidArgument)

    run(scenario())


def test_a_long_resumption_does_not_hold_the_loop_up(tmp_path: Path) -> None:
    async def scenario() -> float:
        async with tokenizer_on(tmp_path, engine={"max_model_len": 20_000}) as stack:
            options = Options(
                stop=StopConditions(max_tokens=19_000),
                stop_strings=tuple(f"e{i} never said" for i in range(16)),
                resume_token_ids=(stack.story * (19_000 // len(stack.story)),),
            )
            events: list[Event] = []
            request = GenerationRequest(CompleteInput(([5],)), options)
            work = asyncio.create_task(stack.stage._generation.run(request, ListSink(events)))
            seen = asyncio.create_task(until(lambda: stack.engine.submits))
            lag_s = await largest_lag_s(seen)
            assert len(stack.engine.submits[0].resume_token_ids) > 18_000
            work.cancel()
            return lag_s

    assert median_lag_s(scenario) < LIMIT_S


def test_an_engine_with_another_model_is_not_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, has_engine=False) as stack:
            stack.engine.welcome.model_id = "another"
            await stack.engine.start()
            await until(lambda: len(stack.engine.hellos) >= 3)
            assert not stack.stage._engine.is_up
            assert stack.engine.hellos[0].model_id == "tiny"
            assert stack.engine.hellos[0].tokenizer_fingerprint
            assert isinstance(await stack.refusal(stack.stub.Chat(chat_request())), Unavailable)

    run(scenario())
