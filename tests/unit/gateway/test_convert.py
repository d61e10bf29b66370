from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenloom.api.v1 import common_pb2, inference_pb2
from tokenloom.common.errors import NotFound, Unavailable, to_proto
from tokenloom.gateway.convert import CallContext, Start, chat_start, completion_start, deliver, resumed
from tokenloom.gateway.generation import Finish, Generation, Update
from tokenloom.gateway.openai_types import ChatBody, CompletionBody
from tokenloom.gateway.progress import Progress

CONTEXT = CallContext("chatcmpl-1", 99, b"digest", common_pb2.TraceContext(traceparent="00-a-b-01"))
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> inference_pb2.SessionStart:
    return chat_start(ChatBody.model_validate({"messages": [USER], **fields}), CONTEXT)


def test_absent_fields_stay_absent_on_the_wire() -> None:
    start = chat()
    sampling, options = start.chat.options.sampling, start.chat.options
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "num_logprobs", "num_prompt_logprobs"):
        assert not sampling.HasField(name), name
    assert not options.stop.HasField("max_tokens")
    assert not options.HasField("skip_special_tokens")
    assert not options.HasField("priority_class")
    assert not start.chat.HasField("add_generation_prompt")
    assert (sampling.seed, options.num_choices, options.request_id) == (99, 1, "chatcmpl-1")
    assert (start.key_digest, start.trace.traceparent) == (b"digest", "00-a-b-01")


def test_zeros_are_sent_as_zeros() -> None:
    sampling = chat(temperature=0, top_p=0, top_k=0, min_p=0, seed=0, logprobs=True).chat.options.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "num_logprobs"):
        assert sampling.HasField(name), name
        assert getattr(sampling, name) == 0


def test_every_option_reaches_its_field() -> None:
    options = chat(
        model="m",
        n=3,
        top_k=-1,
        seed=-1,
        stop="END",
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
        max_tokens=9,
        logit_bias={"7": -5},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        skip_special_tokens=False,
        cache_salt="s",
        priority=2,
        return_token_ids=True,
        prompt_logprobs=3,
    ).chat.options
    assert (options.model, options.num_choices, list(options.stop_strings)) == ("m", 3, ["END"])
    assert (options.include_stop_string, options.skip_special_tokens) == (True, False)
    assert (options.cache_salt, options.priority_class, options.return_token_ids) == ("s", 2, True)
    stop, sampling = options.stop, options.sampling
    assert (stop.max_tokens, stop.min_tokens, list(stop.stop_token_ids), stop.ignore_eos) == (9, 2, [4], True)
    assert (sampling.top_k, sampling.seed, dict(sampling.logit_bias)) == (0, 2**64 - 1, {7: -5.0})
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert sampling.num_prompt_logprobs == 3


def test_a_conversation_keeps_null_and_empty_content_apart() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"x":1}'}}
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    ]
    first, second, third = chat(messages=history).chat.messages
    assert (first.role, first.content) == ("developer", "A\nB")
    assert not second.HasField("content")
    assert (second.tool_calls[0].id, second.tool_calls[0].arguments_json) == ("c1", '{"x":1}')
    assert third.HasField("content")
    assert (third.content, third.tool_call_id) == ("", "c1")


def test_a_function_turn_is_sent_as_a_tool_turn() -> None:
    history = [USER, {"role": "function", "name": "f", "content": "42"}]
    sent = chat(messages=history).chat.messages[1]
    assert (sent.role, sent.name, sent.content) == ("tool", "f", "42")


def test_continuing_the_final_message_opens_no_new_turn() -> None:
    chat_request = chat(continue_final_message=True, chat_template_kwargs={"a": [1]}).chat
    assert chat_request.continue_final_message
    assert chat_request.HasField("add_generation_prompt")
    assert not chat_request.add_generation_prompt
    assert chat_request.template_kwargs_json == '{"a":[1]}'


def test_prompts_are_sent_as_text_or_as_ids() -> None:
    body = CompletionBody.model_validate({"prompt": [[1, 2], [3]], "echo": True, "logprobs": 2, "n": 2})
    complete = completion_start(body, CONTEXT).complete
    assert [list(prompt.token_ids.ids) for prompt in complete.prompts] == [[1, 2], [3]]
    assert complete.echo
    assert complete.options.sampling.num_prompt_logprobs == 2
    body = CompletionBody.model_validate({"prompt": "hi", "logprobs": 2})
    complete = completion_start(body, CONTEXT).complete
    assert complete.prompts[0].text == "hi"
    assert not complete.options.sampling.HasField("num_prompt_logprobs")


