"""What a gateway or a client needs to go on with a request elsewhere, and what the tokenizer makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.service.tokenizer_stack import (
    Gateway,
    TokenizerStack,
    chat_request,
    complete_request,
    run,
    tokenizer_on,
    until,
)
from tokenloom.api.v1 import inference_pb2
from tokenloom.common.errors import InvalidArgument

PROMPT = [5] * 4


def id_lists(*lists: list[int]) -> list[inference_pb2.TokenIds]:
    return [inference_pb2.TokenIds(ids=ids) for ids in lists]


def test_a_session_that_wants_ids_is_told_those_of_all_rows_and_of_prompts_that_were_text(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            gateway = Gateway(stack)
            await gateway.open(wants_ids=True)
            gateway.read()
            await gateway.start(
                chat_request("hi", num_choices=2),
                complete_request(PROMPT),
                complete_request("and so", "it goes"),
                complete_request(PROMPT, return_token_ids=True, sampling={"num_logprobs": 1}),
            )
            await until(lambda: len(gateway.completed) == 4)
            assert [len(ids) for ids in gateway.token_ids.values()] == [20] * 6
            assert gateway.token_ids[2, 0] == gateway.token_ids[4, 0] == stack.told(PROMPT, 20)
            sent = {submit.request_id: list(submit.prompt_token_ids) for submit in stack.engine.submits}
            for handle, num_prompts in ((1, 1), (2, 0), (3, 2), (4, 1)):
                accepted = gateway.accepted[handle]
                assert [sent[f"{accepted.request_id}:{i}"] for i in range(num_prompts)] == [
                    list(prompt.ids) for prompt in accepted.prompts
                ]
            assert [delta.num_cached_tokens for delta in gateway.extras[1]] == [0, 0], "once for each choice"
            assert not gateway.extras[2][0].token_ids, "only its columns have them"
            assert [i for delta in gateway.extras[4] for i in delta.token_ids] == stack.told(PROMPT, 20)

    run(scenario())


async def accepted_by(stack: TokenizerStack, request: Any) -> inference_pb2.Accepted:
    """What a call was accepted as."""
    call = stack.stub.Chat(request) if isinstance(request, inference_pb2.ChatRequest) else stack.stub.Complete(request)
    return (await stack.collect(call)).accepted


def test_a_conversation_is_sent_again_as_the_ids_it_was_rendered_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            accepted = await accepted_by(stack, chat_request("hi", max_tokens=0, stop={"min_tokens": 250}))
            options = inference_pb2.GenerationOptions(
                request_id=accepted.request_id, sampling=accepted.sampling, stop=accepted.stop
            )
            again = inference_pb2.ChatRequest(prompt_token_ids=accepted.prompts[0], options=options)
            again.messages.add(role="nobody", content="not looked at")
            accepted_again = await accepted_by(stack, again)
            accepted_again.created_s = accepted.created_s  # the first sender's counts
            assert accepted_again == accepted
            first, second = stack.engine.submits
            for name in ("request_id", "prompt_token_ids", "sampling", "stop"):
                assert getattr(first, name) == getattr(second, name)
            assert accepted.stop.min_tokens == accepted.stop.max_tokens < 250, "cut to what is left, both of them"
            again.prompt_token_ids.ids.append(600)
            assert (await stack.refusal(stack.stub.Chat(again))).field == "prompt_token_ids"

    run(scenario())


def test_choices_that_had_ended_are_not_made_again_and_count_in_the_usage(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            told = stack.told(PROMPT, 20)
            options: dict[str, Any] = {"num_choices": 3, "return_token_ids": True, "sampling": {"seed": 5}}
            had = id_lists(told[:7], told[:3], told)  # the first one had ended by a stop string, say
            cached = {0: 3, 2: 1}
            request = complete_request(
                PROMPT, resume_token_ids=had, finished_choices=[0, 2], num_cached_tokens=cached, **options
            )
            answer = await stack.collect(stack.stub.Complete(request))
            assert answer.token_ids == {1: told[3:]}
            assert set(answer.finished) == {1}
            assert answer.usage == inference_pb2.Usage(
                num_prompt_tokens=4, num_generated_tokens=7 + 20 + 20, num_cached_tokens=3
            )
            assert [submit.choice_index for submit in stack.engine.submits] == [1]

            request.options.finished_choices[:] = [0, 1, 2]
            answer = await stack.collect(stack.stub.Complete(request))
            assert answer.kinds == ["accepted", "completed"]
            assert answer.usage.num_generated_tokens == 7 + 3 + 20
            assert len(stack.engine.submits) == 1

    run(scenario())


@pytest.mark.parametrize(("had", "finished"), [([[40], [41]], [2]), ([], [0])])
def test_only_choices_that_there_are_and_whose_ids_are_known_can_have_ended(
    tmp_path: Path, had: list[list[int]], finished: list[int]
) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            request = complete_request(
                PROMPT, num_choices=2, resume_token_ids=id_lists(*had), finished_choices=finished
            )
            error = await stack.refusal(stack.stub.Complete(request))
            assert isinstance(error, InvalidArgument)
            assert error.field == "finished_choices"

    run(scenario())


def test_what_stands_before_the_first_token_comes_again_only_to_a_choice_without_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            options: dict[str, Any] = {"sampling": {"num_prompt_logprobs": 1}, "max_tokens": 5, "echo": True}
            told = stack.told(PROMPT, 2)
            had = id_lists(told, [], [])
            answer = await stack.complete(PROMPT, PROMPT, [6] * 3, resume_token_ids=had, **options)
            prompt = [submit.sampling.HasField("num_prompt_logprobs") for submit in stack.engine.submits]
            assert prompt == [False, True, True]
            assert {i: len(found) for i, found in answer.prompt_logprobs.items() if found} == {1: 3, 2: 2}
            deltas = [event.delta for event in answer.events]
            assert [delta.choice_index for delta in deltas if delta.text and not delta.num_tokens] == [1, 2]

    run(scenario())


def test_text_that_only_an_end_sets_free_is_told_as_that_of_no_token_also_to_who_has_all_tokens(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            told = stack.told(PROMPT, 20)
            last = stack.decode(told)[-3:]
            options: dict[str, Any] = {"stop_strings": [last + "never said"], "sampling": {"seed": 5}}
            for num_known in (0, 10, 20):
                answer = await stack.complete(PROMPT, resume_token_ids=id_lists(told[:num_known]), **options)
                *deltas, tail = [event.delta for event in answer.events if event.HasField("delta")]
                assert (tail.text, tail.num_tokens) == (last, 0)
                assert sum(delta.num_tokens for delta in deltas) == 20 - num_known
                assert all(delta.num_tokens for delta in deltas)

    run(scenario())


def test_a_client_that_leaves_before_its_request_reached_the_engine_again_ends_what_that_still_has(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, engine={"max_model_len": 20_000}) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            gateway.read()
            had = id_lists(*[(stack.story * 1000)[:18_000]] * 2)  # takes a while to be read
            request = complete_request(PROMPT, num_choices=2, max_tokens=19_000, resume_token_ids=had, request_id="r")
            await gateway.start(request, age_ms=1)
            await until(lambda: stack.stage._generation.num_active)
            await gateway.cancel(1)
            await until(lambda: sorted(stack.engine.cancelled) == ["r:0", "r:1"])
            assert not stack.engine.submits
            assert set(stack.engine.attached.values()) == {"r:0", "r:1"}

    run(scenario())


def test_a_gateway_that_is_lost_ends_nothing_that_another_tokenizer_may_go_on_with(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, engine={"max_model_len": 20_000}) as stack:
            gateway = Gateway(stack)
            await gateway.open()
            had = id_lists((stack.story * 1000)[:18_000])
            await gateway.start(complete_request(PROMPT, max_tokens=19_000, resume_token_ids=had), age_ms=1)
            await until(lambda: stack.stage._generation.num_active)
            gateway.call.cancel()
            await until(lambda: not stack.stage._generation.num_active)
            assert not stack.engine.attached
            assert not stack.engine.cancelled

    run(scenario())
