from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from tokenloom.common.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
    TokenloomError,
    Unavailable,
)
from tokenloom.gateway import generation as generation_module
from tokenloom.gateway.generation import Accepted, Finish, Generation, Logprob, Position, Update, Usage

USAGE = Usage(1, 2, 0)


def add(generation: Generation, choice_index: int, text: str, num_tokens: int) -> None:
    """More text of a choice, behind the tokens that it has."""
    first = generation.progress.choice(choice_index).num_tokens
    generation.add_text(choice_index, text, first, num_tokens, [7] * num_tokens)


def collect(generation: Generation) -> Update:
    return asyncio.run(generation.next_update())


def test_what_arrives_while_the_handler_is_busy_merges_into_one_update() -> None:
    generation = Generation("r", 1000)
    generation.accept(Accepted("tiny", [[1]]), b"accepted")
    add(generation, 0, "a", 1)
    add(generation, 1, "x", 1)
    add(generation, 0, "b", 2)
    generation.add_details(0, [5, 6, 7], [], [])
    generation.finish_choice(0, Finish("stop"))
    update = collect(generation)
    assert update.accepted is not None
    assert (update.choices[0].text, update.choices[0].num_tokens) == ("ab", 3)
    assert update.choices[0].token_ids == [5, 6, 7]
    assert update.choices[0].finish == Finish("stop")
    assert update.choices[1].text == "x"
    assert not update.is_last


def test_nothing_follows_the_end() -> None:
    generation = Generation("r", 1000)
    generation.complete(USAGE)
    add(generation, 0, "late", 1)
    generation.fail(Internal("late"))
    generation.abandon(Cancelled("late"))
    update = collect(generation)
    assert update == Update(usage=USAGE)


def test_abandoning_tells_the_session_once() -> None:
    told: list[str] = []
    generation = Generation("r", 1000)
    generation.on_abandoned = lambda: told.append("session")
    generation.abandon(Cancelled("gone"))
    generation.abandon(Cancelled("again"))
    assert told == ["session"]
    assert isinstance(collect(generation).error, Cancelled)


def test_a_failure_told_by_the_session_is_not_told_back() -> None:
    told: list[str] = []
    generation = Generation("r", 1000)
    generation.on_abandoned = lambda: told.append("session")
    generation.fail(Internal("broken"))
    assert told == []


def test_a_reader_that_took_nothing_for_long_loses_its_request_at_the_bound_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation_module, "SLOW_READER_PATIENCE_S", 0.0)
    told: list[str] = []
    generation = Generation("r", 1000)
    generation.on_abandoned = lambda: told.append("session")
    generation.on_slow_reader = lambda: told.append("handler")
    add(generation, 0, "é" * 500, 1)  # 1000 bytes
    assert told == []
    add(generation, 0, "x", 1)
    assert told == ["session", "handler"]
    update = collect(generation)
    assert isinstance(update.error, ResourceExhausted)
    assert update.error.reason == "SLOW_READER"
    assert update.choices == {}


def test_a_burst_is_no_slow_reader_up_to_a_bound_of_its_own() -> None:
    generation = Generation("r", 1000)
    for _ in range(64):
        add(generation, 0, "x" * 1000, 1)
    assert not generation.is_over
    add(generation, 0, "x", 1)
    error = collect(generation).error
    assert error is not None
    assert error.reason == "SLOW_READER"


def test_patience_begins_anew_when_the_reader_takes_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    generation = Generation("r", 1000)
    for _ in range(3):
        now_s += 4.0
        add(generation, 0, "x" * 2000, 1)
        assert not generation.is_over
        collect(generation)
    now_s += 5.0
    add(generation, 0, "x" * 2000, 1)
    assert generation.is_over


def test_a_large_frame_does_not_hurt_a_handler_that_waits() -> None:
    async def read_while_a_frame_arrives() -> Update:
        generation = Generation("r", 1000)
        reader = asyncio.create_task(generation.next_update())
        await asyncio.sleep(0)
        add(generation, 0, "x" * 5000, 1)
        return await reader

    update = asyncio.run(read_while_a_frame_arrives())
    assert update.error is None
    assert len(update.choices[0].text) == 5000


def test_text_behind_a_choices_tokens_that_belongs_to_none_is_told_with_its_end() -> None:
    generation = Generation("r", 1000)
    add(generation, 0, "prompt", 0)
    add(generation, 0, "a", 1)
    add(generation, 0, "held", 0)
    add(generation, 1, "b", 1)
    update = collect(generation)
    assert (update.choices[0].text, update.choices[0].echoed) == ("prompta", "prompt")
    assert (update.choices[1].text, update.choices[1].echoed) == ("b", "")
    generation.finish_choice(0, Finish("length"))
    assert collect(generation).choices[0].text == "held"


def test_another_session_tells_the_end_again_and_its_text_once() -> None:
    generation = Generation("r", 1000)
    add(generation, 0, "a", 1)
    add(generation, 0, "held", 0)
    generation.progress.resume()
    add(generation, 0, "held", 0)
    generation.finish_choice(0, Finish("length"))
    assert collect(generation).choices[0].text == "aheld"


def test_an_echo_that_comes_again_is_told_once_and_does_not_count_as_held() -> None:
    generation = Generation("r", 1000)
    add(generation, 0, "prompt", 0)
    generation.progress.resume()
    add(generation, 0, "prompt", 0)
    add(generation, 1, "prompt", 0)
    add(generation, 0, "a", 1)
    update = collect(generation)
    assert (update.choices[0].text, update.choices[0].echoed) == ("prompta", "prompt")
    assert update.choices[1].text == "prompt"