def test_a_frame_is_dealt_to_the_generations_it_names() -> None:
    frame = inference_pb2.SessionResponse(
        outputs=inference_pb2.TextOutputs(
            handles=[1, 2, 1, 9],
            choice_indexes=[0, 0, 1, 0],
            first_token_indexes=[0, 0, 0, 0],
            num_tokens=[1, 1, 1, 1],
            texts=["a", "b", "c", "gone"],
            extras=[inference_pb2.TextOutputExtra(handle=2, delta=inference_pb2.Delta(token_ids=[5]))],
        )
    )
    stop = inference_pb2.ChoiceFinished(choice_index=1, reason=inference_pb2.FINISH_REASON_STOP, stop_token_id=0)
    frame.choices_finished.add(handle=1, finished=stop)
    frame.completed.add(handle=1, usage=inference_pb2.Usage(num_prompt_tokens=3))
    frame.failed.add(handle=2, error=to_proto(NotFound("no", field="model")))
    frame.failed.add(handle=9, error=to_proto(NotFound("gone")))
    generations = {1: Generation("one", 1000), 2: Generation("two", 1000)}

    async def updates() -> list[Update]:
        assert await deliver(frame, generations.get, is_draining) == ([1, 2, 9], [])
        return [await generation.next_update() for generation in generations.values()]

    one, two = asyncio.run(updates())
    assert {index: choice.text for index, choice in one.choices.items()} == {0: "a", 1: "c"}
    assert one.choices[1].finish == Finish("stop", 0)
    assert one.usage is not None
    assert (two.choices[0].text, two.choices[0].token_ids) == ("b", [5])
    assert isinstance(two.error, NotFound)


def is_draining(failed: inference_pb2.SessionFailed) -> bool:
    return failed.error.reason == "DRAINING"


def logprobs_delta(num_positions: int, num_top: int) -> inference_pb2.Delta:
    entry = inference_pb2.TokenLogprob(token_id=1, text="x", utf8=b"x", logprob=-1.0)
    position = inference_pb2.TokenLogprobs(token=entry, top=[entry] * num_top)
    return inference_pb2.Delta(token_ids=range(num_positions), logprobs=[position] * num_positions)


def test_others_run_while_a_large_frame_is_dealt_and_nothing_of_it_is_lost() -> None:
    frame = inference_pb2.SessionResponse()
    for handle in range(1, 9):
        for column, value in (("handles", handle), ("choice_indexes", 0), ("first_token_indexes", 0)):
            getattr(frame.outputs, column).append(value)
        frame.outputs.num_tokens.append(256)
        frame.outputs.texts.append("x" * 256)
        frame.outputs.extras.add(handle=handle, delta=logprobs_delta(256, 20))
    generations = {handle: Generation(str(handle), 1 << 30) for handle in range(1, 9)}
    max_step = 0

    async def watch() -> None:
        nonlocal max_step
        last = 0
        while True:
            now = sum(generation._update.num_entries for generation in generations.values())
            max_step, last = max(max_step, now - last), now
            await asyncio.sleep(0)

    async def run() -> list[Update]:
        watcher = asyncio.create_task(watch())
        await deliver(frame, generations.get, is_draining)
        watcher.cancel()
        return [await generation.next_update() for generation in generations.values()]

    updates = asyncio.run(run())
    assert 0 < max_step <= 1600
    for update in updates:
        assert update.choices[0].token_ids == list(range(256))
        assert (len(update.choices[0].logprobs), len(update.choices[0].logprobs[255].top)) == (256, 20)


@pytest.mark.parametrize(("num_rows", "num_tokens", "num_top"), [(400, 1, 5), (12, 170, 2), (12, 400, 0)])
def test_a_row_and_its_small_details_come_in_one_turn(num_rows: int, num_tokens: int, num_top: int) -> None:
    frame = inference_pb2.SessionResponse()
    for number in range(num_rows):
        frame.outputs.handles.append(1)
        frame.outputs.choice_indexes.append(0)
        frame.outputs.first_token_indexes.append(number * num_tokens)
        frame.outputs.num_tokens.append(num_tokens)
        frame.outputs.texts.append("x" * num_tokens)
        delta = logprobs_delta(num_tokens, num_top)
        delta.first_token_index = number * num_tokens
        frame.outputs.extras.add(handle=1, delta=delta)
    generation = Generation("r", 1 << 30)
    taken: list[Update] = []

    async def read() -> None:
        while True:
            taken.append(await generation.next_update())

    async def run() -> None:
        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        await deliver(frame, {1: generation}.get, is_draining)
        await asyncio.sleep(0)
        reader.cancel()

    asyncio.run(run())
    assert len(taken) > 1
    assert all(len(update.choices[0].text) == len(update.choices[0].logprobs) for update in taken)
    assert sum(len(update.choices[0].text) for update in taken) == num_rows * num_tokens


