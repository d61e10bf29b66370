from __future__ import annotations

import asyncio

import pytest
import uvloop

from tokenloom.common.errors import ResourceExhausted
from tokenloom.tokenizer.domain import SamplingParams, StopConditions
from tokenloom.tokenizer.events import (
    MAX_LOGPROBS_PER_EVENT,
    Accepted,
    ChoiceFinished,
    Completed,
    Delta,
    Failed,
    FinishReason,
    PositionLogprobs,
)
from tokenloom.tokenizer.gateway_session import parts_of
from tokenloom.tokenizer.outbox import Batch, Outbox, size_of

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


def test_an_echoed_prompt_stays_apart_from_the_first_tokens() -> None:
    outbox = Outbox(10_000)
    outbox.put(1, Delta(0, "the prompt", 0, 0))
    outbox.put(1, Delta(0, " goes on", 0, 2))
    assert [event.text for _, event in taken(outbox) if isinstance(event, Delta)] == ["the prompt", " goes on"]


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
    outbox.close(1)
    outbox.put(2, Completed(1, 1, 0))
    assert taken(outbox) == [(2, Delta(0, "b", 0, 1)), (2, Completed(1, 1, 0))]


def test_wake_lets_the_reader_go_on_without_events() -> None:
    outbox = Outbox(1000)
    outbox.wake()
    assert taken(outbox) == []


def test_a_request_that_fills_the_bound_alone_is_given_up_alone() -> None:
    told: list[int] = []
    outbox = Outbox(1000, lambda: told.append(-1), told.append)
    outbox.put(1, Delta(0, "small", 0, 1))
    outbox.put(2, Delta(0, "x" * 600, 0, 1))
    outbox.put(2, Delta(0, "x" * 600, 1, 1))
    outbox.put(2, DONE)
    outbox.put(1, DONE)
    assert told == [2]
    first, refusal, last = taken(outbox)
    assert (first, last) == ((1, Delta(0, "small", 0, 1)), (1, DONE))
    assert refusal[0] == 2
    assert isinstance(refusal[1], Failed)
    assert refusal[1].error.reason == "SLOW_READER"


def test_many_requests_that_fill_the_bound_together_are_given_up_together() -> None:
    told: list[int] = []
    outbox = Outbox(1000, lambda: told.append(-1), told.append)
    for handle in range(10):
        outbox.put(handle, Delta(0, "x" * 100, 0, 1))
    assert told == [-1]


def test_a_closed_request_says_nothing_more_and_leaves_its_room() -> None:
    outbox = Outbox(1000)
    for handle in range(1, 20):
        outbox.put(handle, Delta(0, "x" * 600, 0, 1))
        outbox.close(handle)
        outbox.put(handle, DONE)
    assert not outbox.has_news
    outbox.forget(1)
    outbox.put(1, DONE)
    assert taken(outbox) == [(1, DONE)]


def test_characters_count_as_the_bytes_they_are() -> None:
    assert size_of(Delta(0, "漢" * 100)) - size_of(Delta(0)) == 300
    assert size_of(ChoiceFinished(0, FinishReason.STOP, "é" * 10)) - size_of(DONE) == 20
    long = Failed(ResourceExhausted("x" * 500))
    assert size_of(long) > 500


def test_a_slow_readers_logprobs_merge_only_up_to_what_one_event_may_carry() -> None:
    outbox = Outbox(10 << 20)
    position = PositionLogprobs([7] * 21, [-1.0] * 21)
    for i in range(500):
        outbox.put(1, Delta(0, "a", i, 1, [], [position]))
    deltas = [event for _, event in taken(outbox) if isinstance(event, Delta)]
    assert 20 < len(deltas) < 30
    assert max(delta.num_logprobs for delta in deltas) <= MAX_LOGPROBS_PER_EVENT
    assert [delta.first_token_index for delta in deltas[1:]] == [
        sum(delta.num_tokens for delta in deltas[:i]) for i in range(1, len(deltas))
    ]


def test_parts_of_a_batch_stay_within_the_limits_of_a_message() -> None:
    prompts = (range(1_000_000),)
    accepted = Accepted("r", 0, "m", 0, prompts, SamplingParams(), StopConditions())
    wide = Delta(0, prompt_logprobs=[PositionLogprobs([7] * 21, [-1.0] * 21)] * 20)
    batch: Batch = [(1, Delta(0, "x" * 1_000_000)), (2, accepted), *[(3, wide)] * 9, (4, DONE)]
    parts = list(parts_of(batch))
    assert [item for part in parts for item in part] == batch
    for part in parts:
        assert sum(size_of(event) for _, event in part) <= 5 << 20
        assert sum(event.num_logprobs for _, event in part if isinstance(event, Delta)) <= MAX_LOGPROBS_PER_EVENT


def test_long_prompts_that_are_told_do_not_hold_the_loop_up_together() -> None:
    def accepted(num_ids: int) -> Accepted:
        return Accepted("r", 0, "m", 0, (range(num_ids),), SamplingParams(), StopConditions())

    batch: Batch = [*[(handle, accepted(30_000)) for handle in range(4)], *[(9, accepted(100))] * 4]
    assert [len(part) for part in parts_of(batch)] == [1, 1, 1, 5]
