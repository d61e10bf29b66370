"""What counts as the same tokens, what a result must look like, and how rows are planned."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tokenloom.api.v1 import executor_pb2
from tokenloom.common.executor_client import ExecutorClient
from tokenloom.conformance.lab import Lab, Row
from tokenloom.conformance.results import Failed, Skipped, result_of


def lab(*, batch_invariant: bool, near_tie: float = 0.001) -> Lab:
    can = executor_pb2.GetCapabilitiesResponse(
        batch_invariant=batch_invariant, max_num_seqs=2, max_num_logprobs=1, block_size=4, max_model_len=64
    )
    return Lab(cast(ExecutorClient, None), can, near_tie)


def reference(gaps: list[float] | None = None) -> Row:
    return Row(executor_pb2.NewRow(row_id=1), 7, token_ids=[5, 6, 7], gaps=gaps or [])


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_the_same_tokens_pass_from_any_offset(batch_invariant: bool) -> None:
    lab(batch_invariant=batch_invariant).expect_same(reference(), [5, 6, 7], "all")
    lab(batch_invariant=batch_invariant).expect_same(reference(), [6, 7], "behind the first", offset=1)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_another_number_of_tokens_fails_always(batch_invariant: bool) -> None:
    with pytest.raises(Failed, match="short: 2 tokens instead of 3"):
        lab(batch_invariant=batch_invariant).expect_same(reference([0.0, 0.0, 0.0]), [5, 6], "short")


def test_a_batch_invariant_executor_may_differ_at_no_tie() -> None:
    with pytest.raises(Failed, match="it: token 1 is 9 instead of 6"):
        lab(batch_invariant=True).expect_same(reference([0.0, 0.0, 0.0]), [5, 9, 7], "it")


@pytest.mark.parametrize(("gap", "error"), [(0.0009, Skipped), (0.001, Failed), (2.0, Failed)])
def test_others_may_differ_where_the_two_best_were_nearly_equal(gap: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="token 1 is 9 instead of 6"):
        lab(batch_invariant=False).expect_same(reference([2.0, gap, 2.0]), [5, 9, 1], "it")
    with pytest.raises(error, match="token 0 is 9 instead of 6"):
        lab(batch_invariant=False).expect_same(reference([2.0, gap, 2.0]), [9, 7], "it", offset=1)


def test_without_logprobs_nobody_knows_how_near_a_tie_was() -> None:
    with pytest.raises(Skipped, match="is not known"):
        lab(batch_invariant=False).expect_same(reference(), [5, 9, 7], "it")


def test_what_the_executor_lacks_skips_a_check() -> None:
    small = lab(batch_invariant=True)
    small.need_rows(2)
    small.need_logprobs(1)
    with pytest.raises(Skipped, match="takes 2 rows, the check needs 3"):
        small.need_rows(3)
    with pytest.raises(Skipped, match="gives 1 logprobs, the check needs 2"):
        small.need_logprobs(2)


def test_a_result_is_parted_by_row() -> None:
    response = executor_pb2.ExecuteResponse(
        step_id=4,
        row_ids=[1, 2],
        num_sampled=[1, 2],
        sampled_token_ids=[7, 8, 9],
        num_logprobs_per_token=[0, 1],
        logprob_token_ids=[8, 9],
        logprobs=[-1.0, -2.0],
    )
    result = result_of(response)
    assert result.step_error is None
    assert (result.sampled[1].token_ids, result.sampled[1].width) == ([7], 0)
    two = result.sampled[2]
    assert (two.token_ids, two.width, two.logprob_ids, two.logprobs) == ([8, 9], 1, [8, 9], [-1.0, -2.0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_sampled": [1]}, "2 row_ids, 1 num_sampled"),
        ({"num_sampled": [1, 2]}, "adds up to 3; 2 sampled_token_ids came"),
        ({"num_logprobs_per_token": [1, 0]}, "1 logprob entries were due; 0 tokens and 0 logprobs came"),
        ({"row_ids": [1, 1]}, "a row stands twice"),
    ],
)
def test_columns_that_do_not_fit_together_fail(fields: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {"step_id": 4, "row_ids": [1, 2], "num_sampled": [1, 1], "sampled_token_ids": [7, 8]}
    result_of(executor_pb2.ExecuteResponse(**good))
    with pytest.raises(Failed, match=words):
        result_of(executor_pb2.ExecuteResponse(**{**good, **fields}))
