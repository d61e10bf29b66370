from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.common.errors import DeadlineExceeded, Internal, TokenloomError
from tokenloom.tokenizer.assets import TokenizerAssets
from tokenloom.tokenizer.choice import Choice, ChoiceRules
from tokenloom.tokenizer.domain import SamplingParams, StopConditions, Submission, Trace
from tokenloom.tokenizer.events import (
    MAX_LOGPROBS_PER_EVENT,
    ChoiceFinished,
    Delta,
    EngineFinish,
    EngineFinishReason,
    FinishReason,
    PositionLogprobs,
)
from tokenloom.tokenizer.stop_strings import StopStrings

LINE = "Copy exactly: ďábelské 🌍 漢字, then stop."
EOS = 2
LENGTH = EngineFinish(EngineFinishReason.LENGTH, None)
STOP_TOKEN = EngineFinish(EngineFinishReason.STOP_TOKEN, None)
SUBMISSION = Submission(
    request_id="r:0",
    group_id="r",
    choice_index=0,
    prompt_token_ids=(5, 6, 7),
    sampling=SamplingParams(),
    stop=StopConditions(max_tokens=200),
    priority_class=0,
    tenant="",
    cache_salt="",
    trace=Trace(),
    submitted_at_s=0.0,
    deadline_s=None,
    is_resubmitted=False,
    is_resumable=False,
)


