"""The wire's columns, unpacked and packed."""

from __future__ import annotations

from typing import Any

import pytest

from tokenloom.api.v1 import common_pb2, executor_pb2
from tokenloom.common.errors import Internal, InvalidArgument
from tokenloom.executor import convert
from tokenloom.executor.plan import (
    PlannedRow,
    PromptLogprobs,
    Result,
    RowFailure,
    SampledRow,
    SamplingParams,
    StepTimings,
    TokenLogprobs,
)

DEFAULTS = SamplingParams(temperature=0.7, top_p=0.8, top_k=30, min_p=0.05, repetition_penalty=1.1)


def request(**columns: Any) -> executor_pb2.ExecuteRequest:
    good: dict[str, Any] = {
        "step_id": 3,
        "row_ids": [5, 6, 7],
        "num_scheduled_tokens": [1, 4, 2],
        "num_computed_tokens": [9, 0, 16],
        "feeds_back": [True, False, False],
        "num_new_blocks": [0, 2, 1],
        "new_block_ids": [11, 12, 13],
        "finished_row_ids": [1],
    }
    return executor_pb2.ExecuteRequest(**{**good, **columns})


def test_columns_become_rows() -> None:
    plan = convert.plan_from_proto(request(), DEFAULTS)
    assert plan.rows == [
        PlannedRow(5, 1, 9, [], True),
        PlannedRow(6, 4, 0, [11, 12]),
        PlannedRow(7, 2, 16, [13]),
    ]
    assert plan.finished_row_ids == [1]


@pytest.mark.parametrize(
    "columns",
    [
        {"num_scheduled_tokens": [1, 4]},
        {"num_computed_tokens": []},
        {"feeds_back": [True] * 4},
        {"num_new_blocks": [0, 2, 2]},
        {"new_block_ids": [11]},
        {"num_draft_tokens": [0, 1, 0]},
        {"grammars": [executor_pb2.GrammarToPrepare(key="g")]},
    ],
)
def test_columns_that_do_not_fit_together_are_a_malformed_plan(columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="plan 3") as refusal:
        convert.plan_from_proto(request(**columns), DEFAULTS)
    assert refusal.value.reason == "MALFORMED_PLAN"


def test_what_a_row_leaves_open_is_the_models_default_and_zero_is_a_value() -> None:
    zeros = common_pb2.SamplingParams(temperature=0.0, top_p=0.0, top_k=0, min_p=0.0, seed=0, num_logprobs=0)
    new = [
        executor_pb2.NewRow(row_id=5, prompt_token_ids=[1]),
        executor_pb2.NewRow(row_id=6, prompt_token_ids=[1], sampling=zeros),
    ]
    left_open, given = (row.sampling for row in convert.plan_from_proto(request(new_rows=new), DEFAULTS).new_rows)
    assert left_open == DEFAULTS
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.0, 0.0, 0, 0.0)
    assert (given.seed, given.num_logprobs, given.num_prompt_logprobs) == (0, 0, None)


def test_a_new_row_keeps_everything_it_brings() -> None:
    new = executor_pb2.NewRow(
        row_id=6,
        request_id="r",
        prompt_token_ids=[1, 2],
        generated_token_ids=[3],
        sampling=common_pb2.SamplingParams(
            presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={4: 2.0}, seed=2**64 - 1
        ),
        stop=common_pb2.StopConditions(min_tokens=2, stop_token_ids=[8, 9]),
        grammar_key="g",
    )
    (row,) = convert.plan_from_proto(request(new_rows=[new]), SamplingParams()).new_rows
    assert (row.row_id, row.request_id, row.grammar_key) == (6, "r", "g")
    assert (row.prompt_token_ids, row.generated_token_ids) == ([1, 2], [3])
    assert row.sampling == SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={4: 2.0},
        seed=2**64 - 1,
        min_tokens=2,
        stop_token_ids=(8, 9),
    )


def test_a_result_becomes_columns() -> None:
    result = Result(
        step_id=4,
        sampled=[SampledRow(5, 50), SampledRow(6, 60, TokenLogprobs([60, 61], [-1.0, -0.5]))],
        prompt_logprobs=[
            PromptLogprobs(6, 1, [TokenLogprobs([2, 7], [-2.0, -1.0]), TokenLogprobs([3, 8], [-3.0, -1.5])])
        ],
        failures=[RowFailure(7, Internal("broken", reason="LOGITS_NOT_FINITE"))],
        timings=StepTimings(1, 2, 3, 4),
    )
    proto = convert.result_to_proto(result)
    assert (list(proto.row_ids), list(proto.num_sampled), list(proto.sampled_token_ids)) == ([5, 6], [1, 1], [50, 60])
    assert list(proto.num_logprobs_per_token) == [0, 2]
    assert (list(proto.logprob_token_ids), list(proto.logprobs)) == ([60, 61], [-1.0, -0.5])
    (run,) = proto.prompt_logprobs
    assert (run.row_id, run.first_position, run.num_per_token) == (6, 1, 2)
    assert (list(run.token_ids), list(run.logprobs)) == ([2, 7, 3, 8], [-2.0, -1.0, -3.0, -1.5])
    (failed,) = proto.row_errors
    assert (failed.row_id, failed.error.reason) == (7, "LOGITS_NOT_FINITE")
    assert not proto.HasField("step_error")
    assert proto.timings.sample_us == 4
