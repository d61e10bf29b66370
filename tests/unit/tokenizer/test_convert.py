from __future__ import annotations

import pytest

from tokenloom.api.v1 import common_pb2, engine_pb2, inference_pb2
from tokenloom.common.errors import InvalidArgument
from tokenloom.tokenizer import convert
from tokenloom.tokenizer.assets import TokenizerAssets
from tokenloom.tokenizer.domain import Caller, Options, SamplingParams, StopConditions, Trace
from tokenloom.tokenizer.events import (
    ChoiceFinished,
    Completed,
    Delta,
    EngineFinishReason,
    Failed,
    FinishReason,
    PositionLogprobs,
    TokenRow,
)
from tokenloom.tokenizer.outbox import Batch
from tokenloom.tokenizer.token_text import TokenTexts


def options_of(options: inference_pb2.GenerationOptions) -> Options:
    return convert.chat_request(inference_pb2.ChatRequest(options=options), Caller(), Trace()).options


def test_what_is_left_out_stays_apart_from_zero() -> None:
    assert options_of(inference_pb2.GenerationOptions()) == Options()
    zeros = common_pb2.SamplingParams(temperature=0, top_p=0, top_k=0, seed=0, num_logprobs=0)
    given = options_of(
        inference_pb2.GenerationOptions(
            sampling=zeros,
            stop=common_pb2.StopConditions(max_tokens=0),
            num_choices=0,
            skip_special_tokens=False,
            priority_class=0,
        )
    )
    assert given.priority_class == 0
    assert given.sampling == SamplingParams(temperature=0, top_p=0, top_k=0, seed=0, num_logprobs=0)
    assert given.stop == StopConditions(max_tokens=0)
    assert (given.num_choices, given.skip_special_tokens) == (0, False)


def test_sampling_survives_the_way_through_the_domain() -> None:
    proto = common_pb2.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=7, presence_penalty=1.5, seed=(1 << 64) - 1, logit_bias={3: -1.5}
    )
    assert convert.sampling_proto(convert.sampling(proto)) == proto


@pytest.mark.parametrize(("asked_ms", "call_s", "expected"), [(None, None, None), (500, 9.0, 0.5), (500, 0.25, 0.25)])
def test_the_shorter_time_counts(asked_ms: int | None, call_s: float | None, expected: float | None) -> None:
    proto = inference_pb2.ChatRequest(options=inference_pb2.GenerationOptions(remaining_time_ms=asked_ms))
    assert convert.chat_request(proto, Caller(), Trace(), call_s).remaining_time_s == expected


def test_a_prompt_that_is_neither_text_nor_ids_is_named() -> None:
    proto = inference_pb2.CompleteRequest(prompts=[inference_pb2.Prompt(text="a"), inference_pb2.Prompt()])
    with pytest.raises(InvalidArgument) as caught:
        convert.complete_request(proto, Caller(), Trace())
    assert caught.value.field == "prompt[1]"


def test_columns_of_a_step_become_rows() -> None:
    outputs = engine_pb2.StepOutputs(
        handles=[4, 9, 5],
        first_token_indexes=[0, 7, 3],
        num_tokens=[1, 2, 1],
        token_ids=[10, 20, 21, 30],
        num_logprobs_per_token=[0, 2, 1],
        logprob_token_ids=[20, 1, 21, 2, 30],
        logprobs=[-1, -2, -3, -4, -5],
    )
    assert list(convert.token_rows(outputs)) == [
        TokenRow(4, 0, [10], []),
        TokenRow(9, 7, [20, 21], [PositionLogprobs([20, 1], [-1, -2]), PositionLogprobs([21, 2], [-3, -4])]),
        TokenRow(5, 3, [30], [PositionLogprobs([30], [-5])]),
    ]


def test_columns_without_logprobs_may_leave_their_widths_out() -> None:
    outputs = engine_pb2.StepOutputs(handles=[1], first_token_indexes=[2], num_tokens=[2], token_ids=[5, 6])
    assert list(convert.token_rows(outputs)) == [TokenRow(1, 2, [5, 6], [])]