class Owner:
    """Keeps what a choice reports."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.deltas: list[Delta] = []
        self.finished: ChoiceFinished | None = None
        self.error: TokenloomError | None = None

    def on_choice_started(self, choice: Choice) -> None:
        self.num_starts += 1

    def on_choice_delta(self, delta: Delta) -> None:
        assert self.finished is None
        self.deltas.append(delta)

    def on_choice_finished(self, choice: Choice, finished: ChoiceFinished) -> None:
        assert self.finished is None
        self.finished = finished

    def on_choice_failed(self, error: TokenloomError) -> None:
        self.error = error

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def make_choice(
    assets: TokenizerAssets,
    *,
    stop_strings: tuple[str, ...] = (),
    is_included: bool = False,
    ids: bool = False,
    end_token_ids: frozenset[int] = frozenset({EOS}),
    resume: list[int] | None = None,
    **changes: Any,
) -> tuple[Choice, Owner]:
    owner = Owner()
    rules = ChoiceRules(
        assets.tokenizer,
        assets.special_token_ids,
        end_token_ids,
        StopStrings(stop_strings, is_included),
        return_token_ids=ids,
    )
    choice = Choice(owner, rules, dataclasses.replace(SUBMISSION, **changes))
    choice.resume(resume or ())
    return choice, owner


def feed(choice: Choice, owner: Owner, ids: list[int], step: int = 1, end: EngineFinish = LENGTH, at: int = 0) -> None:
    for start in range(at, len(ids), step):
        choice.on_tokens(start, ids[start : start + step], [])
        if owner.finished is not None:
            return
    choice.on_finished(end)


def encode(assets: TokenizerAssets, text: str) -> list[int]:
    return assets.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("step", [1, 2, 3])
def test_deltas_join_to_the_whole_decode_at_every_step_size(smollm: TokenizerAssets, step: int) -> None:
    choice, owner = make_choice(smollm, ids=True)
    ids = encode(smollm, LINE)
    feed(choice, owner, ids, step)
    assert owner.text == LINE
    assert not any("\ufffd" in delta.text for delta in owner.deltas)
    assert [i for delta in owner.deltas for i in delta.token_ids] == ids
    assert owner.finished == ChoiceFinished(0, FinishReason.LENGTH)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_ids_give_the_same_text_at_every_step_size_and_resumed_anywhere(
    data: st.DataObject, tiny: TokenizerAssets
) -> None:
    ids = data.draw(st.lists(st.integers(0, 511).filter(lambda i: i != EOS), min_size=1, max_size=14))
    stop = tuple(data.draw(st.lists(st.text(alphabet="ae t\ufffd", min_size=1, max_size=3), max_size=2)))
    step, cut = data.draw(st.integers(1, 4)), data.draw(st.integers(0, len(ids)))
    choice, owner = make_choice(tiny, stop_strings=stop)
    feed(choice, owner, ids, step)

    whole = tiny.tokenizer.decode(ids)
    ends = [end for end in range(len(whole) + 1) if any(whole[:end].endswith(s) for s in stop)]
    if ends:
        found = max((s for s in stop if whole[: ends[0]].endswith(s)), key=len)
        whole = whole[: ends[0] - len(found)]
    assert owner.text == whole

    # What a reader has after `cut` tokens and what the resumed choice sends join to the same text.
    before, before_owner = make_choice(tiny, stop_strings=stop)
    for i in range(cut):
        before.on_tokens(i, [ids[i]], [])
        if before_owner.finished is not None:
            return
    resumed, resumed_owner = make_choice(tiny, stop_strings=stop, resume=ids[:cut])
    feed(resumed, resumed_owner, ids, step, at=cut)
    assert before_owner.text + resumed_owner.text == whole
    assert resumed_owner.finished == owner.finished


def test_deltas_account_for_every_token_once(smollm: TokenizerAssets) -> None:
    choice, owner = make_choice(smollm)
    ids = encode(smollm, LINE)
    feed(choice, owner, ids)
    covered = [i for d in owner.deltas for i in range(d.first_token_index, d.first_token_index + d.num_tokens)]
    assert covered == list(range(len(ids)))


def test_a_stop_string_over_several_tokens_ends_the_choice_and_is_cut(smollm: TokenizerAssets) -> None:
    ids = encode(smollm, LINE + " More text that nobody sees")
    for step in (1, 2, 3):
        choice, owner = make_choice(smollm, stop_strings=("漢字, then st",))
        feed(choice, owner, ids, step)
        assert owner.text == "Copy exactly: ďábelské 🌍 "
        assert owner.finished == ChoiceFinished(0, FinishReason.STOP, stop_string="漢字, then st")
        kept = smollm.tokenizer.decode(list(choice.token_ids))
        assert "漢字, then st" in kept
        assert "漢字, then st" not in smollm.tokenizer.decode(list(choice.token_ids)[:-1])


def test_an_included_stop_string_ends_the_text(smollm: TokenizerAssets) -> None:
    choice, owner = make_choice(smollm, stop_strings=("漢字",), is_included=True)
    feed(choice, owner, encode(smollm, LINE), 2)
    assert owner.text == "Copy exactly: ďábelské 🌍 漢字"


@pytest.mark.parametrize("end", [LENGTH, STOP_TOKEN])
def test_held_back_text_comes_when_the_choice_ends_otherwise(smollm: TokenizerAssets, end: EngineFinish) -> None:
    choice, owner = make_choice(smollm, stop_strings=("stop.\0",))
    ids = [*encode(smollm, LINE), EOS]
    feed(choice, owner, ids if end is STOP_TOKEN else ids[:-1], end=end)
    assert owner.text == LINE


def test_an_end_token_is_counted_but_is_no_text(tiny: TokenizerAssets) -> None:
    word = encode(tiny, "Paris")
    stop = StopConditions(stop_token_ids=(word[-1],))
    choice, owner = make_choice(tiny, end_token_ids=frozenset({EOS, word[-1]}), stop=stop, ids=True)
    feed(choice, owner, word, end=STOP_TOKEN)
    assert owner.text == tiny.tokenizer.decode(word[:-1])
    assert owner.finished == ChoiceFinished(0, FinishReason.STOP, stop_token_id=word[-1])
    assert list(choice.token_ids) == word


def test_tokens_that_come_twice_are_cut_off(tiny: TokenizerAssets) -> None:
    ids = encode(tiny, LINE)
    choice, owner = make_choice(tiny, ids=True)
    choice.on_tokens(0, ids[:5], [])
    choice.on_tokens(2, ids[2:8], [])
    choice.on_tokens(0, ids[:8], [])
    choice.on_tokens(8, ids[8:], [])
    choice.on_finished(LENGTH)
    assert owner.text == LINE
    assert [i for delta in owner.deltas for i in delta.token_ids] == ids


def test_missing_tokens_are_a_fault(tiny: TokenizerAssets) -> None:
    choice, _ = make_choice(tiny)
    choice.on_tokens(0, [10], [])
    with pytest.raises(Internal, match="1 to 2"):
        choice.on_tokens(3, [11], [])


def test_logprobs_stay_with_their_tokens_while_text_is_held_back(tiny: TokenizerAssets) -> None:
    choice, owner = make_choice(tiny)
    ids = encode(tiny, "漢")
    for i, token_id in enumerate(ids):
        choice.on_tokens(i, [token_id], [PositionLogprobs([token_id], [-float(i)])])
    assert [delta.num_tokens for delta in owner.deltas] == [1] * len(ids)
    assert [delta.logprobs[0].logprobs[0] for delta in owner.deltas] == [-float(i) for i in range(len(ids))]
    assert [delta.text for delta in owner.deltas] == [""] * (len(ids) - 1) + ["漢"]


def test_prompt_logprobs_come_in_bounded_deltas_and_never_twice(tiny: TokenizerAssets) -> None:
    prompt = tuple(range(1001))
    choice, owner = make_choice(tiny, prompt_token_ids=prompt, sampling=SamplingParams(num_prompt_logprobs=0))
    positions = [PositionLogprobs([i], [-1.0]) for i in prompt]
    choice.on_prompt_logprobs(1, positions[1:601])
    assert choice.needs_prompt_logprobs
    choice.on_prompt_logprobs(1, positions[1:])
    assert not choice.needs_prompt_logprobs
    assert [p.token_ids[0] for delta in owner.deltas for p in delta.prompt_logprobs] == list(range(1, 1001))
    assert max(len(delta.prompt_logprobs) for delta in owner.deltas) <= 256


def test_a_late_second_start_does_not_change_the_cached_tokens(tiny: TokenizerAssets) -> None:
    choice, _ = make_choice(tiny)
    choice.on_started(2)
    choice.on_started(64)
    assert choice.num_cached_tokens == 2


@pytest.mark.parametrize(
    ("resume", "expected"),
    [
        ([10, 11, EOS], ChoiceFinished(0, FinishReason.STOP)),
        ([10, 11, 12, 13], ChoiceFinished(0, FinishReason.LENGTH)),
        ([10, 11, 12], None),
        ([], None),
    ],
)
def test_a_choice_whose_ids_are_complete_needs_no_engine(
    tiny: TokenizerAssets, resume: list[int], expected: ChoiceFinished | None
) -> None:
    choice, owner = make_choice(tiny, resume=resume, stop=StopConditions(max_tokens=4))
    assert choice.end_if_complete() == (expected is not None)
    assert owner.finished == expected


def test_a_resumed_choice_whose_text_has_its_stop_string_is_complete(tiny: TokenizerAssets) -> None:
    choice, owner = make_choice(tiny, resume=encode(tiny, "one END two"), stop_strings=("END",))
    assert choice.end_if_complete()
    assert owner.finished == ChoiceFinished(0, FinishReason.STOP, stop_string="END")
    assert owner.text == ""


def test_a_deadline_is_an_error_and_never_length(tiny: TokenizerAssets) -> None:
    choice, owner = make_choice(tiny)
    choice.on_tokens(0, [10], [])
    choice.on_finished(EngineFinish(EngineFinishReason.DEADLINE, None))
    assert isinstance(owner.error, DeadlineExceeded)
    assert owner.finished is None


@pytest.mark.parametrize("reason", [EngineFinishReason.DEADLINE, EngineFinishReason.ERROR, EngineFinishReason.ABORTED])
def test_a_choice_that_failed_before_it_began_never_started(tiny: TokenizerAssets, reason: EngineFinishReason) -> None:
    choice, owner = make_choice(tiny)
    choice.on_finished(EngineFinish(reason, None))
    assert owner.error is not None
    assert owner.num_starts == 0


def test_a_stop_string_within_the_first_min_tokens_is_text(smollm: TokenizerAssets) -> None:
    ids = encode(smollm, "one END two three END four")
    first_end = next(i for i in range(len(ids)) if "END" in smollm.tokenizer.decode(ids[: i + 1]))
    for step in (1, 3):
        stop = StopConditions(max_tokens=200, min_tokens=first_end + 1)
        choice, owner = make_choice(smollm, stop_strings=("END",), stop=stop)
        feed(choice, owner, ids, step)
        assert owner.text == "one END two three "
        assert owner.finished == ChoiceFinished(0, FinishReason.STOP, stop_string="END")


def test_a_gap_in_the_prompts_logprobs_is_a_fault(tiny: TokenizerAssets) -> None:
    sampling = SamplingParams(num_prompt_logprobs=0)
    choice, owner = make_choice(tiny, prompt_token_ids=tuple(range(10)), sampling=sampling)
    choice.on_prompt_logprobs(1, [PositionLogprobs([1], [-1.0])])
    with pytest.raises(Internal, match="2 to 4"):
        choice.on_prompt_logprobs(5, [PositionLogprobs([5], [-1.0])])
    assert len(owner.deltas) == 1


def test_wide_prompt_logprobs_come_in_smaller_deltas(tiny: TokenizerAssets) -> None:
    sampling = SamplingParams(num_prompt_logprobs=20)
    choice, owner = make_choice(tiny, prompt_token_ids=tuple(range(301)), sampling=sampling)
    choice.on_prompt_logprobs(1, [PositionLogprobs([i] * 21, [-1.0] * 21) for i in range(1, 301)])
    assert max(delta.num_logprobs for delta in owner.deltas) <= MAX_LOGPROBS_PER_EVENT
    assert [p.token_ids[0] for delta in owner.deltas for p in delta.prompt_logprobs] == list(range(1, 301))


def test_ids_of_a_resumed_choice_may_come_in_several_runs(tiny: TokenizerAssets) -> None:
    ids = encode(tiny, LINE)
    whole, whole_owner = make_choice(tiny, resume=ids[:9])
    parts, parts_owner = make_choice(tiny, resume=ids[:4])
    parts.resume(ids[4:9])
    for choice, owner in ((whole, whole_owner), (parts, parts_owner)):
        feed(choice, owner, ids, at=9)
    assert parts_owner.deltas == whole_owner.deltas


def test_what_the_end_sets_free_is_text_of_no_token_and_the_same_to_whoever_has_all_tokens(
    tiny: TokenizerAssets,
) -> None:
    ids = encode(tiny, "one two 🌍")[:-1]  # ends in the middle of the character
    for known in range(len(ids) + 1):
        choice, owner = make_choice(tiny, stop_strings=("two never",), resume=ids[:known])
        feed(choice, owner, ids, at=known)
        *told, tail = owner.deltas
        assert (tail.text, tail.num_tokens, tail.first_token_index) == ("two \ufffd", 0, len(ids))
        assert sum(delta.num_tokens for delta in told) == len(ids) - known
        assert [i for delta in told for i in delta.token_ids] == ids[known:]


def test_a_choice_with_tokens_had_its_prompts_logprobs(tiny: TokenizerAssets) -> None:
    sampling = SamplingParams(num_prompt_logprobs=0)
    assert make_choice(tiny, sampling=sampling)[0].needs_prompt_logprobs
    choice, owner = make_choice(tiny, sampling=sampling, resume=[10])
    assert not choice.needs_prompt_logprobs
    choice.on_prompt_logprobs(1, [PositionLogprobs([6], [-1.0]), PositionLogprobs([7], [-1.0])])
    assert owner.deltas == []