def progress_of(*choices: list[int], prompts: tuple[list[int], ...] = ()) -> Progress:
    """A request that was accepted with `prompts`, and the ids of its choices."""
    accepted = inference_pb2.Accepted(
        prompts=[inference_pb2.TokenIds(ids=ids) for ids in prompts],
        sampling=common_pb2.SamplingParams(temperature=0.5, seed=99),
        stop=common_pb2.StopConditions(max_tokens=77),
    )
    progress = Progress(accepted.SerializeToString())
    for index, ids in enumerate(choices):
        if ids:
            progress.choice(index).take_tokens(len(ids), ids)
    return progress


def completion(**fields: Any) -> Start:
    return completion_start(CompletionBody.model_validate(fields), CONTEXT)


def test_a_request_that_was_not_accepted_is_sent_again_as_it_was() -> None:
    start = chat()
    assert resumed(start, Progress()) is start


def test_a_conversation_goes_on_with_ids_instead_of_messages_and_as_it_was_accepted() -> None:
    start = chat(n=3, stop=["END"], top_p=0.9, priority=2, cache_salt="s")
    progress = progress_of([5, 6], [], [7], prompts=([1, 2, 3],))
    progress.choice(2).take_finish()
    progress.choice(0).num_cached_tokens = 0
    for again in (resumed(start, progress), resumed(resumed(start, progress), progress)):
        assert (again.key_digest, again.trace) == (start.key_digest, start.trace)
        assert not again.chat.messages
        assert again.chat.prompt_token_ids.ids == [1, 2, 3]
        options = again.chat.options
        assert [list(choice.ids) for choice in options.resume_token_ids] == [[5, 6], [], [7]]
        assert list(options.finished_choices) == [2]
        assert dict(options.num_cached_tokens) == {0: 0}
        assert (options.sampling.temperature, options.sampling.seed, options.stop.max_tokens) == (0.5, 99, 77)
        assert (list(options.stop_strings), options.priority_class, options.cache_salt) == (["END"], 2, "s")
        assert options.num_choices == 3


def test_behind_tokens_that_only_the_client_has_it_goes_on_by_numbers() -> None:
    start = chat(n=3, resumable=True, stream=True)
    progress = progress_of([5, 6], [], [7], prompts=([1, 2, 3],))
    progress.choice(0).num_tokens += 4
    progress.choice(2).take_finish()
    options = resumed(resumed(start, progress), progress).chat.options
    assert not options.resume_token_ids
    assert dict(options.num_skipped_tokens) == {0: 6, 1: 0, 2: 1}
    assert list(options.finished_choices) == [2]


def test_prompts_go_on_as_ids_unless_their_text_is_still_to_be_echoed() -> None:
    prompts = {"prompt": ["a b", "c"]}
    told = ([1, 2], [3])
    assert [p.token_ids.ids for p in resumed(completion(**prompts), progress_of(prompts=told)).complete.prompts] == [
        [1, 2],
        [3],
    ]
    start, progress = completion(**prompts, echo=True), progress_of([5], prompts=told)
    progress.choice(0).take_text_of_no_token("a b")
    assert [prompt.text for prompt in resumed(start, progress).complete.prompts] == ["a b", "c"]
    start, progress = completion(**prompts, echo=True), progress_of(prompts=told)
    for index in (0, 1):
        progress.choice(index).take_text_of_no_token("echo")
    again = resumed(start, progress).complete
    assert [list(prompt.token_ids.ids) for prompt in again.prompts] == [[1, 2], [3]]
    assert again.echo
    given = completion(prompt=[[8, 9]])
    assert resumed(given, progress_of([5])).complete.prompts[0].token_ids.ids == [8, 9]


def test_a_tokenizer_that_stops_gives_requests_back_instead_of_ending_them() -> None:
    frame = inference_pb2.SessionResponse()
    frame.failed.add(handle=1, error=to_proto(Unavailable("it stops", reason="DRAINING")))
    frame.failed.add(handle=2, error=to_proto(Unavailable("no engine", reason="ENGINE_UNAVAILABLE")))
    generations = {1: Generation("one", 1000), 2: Generation("two", 1000)}
    assert asyncio.run(deliver(frame, generations.get, is_draining)) == ([2], [1])
    assert [generation.is_over for generation in generations.values()] == [False, True]
