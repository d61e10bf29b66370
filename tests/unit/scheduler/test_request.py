"""Ends by token and by length, counted stops, runs of prompt logprobs."""

import pytest

from tokenloom.scheduler.core.request import FinishReason, PromptLogprobs, Request

STOP = 9


def test_stop_token_ends_and_is_kept() -> None:
    request = Request("a", [1], 8, stop_token_ids=frozenset({STOP}))
    assert request.append_output(5) is None
    assert request.append_output(STOP) is FinishReason.STOP_TOKEN
    assert request.token_ids == [1, 5, STOP]


def test_stop_token_before_min_output_tokens_does_not_end() -> None:
    request = Request("a", [1], 8, stop_token_ids=frozenset({STOP}), min_output_tokens=2)
    assert request.append_output(STOP) is None
    assert request.append_output(STOP) is FinishReason.STOP_TOKEN


def test_last_token_ends_by_length_unless_it_is_a_stop_token() -> None:
    assert Request("a", [1], 1).append_output(5) is FinishReason.LENGTH
    assert Request("a", [1], 1, stop_token_ids=frozenset({STOP})).append_output(STOP) is FinishReason.STOP_TOKEN


def test_resumed_output_counts_as_generated() -> None:
    request = Request("a", [1], 3, output_token_ids=[4, 5])
    assert request.token_ids == [1, 4, 5]
    assert not request.needs_no_more_plans
    assert request.append_output(6) is FinishReason.LENGTH


def test_tokens_in_flight_count_towards_the_length() -> None:
    request = Request("a", [1], 2)
    request.num_pending = 2
    assert request.needs_no_more_plans


@pytest.mark.parametrize(
    ("position", "left"), [(0, [1, 2, 3]), (1, [1, 2, 3]), (2, [2, 3]), (3, [3]), (4, None), (9, None)]
)
def test_run_of_prompt_logprobs_is_cut_to_what_was_not_told(position: int, left: list[int] | None) -> None:
    run = PromptLogprobs(1, 2, token_ids=[1, 10, 2, 20, 3, 30], logprobs=[-1.0, -10.0, -2.0, -20.0, -3.0, -30.0])
    rest = run.since(position)
    if left is None:
        assert rest is None
        return
    assert rest is not None
    assert (rest.first_position, rest.end_position) == (left[0], 4)
    assert list(rest.token_ids) == [token_id for i in left for token_id in (i, 10 * i)]
    assert list(rest.logprobs) == [-float(token_id) for token_id in rest.token_ids]