def test_prompt_logprobs_that_come_again_are_told_once() -> None:
    def position(token_id: int) -> Position:
        return Position(Logprob(token_id, "x", b"x", -1.0), [])

    generation = Generation("r", 100_000)
    generation.add_details(0, [], [], [position(1), position(2), position(3)])
    for _ in range(2):  # two losses, the second while it comes again
        generation.progress.resume()
        generation.add_details(0, [], [], [position(1), position(2)])
    generation.add_details(0, [], [], [position(3), position(4)])
    assert [found.token.token_id for found in collect(generation).choices[0].prompt_logprobs] == [1, 2, 3, 4]


@pytest.mark.parametrize("first_token_index", [0, 2])
def test_tokens_that_do_not_follow_those_before_end_the_request(first_token_index: int) -> None:
    told: list[str] = []
    generation = Generation("r", 1000)
    generation.on_abandoned = lambda: told.append("session")
    add(generation, 0, "a", 1)
    generation.add_text(0, "again", first_token_index, 1, [7])
    update = collect(generation)
    assert update.choices[0].text == "a"
    assert isinstance(update.error, Internal)
    assert told == ["session"]


def test_a_request_goes_on_elsewhere_only_if_all_its_ids_are_known() -> None:
    generation = Generation("r", 1000)
    assert generation.progress.has_all_ids
    add(generation, 0, "a", 1)
    assert generation.progress.has_all_ids
    generation.add_text(0, "b", 1, 1)  # by a tokenizer that does not tell ids
    assert not generation.progress.has_all_ids


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_reader_that_takes_nothing_loses_its_request_also_behind_its_end(is_complete: bool) -> None:
    told: list[str] = []
    generation = Generation("r", 1000)
    generation.on_abandoned = lambda: told.append("session")
    add(generation, 0, "x" * 5000, 1)
    if is_complete:
        generation.complete(USAGE)
    generation.give_up_reader()
    update = collect(generation)
    assert update.error is not None
    assert update.error.reason == "SLOW_READER"
    assert update.usage is None
    assert update.is_last
    assert told == ([] if is_complete else ["session"])


def note_detached(told: list[bool], generation: Generation) -> None:
    told.append(generation.is_detached)


@pytest.mark.parametrize(
    ("error", "is_detached"),
    [
        (Cancelled("gone", reason="CLIENT_DISCONNECTED"), True),
        (ResourceExhausted("slow", reason="SLOW_READER"), True),
        (Unavailable("the gateway stops"), True),
        (DeadlineExceeded("late"), False),
        (Internal("a gap"), False),
    ],
)
def test_a_request_whose_client_may_return_is_detached_unless_it_is_late_or_broken(
    error: TokenloomError, is_detached: bool
) -> None:
    told: list[bool] = []
    for may_return in (True, False):
        generation = Generation("r", 1000, may_return=may_return)
        generation.on_abandoned = partial(note_detached, told, generation)
        generation.abandon(error)
    assert told == [is_detached, False]


def test_what_piles_up_for_a_client_that_may_return_comes_in_small_events() -> None:
    for may_return in (True, False):
        generation = Generation("r", 1 << 20, may_return=may_return)
        for token in range(100):
            add(generation, 0, f"<{token}>", 1)
            generation.add_details(0, [token], [], [])
        generation.add_text(0, "held", 100, 0)
        generation.finish_choice(0, Finish("length"))
        last = collect(generation).choices[0]
        parts = [*last.earlier, last]
        assert "".join(part.text for part in parts) == "".join(f"<{token}>" for token in range(100)) + "held"
        assert [i for part in parts for i in part.token_ids] == list(range(100))
        assert all(len(part.token_ids) == part.num_tokens for part in parts)
        assert [part.finish for part in parts] == [None] * (len(parts) - 1) + [Finish("length")]
        assert max(part.num_tokens for part in parts) == (16 if may_return else 100)


def test_logprobs_count_for_the_size_of_such_events() -> None:
    generation = Generation("r", 1 << 20, may_return=True)
    entry = Logprob(1, "x", b"x", -0.5)
    for _ in range(20):
        add(generation, 0, "x", 1)
        generation.add_details(0, [], [Position(entry, [entry] * 5)], [])
    last = collect(generation).choices[0]
    assert all(part.size <= 16 + 7 for part in (*last.earlier, last))
    assert last.num_entries == 20 * 6


def test_text_that_an_end_sets_free_is_not_told_to_a_client_that_is_back_with_it() -> None:
    generation = Generation("r", 1000, may_return=True)
    progress = generation.progress.choice(0)
    progress.num_tokens, progress.has_final_text = 3, True
    generation.add_text(0, "held", 3, 0)
    generation.finish_choice(0, Finish("length"))
    update = collect(generation)
    assert (update.choices[0].text, update.choices[0].finish) == ("", Finish("length"))
    assert generation.can_go_on
    assert not generation.progress.has_all_ids


def test_what_is_being_written_counts_as_held_until_the_handler_comes_back() -> None:
    async def test() -> None:
        generation = Generation("r", 1000)
        add(generation, 0, "x" * 500, 1)
        await generation.next_update()
        assert generation.num_held_bytes == 500
        add(generation, 0, "x" * 100, 1)
        assert generation.num_held_bytes == 600
        await generation.next_update()
        waiting = asyncio.create_task(generation.next_update())
        await asyncio.sleep(0)
        assert generation.num_held_bytes == 0
        waiting.cancel()

    asyncio.run(test())
