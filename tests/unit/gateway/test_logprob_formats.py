from __future__ import annotations

from typing import Any

import pytest

from tokenloom.gateway.formats import CompletionFormat
from tokenloom.gateway.generation import Accepted, ChoiceUpdate, Finish, Logprob, Position


def position(utf8: bytes, value: float = -1.0, top: tuple[str, ...] = ()) -> Position:
    token = Logprob(7, utf8.decode(errors="replace"), utf8, value)
    return Position(token, [Logprob(8, text, text.encode(), -0.5) for text in top])


def positions(*texts: str) -> list[Position]:
    return [position(text.encode()) for text in texts]


def echoing(num_prompt_tokens: int, num_choices: int = 1) -> CompletionFormat:
    form = CompletionFormat(has_logprobs=True, echo=True, num_choices=num_choices)
    form.begin(Accepted("tiny", [list(range(num_prompt_tokens))]))
    return form


def lists(choice: dict[str, Any]) -> tuple[list[str], list[int]]:
    return choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("echoed", "prompt", "tokens"),
    [
        ("aaaa", ["a", "a", "a"], ["a", "a", "a", "a"]),
        ("aaaa", ["a", "a"], ["aa", "a", "a"]),
        ("one two", [" two"], ["one", " two"]),
        ("hi", ["<s>", "hi"], ["", "<s>", "hi"]),
        ("one", [], ["one"]),
    ],
)
def test_the_first_prompt_token_is_what_remains_of_the_echoed_text(
    echoed: str, prompt: list[str], tokens: list[str]
) -> None:
    update = ChoiceUpdate(echoed + "aa", echoed, prompt_logprobs=positions(*prompt), logprobs=positions("aa"))
    choice = echoing(len(prompt) + 1).chunk(0, update)
    assert choice["logprobs"]["tokens"] == [*tokens, "aa"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"][-1] == len(echoed)


@pytest.mark.parametrize(("prompt", "first"), [([" b", " a"], "a"), ([], "a b a")])
def test_the_first_prompt_token_is_found_also_where_the_prompts_end_is_not_known(prompt: list[str], first: str) -> None:
    update = ChoiceUpdate("a b a c", prompt_logprobs=positions(*prompt), logprobs=positions(" c"))
    tokens, offsets = lists(echoing(len(prompt) + 1).chunk(0, update))
    assert tokens == [first, *prompt, " c"]
    assert offsets[-1] == 5


def test_offsets_count_whole_characters_where_tokens_split_them() -> None:
    earth = "\N{EARTH GLOBE EUROPE-AFRICA}"
    pieces = [position(b"x"), position(earth.encode()[:2]), position(earth.encode()[2:]), position(b"y")]
    _, offsets = lists(CompletionFormat(has_logprobs=True).chunk(0, ChoiceUpdate(f"x{earth}y", logprobs=pieces)))
    assert offsets == [0, 1, 1, 2]


def test_a_token_outside_the_most_likely_ones_is_among_the_top_logprobs() -> None:
    update = ChoiceUpdate("x", logprobs=[position(b"x", -9.0, ("a", "b"))])
    [top] = CompletionFormat(has_logprobs=True).chunk(0, update)["logprobs"]["top_logprobs"]
    assert top == {"a": -0.5, "b": -0.5, "x": -9.0}


def test_generated_logprobs_follow_those_of_the_prompt_in_each_choice_of_a_stream() -> None:
    form = echoing(3, num_choices=2)
    early = form.chunk(1, ChoiceUpdate("a b cx", "a b c", logprobs=positions("x")))
    assert lists(early) == ([], [])
    assert lists(form.chunk(0, ChoiceUpdate("a b c", "a b c", prompt_logprobs=positions(" b")))) == ([], [])
    last = form.chunk(0, ChoiceUpdate("y", prompt_logprobs=positions(" c"), logprobs=positions("y")))
    assert lists(last) == (["a", " b", " c", "y"], [0, 1, 3, 5])
    assert lists(form.chunk(1, ChoiceUpdate("z", logprobs=positions("z")))) == (
        ["a", " b", " c", "x", "z"],
        [0, 1, 3, 5, 6],
    )


def test_logprobs_that_are_held_when_a_choice_ends_go_out_with_its_last_chunk() -> None:
    form = echoing(2, num_choices=2)
    form.chunk(1, ChoiceUpdate("a bx", "a b", logprobs=positions("x")))
    form.chunk(0, ChoiceUpdate("a b", "a b", prompt_logprobs=positions(" b")))
    assert lists(form.last_chunk(1, Finish("stop"))) == (["a", " b", "x"], [0, 1, 3])
