from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tokenloom.gateway.http_errors import HttpError, from_validation
from tokenloom.gateway.openai_types import ChatBody, CompletionBody

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [USER], **fields})


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "hi", **fields})


def refusal_of(body: type[ChatBody] | type[CompletionBody], fields: dict[str, Any]) -> HttpError:
    base: dict[str, Any] = {"messages": [USER]} if body is ChatBody else {"prompt": "hi"}
    with pytest.raises(ValidationError) as caught:
        body.model_validate({**base, **fields})
    return from_validation(caught.value.errors())


def test_null_means_absent_for_every_optional_field() -> None:
    nulls = {name: None for name in ChatBody.model_fields if name != "messages"}
    assert chat(**nulls) == chat()
    nulls = {name: None for name in CompletionBody.model_fields if name != "prompt"}
    assert completion(**nulls) == completion()


@pytest.mark.parametrize("n", [0, -1, 129, 10**6, 10**18, 1e20, "2", 1.5, True])
def test_n_outside_1_to_128_or_of_another_type_is_refused(n: object) -> None:
    for body in (ChatBody, CompletionBody):
        error = refusal_of(body, {"n": n})
        assert (error.status, error.param) == (400, "n")


def test_n_null_is_one_choice_and_128_is_taken() -> None:
    assert chat(n=None).num_choices == 1
    assert chat(n=128).num_choices == 128


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.0001}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": float("inf")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 2**32}, "max_completion_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(token_id): 1 for token_id in range(1025)}}, "logit_bias"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"timeout": 0}, "timeout"),
        ({"priority": -1}, "priority"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field_named(fields: dict[str, Any], param: str) -> None:
    error = refusal_of(ChatBody, fields)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [USER] * 4097}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_wrong_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal_of(ChatBody, fields).param == param


def test_an_image_part_is_refused_by_naming_the_part() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "http://x"}}]
    error = refusal_of(ChatBody, {"messages": [{"role": "user", "content": parts}]})
    assert error.param == "messages[0].content[1].type"
    assert "image_url" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[5], ["a"]]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": [[1] * 2**19, [1] * 2**19, [1]]}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_wrong_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal_of(CompletionBody, fields).param == param


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**63])
def test_an_impossible_token_id_is_named_in_the_message(token_id: int) -> None:
    assert str(token_id) in refusal_of(CompletionBody, {"prompt": [[1, token_id]]}).message


def test_a_missing_prompt_is_a_missing_parameter() -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({})
    assert from_validation(caught.value.errors()).code == "missing_required_parameter"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([0], [[0]]),
    ],
)
def test_all_four_forms_of_a_prompt_are_read(prompt: object, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == prompts


def test_zeros_are_values_and_not_absence() -> None:
    body = chat(temperature=0, top_p=0, top_k=0, seed=0, presence_penalty=0, logprobs=True, top_logprobs=0)
    assert (body.temperature, body.top_p, body.top_k, body.seed) == (0, 0, 0, 0)
    assert body.num_logprobs == 0


def test_unknown_fields_are_ignored() -> None:
    assert chat(chat_template="{{ x }}", store=True, metadata={"a": "b"}) == chat()


def test_parts_are_joined_with_a_newline_and_no_parts_are_an_empty_text() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    body = chat(messages=[{"role": "user", "content": parts}, {"role": "user", "content": []}])
    assert [message.text for message in body.messages] == ["A\nB", ""]


def test_an_assistant_turn_may_have_no_content() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert chat(messages=history).messages[1].text is None


def test_the_newer_name_of_the_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_generated_tokens == 7
    assert chat(max_tokens=5).max_generated_tokens == 5
    assert chat().max_generated_tokens is None


def test_tools_are_taken_when_the_model_may_not_call_them() -> None:
    assert chat(tools=[{"type": "function"}], tool_choice="none").tools
    assert chat(tools=[]).tools == []
    assert chat(response_format={"type": "text"}).response_format is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [1] * 4000},
        {"messages": [{"role": "user", "content": [1] * 1000}] * 8},
        {"messages": [{"role": "assistant", "tool_calls": [1] * 8000}]},
        {"tools": [1] * 1000},
        {"stop": [1] * 16},
        {"stop_token_ids": ["x"] * 1000},
    ],
)
def test_a_list_of_faults_costs_no_more_than_its_first(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        chat(**fields)
    assert caught.value.error_count() == 1


def test_content_parts_and_tool_calls_are_bounded_together_before_they_are_looked_at() -> None:
    part = {"type": "text", "text": "x"}
    assert len(chat(messages=[{"role": "user", "content": [part] * 1024}] * 8).messages) == 8
    too_many = [{"role": "user", "content": [1] * 4096}, {"role": "assistant", "tool_calls": [1] * 4097}]
    error = refusal_of(ChatBody, {"messages": too_many})
    assert error.param == "messages"
    assert "8193" in error.message
