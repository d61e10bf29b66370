"""A choice whose reader is back with a number of tokens: their ids come again, nothing of them is told again."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.tokenizer.test_choice import EOS, LENGTH, LINE, STOP_TOKEN, SUBMISSION, Owner, encode, feed, make_choice
from tokenloom.tokenizer.assets import TokenizerAssets
from tokenloom.tokenizer.choice import Choice
from tokenloom.tokenizer.events import MAX_SMALL_DELTA, Delta, FinishReason, PositionLogprobs
from tokenloom.tokenizer.outbox import Outbox


def skipping(tiny: TokenizerAssets, num_tokens: int, *stop_strings: str) -> tuple[Choice, Owner]:
    choice, owner = make_choice(tiny, stop_strings=stop_strings, ids=True)
    choice.skip(num_tokens)
    return choice, owner


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("stop_string", ["never", "then stop.!", "漢", "字, th"])
def test_wherever_the_reader_was_the_rest_is_told_and_the_end(
    tiny: TokenizerAssets, step: int, stop_string: str
) -> None:
    ids = encode(tiny, LINE)
    first, told = make_choice(tiny, stop_strings=(stop_string,), ids=True)
    feed(first, told, ids)
    ends = [sum(delta.num_tokens for delta in told.deltas[: i + 1]) for i in range(len(told.deltas))]
    for num_deltas in range(len(told.deltas) + 1):
        had = "".join(delta.text for delta in told.deltas[:num_deltas] if delta.num_tokens)
        num_tokens = ends[num_deltas - 1] if num_deltas else 0
        choice, owner = skipping(tiny, num_tokens, stop_string)
        feed(choice, owner, ids, step)
        assert had + owner.text == told.text
        assert owner.finished == told.finished
        assert [i for delta in owner.deltas for i in delta.token_ids] == choice.token_ids[num_tokens:]
        starts = [delta.first_token_index for delta in owner.deltas if delta.num_tokens]
        assert starts[:1] in ([], [num_tokens])
        assert choice.num_tokens == len(choice.token_ids) == ends[-1]


def test_logprobs_and_what_was_found_in_the_cache_go_on_behind_what_was_skipped(tiny: TokenizerAssets) -> None:
    ids = encode(tiny, LINE)
    choice, owner = skipping(tiny, 4)
    choice.on_started(2)
    choice.on_tokens(0, ids[:7], [PositionLogprobs([i], [-0.5]) for i in ids[:7]])
    (delta,) = owner.deltas
    assert [position.token_ids for position in delta.logprobs] == [[i] for i in ids[4:7]]
    assert (delta.first_token_index, delta.num_tokens, delta.num_cached_tokens) == (4, 3, 2)


def test_deltas_of_a_resumable_choice_are_small_and_stay_so(tiny: TokenizerAssets) -> None:
    ids = encode(tiny, LINE) * 8
    for width in (0, 3):
        choice, owner = make_choice(tiny, is_resumable=True)
        logprobs = [PositionLogprobs([i] * width, [-0.5] * width) for i in ids] if width else []
        choice.on_tokens(0, ids, logprobs)
        choice.on_finished(LENGTH)
        assert owner.text == tiny.tokenizer.decode(ids)
        assert max(delta.size for delta in owner.deltas) <= MAX_SMALL_DELTA + width
        outbox = Outbox(1 << 20)
        for delta in owner.deltas:
            outbox.put(1, delta)
        waiting = asyncio.run(outbox.take())
        assert sum(delta.num_tokens for _, delta in waiting if isinstance(delta, Delta)) == len(ids)
        assert max(delta.size for _, delta in waiting if isinstance(delta, Delta)) <= MAX_SMALL_DELTA + width


def test_nothing_is_told_before_and_a_lost_engine_session_changes_nothing(tiny: TokenizerAssets) -> None:
    ids = encode(tiny, LINE)
    choice, owner = skipping(tiny, 8)
    choice.on_tokens(0, ids[:5], [])
    assert not choice.end_if_complete()
    choice.on_tokens(3, ids[3:8], [])
    assert owner.deltas == []
    choice.on_tokens(8, ids[8:], [])
    assert owner.deltas[0].first_token_index == 8
    assert owner.text == tiny.tokenizer.decode(ids).removeprefix(tiny.tokenizer.decode(ids[:8]))


@pytest.mark.parametrize(("stop_string", "reason"), [("never", FinishReason.LENGTH), ("then", FinishReason.STOP)])
def test_one_that_was_computed_anew_and_ended_earlier_tells_just_its_end(
    tiny: TokenizerAssets, stop_string: str, reason: FinishReason
) -> None:
    ids = encode(tiny, LINE + "ď")[:-1]  # half a character at its end
    choice, owner = skipping(tiny, len(ids) + 5, stop_string)
    feed(choice, owner, ids)
    assert owner.deltas == []
    assert owner.finished is not None
    assert owner.finished.reason is reason


@pytest.mark.parametrize("end", [LENGTH, STOP_TOKEN])
def test_a_reader_that_had_all_but_the_end_gets_what_the_end_sets_free(tiny: TokenizerAssets, end: object) -> None:
    ids = [*encode(tiny, "and then the"), EOS]
    choice, owner = skipping(tiny, len(ids), "the never said")
    feed(choice, owner, ids, end=end)  # type: ignore[arg-type]
    assert [(delta.text, delta.num_tokens) for delta in owner.deltas] == [("the", 0)]
    assert owner.finished is not None


def test_prompt_logprobs_come_again_only_to_who_has_no_token(tiny: TokenizerAssets) -> None:
    for num_skipped, needs in ((0, True), (1, False)):
        choice, _ = make_choice(tiny, sampling=SUBMISSION.sampling.__class__(num_prompt_logprobs=1))
        choice.skip(num_skipped)
        assert choice.needs_prompt_logprobs == needs


def test_tokens_of_a_choice_whose_end_was_told_count_though_nobody_knows_them(tiny: TokenizerAssets) -> None:
    choice, owner = make_choice(tiny)
    choice.set_ended((), 7)
    assert choice.num_tokens == 7
    assert choice.end_if_complete()
    assert owner.finished is None
