from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from tokenloom.common.errors import InvalidArgument, NotFound
from tokenloom.tokenizer.domain import (
    ChatInput,
    ChatMessage,
    CompleteInput,
    EngineInfo,
    GenerationRequest,
    Options,
    SamplingParams,
    StopConditions,
)
from tokenloom.tokenizer.validation import (
    MAX_PROMPT_IDS,
    check_num_prompt_ids,
    check_prompt,
    check_request,
    check_resumed_ids,
    check_token_ids,
    checked_ids,
    encodable,
)

ENGINE = EngineInfo("e", "m", 512, 100, 20, frozenset({2}), SamplingParams())
NAN = float("nan")


def check(**options: Any) -> None:
    check_request(GenerationRequest(CompleteInput(("x",)), Options(**options)), ENGINE, "m")


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0.0, 2.0], [-0.1, 2.01, NAN]),
        ("top_p", [0.0, 1.0], [-0.1, 1.0001, NAN]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, NAN]),
        ("presence_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1, NAN]),
        ("repetition_penalty", [0.01, 2.0], [0.0, -1.0, NAN, float("inf")]),
        ("top_k", [0, 1, 1 << 31], []),
        ("seed", [0, (1 << 64) - 1], []),
    ],
)
def test_sampling_ranges_hold_at_their_ends(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check(sampling=SamplingParams(**{field: value}))
    for value in bad:
        with pytest.raises(InvalidArgument) as caught:
            check(sampling=SamplingParams(**{field: value}))
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_choices": 0}, "n"),
        ({"num_choices": 129}, "n"),
        ({"stop": StopConditions(max_tokens=0)}, "max_tokens"),
        ({"stop": StopConditions(max_tokens=3, min_tokens=4)}, "min_tokens"),
        ({"stop": StopConditions(stop_token_ids=(1, 512))}, "stop_token_ids"),
        ({"stop_strings": ("a",) * 17}, "stop"),
        ({"stop_strings": ("a", "")}, "stop"),
        ({"stop_strings": ("a" * 1025,)}, "stop"),
        ({"has_grammar": True}, "response_format"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"resume_token_ids": ((1,), (2,))}, "resume_token_ids"),
        ({"sampling": SamplingParams(num_logprobs=21)}, "logprobs"),
        ({"sampling": SamplingParams(num_prompt_logprobs=21)}, "prompt_logprobs"),
        ({"sampling": SamplingParams(logit_bias={512: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(logit_bias={5: -100.5})}, "logit_bias.5"),
        ({"sampling": SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))}, "logit_bias"),
    ],
)
def test_what_is_out_of_bounds_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(**options)
    assert caught.value.field == field
    assert caught.value.message


def test_limits_themselves_are_accepted() -> None:
    check(
        num_choices=128,
        stop=StopConditions(max_tokens=1, min_tokens=1, stop_token_ids=(0, 511)),
        stop_strings=("a" * 1024,) * 16,
        sampling=SamplingParams(num_logprobs=20, logit_bias={0: -100.0, 511: 100.0}),
    )


def test_logprobs_of_a_chat_are_named_as_there() -> None:
    chat = ChatInput((ChatMessage("user", "x"),))
    options = Options(sampling=SamplingParams(num_logprobs=3))
    with pytest.raises(InvalidArgument) as caught:
        check_request(GenerationRequest(chat, options), dataclasses.replace(ENGINE, max_num_logprobs=2), "m")
    assert caught.value.field == "top_logprobs"


def test_another_model_is_not_found_and_none_is_this_one() -> None:
    check(model="")
    check(model="m")
    with pytest.raises(NotFound, match="'other'"):
        check(model="other")


@pytest.mark.parametrize("prompts", [(), ("x",) * 1025])
def test_the_number_of_prompts_is_bounded(prompts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_request(GenerationRequest(CompleteInput(prompts), Options()), ENGINE, "m")
    assert caught.value.field == "prompt"


def test_an_id_outside_the_vocabulary_is_named() -> None:
    check_token_ids((0, 511), ENGINE, "prompt")
    with pytest.raises(InvalidArgument, match=r"id 512 .* 512"):
        check_token_ids((3, 512), ENGINE, "prompt")


def test_a_prompt_needs_a_token_and_room_for_one_more() -> None:
    check_prompt(range(99), ENGINE, "prompt")
    with pytest.raises(InvalidArgument, match=r"100 tokens.*context of 100"):
        check_prompt(range(100), ENGINE, "prompt")
    with pytest.raises(InvalidArgument, match="no tokens"):
        check_prompt((), ENGINE, "messages")


def test_a_long_list_of_ids_is_refused_by_its_length_and_never_looked_at() -> None:
    class Unseen(Sequence[int]):
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("an id was looked at")

    with pytest.raises(InvalidArgument, match="1000000 tokens"):
        checked_ids(Unseen(), ENGINE, "prompt")
    with pytest.raises(InvalidArgument, match="1000000 ids already"):
        check_resumed_ids(Unseen(), 100, ENGINE)


def test_a_resumed_choice_may_have_all_its_tokens_but_no_more_and_none_outside_the_vocabulary() -> None:
    check_resumed_ids((1, 2, 3), 3, ENGINE)
    for ids in ((1, 2, 3, 4), (1, 600)):
        with pytest.raises(InvalidArgument) as caught:
            check_resumed_ids(ids, 3, ENGINE)
        assert caught.value.field == "resume_token_ids"


def test_prompts_are_bounded_together() -> None:
    check_num_prompt_ids([range(MAX_PROMPT_IDS), "text is counted when it is encoded"])
    with pytest.raises(InvalidArgument, match="1000001"):
        check_num_prompt_ids([range(MAX_PROMPT_IDS), (1,)])


def test_a_callers_text_is_short_and_encodable_in_errors() -> None:
    with pytest.raises(NotFound) as caught:
        check(model="m\ud800" * 100_000)
    assert len(caught.value.message.encode()) < 1000
    assert len(encodable("ab\ud800" * 1000, 100).encode()) < 500