def test_consecutive_frames_merge_by_concatenation(tiny: TokenizerAssets) -> None:
    converter = convert.EventConverter(TokenTexts(tiny.tokenizer))
    batch: Batch = [
        (1, Delta(0, "a", 0, 1)),
        (2, Delta(1, "b", 3, 2, [7, 8], is_ids_wanted=True)),
        (1, ChoiceFinished(0, FinishReason.STOP, stop_string="x")),
        (1, Completed(3, 1, 0)),
        (3, Failed(InvalidArgument("no", field="n"))),
    ]
    merged = converter.frame(batch[:1])
    merged.MergeFrom(converter.frame(batch[1:]))
    assert merged == converter.frame(batch)
    assert list(merged.outputs.texts) == ["a", "b"]
    assert [extra.handle for extra in merged.outputs.extras] == [2]
    assert not merged.outputs.token_ids
    assert merged.failed[0].error.field == "n"


def test_a_session_that_wants_ids_has_them_in_columns_and_the_cached_tokens_beside_them(tiny: TokenizerAssets) -> None:
    converter = convert.EventConverter(TokenTexts(tiny.tokenizer))
    first = Delta(0, "a", 0, 2, [5, 6], num_cached_tokens=16)
    batch: Batch = [(1, first), (2, Delta(0, "tail", 4)), (2, Delta(1, "b", 3, 1, [7], is_ids_wanted=True))]
    merged = converter.frame(batch[:1], wants_ids=True)
    merged.MergeFrom(converter.frame(batch[1:], wants_ids=True))
    assert merged == converter.frame(batch, wants_ids=True)
    assert list(merged.outputs.token_ids) == [5, 6, 7]
    assert list(merged.outputs.num_tokens) == [2, 0, 1]
    one, two = merged.outputs.extras
    assert (one.delta.num_cached_tokens, list(one.delta.token_ids), one.delta.text) == (16, [], "")
    assert list(two.delta.token_ids) == [7]
    assert not converter.frame(batch[:1]).outputs.extras, "nobody else needs it"


def test_an_unknown_finish_is_an_error() -> None:
    finish = convert.engine_finish(engine_pb2.Finished(reason=engine_pb2.ENGINE_FINISH_REASON_UNSPECIFIED))
    assert finish.reason is EngineFinishReason.ERROR


@pytest.mark.parametrize(
    ("resumed", "age_ms", "expected"),
    [
        ([], None, None),
        ([[]], None, None),
        ([[5]], None, 0.0),
        ([], 2500, 2.5),
        ([[5], []], 1500, 1.5),
    ],
)
def test_only_a_gateways_resubmission_has_an_age(
    resumed: list[list[int]], age_ms: int | None, expected: float | None
) -> None:
    options = inference_pb2.GenerationOptions(resume_token_ids=[inference_pb2.TokenIds(ids=ids) for ids in resumed])
    chat = inference_pb2.ChatRequest(options=options)
    start = inference_pb2.SessionStart(handle=1, chat=chat, age_ms=age_ms)
    assert convert.session_start(start, Caller()).age_s == expected
    assert convert.chat_request(chat, Caller(), Trace()).age_s is None


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_session_gets_prompt_ids_only_if_asked_and_a_direct_call_always(is_asked: bool) -> None:
    chat = inference_pb2.ChatRequest(options=inference_pb2.GenerationOptions(return_token_ids=is_asked))
    start = inference_pb2.SessionStart(handle=1, chat=chat)
    assert convert.session_start(start, Caller()).wants_prompt_ids == is_asked
    assert convert.chat_request(chat, Caller(), Trace()).wants_prompt_ids


def test_encoded_logprobs_say_what_they_were_made_from(smollm: TokenizerAssets) -> None:
    texts = TokenTexts(smollm.tokenizer)
    converter = convert.EventConverter(texts)
    size = smollm.tokenizer.get_vocab_size()
    longest = max(range(size), key=lambda i: len(texts.lookup(i)[1]))
    ids, values = [0, 177, longest, size - 1, size + 5], [-0.5, 0.0, float("-inf"), -1e30, -3.25]
    delta = Delta(0, logprobs=[PositionLogprobs(ids, values), PositionLogprobs([5], [-1.0])])
    (extra,) = converter.frame([(1, delta)]).outputs.extras
    several, single = extra.delta.logprobs
    entries = [several.token, *several.top]
    assert [entry.token_id for entry in entries] == ids
    assert [(entry.text, entry.utf8) for entry in entries] == [texts.lookup(i) for i in ids]
    assert [entry.logprob for entry in entries] == pytest.approx(values)
    assert (single.token.token_id, len(single.top)) == (5, 0)
