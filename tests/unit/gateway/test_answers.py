from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tokenloom.common.errors import Internal, Unavailable
from tokenloom.gateway.answers import DONE, AnswerHead, StreamAnswer, WholeAnswer
from tokenloom.gateway.formats import ChatFormat, CompletionFormat
from tokenloom.gateway.generation import Accepted, ChoiceUpdate, Finish, Logprob, Position, Update, Usage
from tokenloom.gateway.logprob_formats import prompt_logprobs

HEAD = AnswerHead("chatcmpl-1", 1_700_000_000)
ACCEPTED = Accepted("tiny", [[1, 2]])
USAGE = Usage(num_prompt_tokens=2, num_generated_tokens=3, num_cached_tokens=1)


def position(text: str, value: float = -1.0) -> Position:
    token = Logprob(7, text, text.encode(), value)
    return Position(token, [token])


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream, strictly framed, without its [DONE]."""
    blocks = data.removesuffix(DONE).decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [orjson.loads(block.removeprefix("data: ")) for block in blocks]


def stream(*updates: Update, includes_usage: bool = False) -> list[dict[str, Any]]:
    answer = StreamAnswer(HEAD, ChatFormat(), includes_usage)
    answer.begin(ACCEPTED)
    return events_of(b"".join(answer.render(update) for update in updates))


def test_a_stream_opens_each_choice_with_its_role_and_closes_it_once() -> None:
    updates = [
        Update(choices={0: ChoiceUpdate(text="a"), 1: ChoiceUpdate(text="x")}),
        Update(choices={0: ChoiceUpdate(text="b", finish=Finish("stop"))}),
        Update(choices={1: ChoiceUpdate(finish=Finish("length"))}, usage=USAGE),
    ]
    chunks = [ChatCompletionChunk.model_validate(event) for event in stream(*updates)]
    for index, text, reason in ((0, "ab", "stop"), (1, "x", "length")):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert "".join(choice.delta.content or "" for choice in choices) == text
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == [reason]
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {("chatcmpl-1", 1_700_000_000, "tiny")}


def test_usage_comes_only_when_asked_and_last() -> None:
    last = Update(choices={0: ChoiceUpdate(text="a", finish=Finish("stop"))}, usage=USAGE)
    assert all("usage" not in event and event["choices"] for event in stream(last))
    events = stream(last, includes_usage=True)
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 5


def test_done_ends_a_good_stream_and_only_a_good_one() -> None:
    answer = StreamAnswer(HEAD, ChatFormat(), False)
    answer.begin(ACCEPTED)
    assert answer.render(Update(usage=USAGE)) == DONE
    broken = answer.render(Update(error=Unavailable("gone", reason="SESSION_LOST")))
    assert events_of(broken) == [
        {
            "error": {
                "message": "gone",
                "type": "service_unavailable_error",
                "param": None,
                "code": "session_lost",
            }
        }
    ]
    assert DONE not in broken


def test_an_acceptance_alone_writes_nothing() -> None:
    answer = StreamAnswer(HEAD, ChatFormat(), False)
    answer.begin(ACCEPTED)
    assert answer.render(Update(accepted=ACCEPTED)) == b""


def test_line_breaks_in_text_do_not_break_the_framing() -> None:
    text = "a\n\nb\r\ndata: [DONE]\n\n\u2028"
    [_, event] = stream(Update(choices={0: ChoiceUpdate(text=text)}))
    assert event["choices"][0]["delta"]["content"] == text


def test_a_whole_answer_is_what_was_streamed() -> None:
    answer = WholeAnswer(HEAD, ChatFormat(has_logprobs=True, has_token_ids=True), 2)
    answer.add(Update(accepted=ACCEPTED, choices={1: ChoiceUpdate(text="x", token_ids=[4], finish=Finish("length"))}))
    answer.add(Update(choices={0: ChoiceUpdate(text="a", token_ids=[5], logprobs=[position("a")])}))
    answer.add(Update(choices={0: ChoiceUpdate(text="b", token_ids=[6], finish=Finish("stop", "END"))}, usage=USAGE))
    body = orjson.loads(answer.body(USAGE))
    parsed = ChatCompletion.model_validate(body)
    assert [choice.message.content for choice in parsed.choices] == ["ab", "x"]
    assert [choice.finish_reason for choice in parsed.choices] == ["stop", "length"]
    assert body["choices"][0]["stop_reason"] == "END"
    assert body["choices"][0]["token_ids"] == [5, 6]
    assert body["prompt_token_ids"] == [1, 2]
    assert parsed.choices[0].logprobs is not None
    assert parsed.choices[0].logprobs.content is not None
    assert parsed.choices[0].logprobs.content[0].bytes == [97]
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens_details is not None
    assert parsed.usage.prompt_tokens_details.cached_tokens == 1


def test_half_an_answer_is_never_sent_as_a_whole_one() -> None:
    answer = WholeAnswer(HEAD, ChatFormat(), 2)
    answer.add(Update(accepted=ACCEPTED, choices={0: ChoiceUpdate(text="a", finish=Finish("stop"))}, usage=USAGE))
    with pytest.raises(Internal, match="1 of 2"):
        answer.body(USAGE)


def test_echoed_logprobs_begin_with_the_first_prompt_token_without_a_logprob() -> None:
    answer = WholeAnswer(HEAD, CompletionFormat(has_logprobs=True, echo=True), 1)
    answer.add(Update(accepted=ACCEPTED, choices={0: ChoiceUpdate("one two", "one two")}))
    answer.add(Update(choices={0: ChoiceUpdate(prompt_logprobs=[position(" two")])}))
    generated = ChoiceUpdate(text=" three", logprobs=[position(" three", float("-inf"))], finish=Finish("length"))
    answer.add(Update(choices={0: generated}, usage=USAGE))
    logprobs = orjson.loads(answer.body(USAGE))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["one", " two", " three"]
    assert logprobs["token_logprobs"] == [None, -1.0, -9999.0]  # as OpenAI's API, though its types know no null
    assert logprobs["text_offset"] == [0, 3, 7]


def test_choices_of_one_prompt_share_its_logprobs() -> None:
    form = CompletionFormat(has_prompt_logprobs=True, num_choices=2)
    answer = WholeAnswer(HEAD, form, 4)
    for index in range(4):
        known = {0: [position("a")], 2: [position("b")]}.get(index, [])
        answer.add(
            Update(accepted=ACCEPTED, choices={index: ChoiceUpdate("x", prompt_logprobs=known, finish=Finish("stop"))})
        )
    choices = orjson.loads(answer.body(USAGE))["choices"]
    decoded = [choice["prompt_logprobs"][1]["7"]["decoded_token"] for choice in choices]
    assert decoded == ["a", "a", "b", "b"]


def test_offsets_of_completion_logprobs_run_on_over_a_streams_chunks() -> None:
    form = CompletionFormat(has_logprobs=True)
    first = form.chunk(0, ChoiceUpdate(text="ab", logprobs=[position("a"), position("b")]))
    second = form.chunk(0, ChoiceUpdate(text="c", logprobs=[position("c")]))
    other = form.chunk(1, ChoiceUpdate(text="d", logprobs=[position("d")]))
    assert first["logprobs"]["text_offset"] == [0, 1]
    assert second["logprobs"]["text_offset"] == [2]
    assert other["logprobs"]["text_offset"] == [0]


def test_the_prompts_ids_come_once_per_choice_of_a_completion() -> None:
    form = CompletionFormat(has_token_ids=True, num_choices=2)
    form.begin(Accepted("tiny", [[1], [2, 3]]))
    pieces = [form.chunk(index, ChoiceUpdate(token_ids=[9])) for index in (0, 1, 2, 3, 3)]
    assert [piece.get("prompt_token_ids") for piece in pieces] == [[1], [1], [2, 3], [2, 3], None]


def test_prompt_logprobs_have_vllms_form() -> None:
    first, second = Logprob(5, "a", b"a", -0.5), Logprob(6, "b", b"b", -2.0)
    assert prompt_logprobs([Position(second, [first])]) == [
        None,
        {
            "6": {"logprob": -2.0, "rank": None, "decoded_token": "b"},
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]
