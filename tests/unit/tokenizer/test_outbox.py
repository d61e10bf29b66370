from __future__ import annotations

import asyncio

import pytest
import uvloop

from tokenloom.common.errors import ResourceExhausted
from tokenloom.tokenizer.events import ChoiceFinished, Completed, Delta, FinishReason, PositionLogprobs
from tokenloom.tokenizer.outbox import Batch, Outbox

DONE = ChoiceFinished(0, FinishReason.STOP)


def taken(outbox: Outbox) -> Batch:
    return uvloop.run(asyncio.wait_for(outbox.take(), 1.0))


def test_waiting_deltas_of_a_choice_merge_and_others_do_not() -> None:
    outbox = Outbox(10_000)
    outbox.put(1, Delta(0, "a", 0, 1, [7], [PositionLogprobs([7], [-1.0])]))
    outbox.put(2, Delta(0, "x", 0, 1))
    outbox.put(1, Delta(1, "y", 0, 1))
    outbox.put(1, Delta(0, "b", 1, 2, [8, 9]))
    outbox.put(1, DONE)
    assert taken(outbox) == [
        (1, Delta(0, "ab", 0, 3, [7, 8, 9], [PositionLogprobs([7], [-1.0])])),
        (2, Delta(0, "x", 0, 1)),
        (1, Delta(1, "y", 0, 1)),
        (1, DONE),
    ]


def test_prompt_logprobs_stay_apart_and_before_the_first_token() -> None:
    outbox = Outbox(10_000)
    prompt = Delta(0, prompt_logprobs=[PositionLogprobs([5], [-1.0])])
    for delta in (prompt, prompt, Delta(0, "a", 0, 1), Delta(0, "b", 1, 1)):
        outbox.put(1, delta)
    assert taken(outbox) == [(1, prompt), (1, prompt), (1, Delta(0, "ab", 0, 2))]


def test_what_was_taken_is_not_changed_by_later_deltas() -> None:
    outbox = Outbox(10_000)
    outbox.put(1, Delta(0, "a", 0, 1))
    first = taken(outbox)
    outbox.put(1, Delta(0, "b", 1, 1))
    assert first == [(1, Delta(0, "a", 0, 1))]
    assert taken(outbox) == [(1, Delta(0, "b", 1, 1))]


def test_at_the_bound_the_reader_is_told_and_nothing_is_kept() -> None:
    told: list[str] = []
    outbox = Outbox(1000, lambda: told.append("full"))
    for i in range(100):
        outbox.put(1, Delta(0, "x" * 20, i, 1))
    assert told == ["full"]
    assert outbox.has_news
    with pytest.raises(ResourceExhausted) as caught:
        taken(outbox)
    assert caught.value.reason == "SLOW_READER"


def test_taking_makes_room() -> None:
    outbox = Outbox(1000)
    for i in range(100):
        outbox.put(1, Delta(0, "x" * 500, i, 1))
        assert len(taken(outbox)) == 1


def test_events_of_a_request_that_went_away_are_dropped() -> None:
    outbox = Outbox(10_000)
    outbox.put(1, Delta(0, "a", 0, 1))
    outbox.put(2, Delta(0, "b", 0, 1))
    outbox.drop(1)
    outbox.put(2, Completed(1, 1, 0))
    assert taken(outbox) == [(2, Delta(0, "b", 0, 1)), (2, Completed(1, 1, 0))]


def test_wake_lets_the_reader_go_on_without_events() -> None:
    outbox = Outbox(1000)
    outbox.wake()
    assert taken(outbox) == []
