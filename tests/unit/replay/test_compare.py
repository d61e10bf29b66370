"""What counts as a difference between two results."""

from __future__ import annotations

from typing import Any

import pytest

from tokenloom.api.v1 import common_pb2, executor_pb2
from tokenloom.replay.compare import Comparer, Mismatch

NAMES = {1: "one", 2: "two"}
POSITIONS = {1: 10, 2: 20}


def result(one: int | None = 5, two: int | None = 6, **fields: Any) -> executor_pb2.ExecuteResponse:
    rows = [(row, token) for row, token in ((1, one), (2, two)) if token is not None]
    return executor_pb2.ExecuteResponse(
        step_id=3,
        row_ids=[row for row, _ in rows],
        num_sampled=[1] * len(rows),
        sampled_token_ids=[token for _, token in rows],
        **fields,
    )


def differences(
    expected: executor_pb2.ExecuteResponse, got: executor_pb2.ExecuteResponse, tolerance: float = -1.0
) -> list[tuple[int, int, str, Any, Any]]:
    found = Comparer(tolerance).compare(expected, got, POSITIONS, NAMES)
    return [(one.row_id, one.position, one.what, one.expected, one.got) for one in found]


def test_equal_results_are_counted_by_token() -> None:
    comparer = Comparer(0.0)
    assert comparer.compare(result(), result(), POSITIONS, NAMES) == []
    assert comparer.num_tokens == 2


def test_each_row_is_told_once_until_row_ids_begin_anew() -> None:
    comparer = Comparer(-1.0)
    assert comparer.compare(result(), result(one=7), POSITIONS, NAMES) == [Mismatch(3, 1, "one", 10, "token", 5, 7)]
    assert comparer.compare(result(), result(one=8), POSITIONS, NAMES) == []
    assert len(comparer.compare(result(), result(two=8), POSITIONS, NAMES)) == 1
    comparer.begin_section()
    assert len(comparer.compare(result(), result(one=8), POSITIONS, NAMES)) == 1


def test_rows_that_were_left_out_are_not_compared() -> None:
    assert Comparer(-1.0).compare(result(), result(two=None), {1: 10}, NAMES) == []


def test_tokens_that_are_missing_or_too_many_are_differences() -> None:
    assert differences(result(), result(two=None)) == [(2, 20, "token", 6, "no token")]
    assert differences(result(two=None), result()) == [(2, 20, "token", "no token", 6)]


def test_errors_are_compared_by_reason_and_not_by_message() -> None:
    def failed(reason: str, message: str) -> executor_pb2.ExecuteResponse:
        error = common_pb2.Error(code=3, reason=reason, message=message)
        return result(two=None, row_errors=[executor_pb2.RowError(row_id=2, error=error)])

    assert differences(failed("A", "x"), failed("A", "y")) == []
    assert differences(failed("A", "x"), failed("B", "x")) == [(2, 20, "error", "error A", "error B")]
    assert differences(failed("A", "x"), result()) == [(2, 20, "error", "error A", 6)]
    broken = executor_pb2.ExecuteResponse(step_id=3, step_error=common_pb2.Error(code=13))
    assert differences(result(), broken) == [(0, -1, "error", "none", "error 13")]
    assert differences(broken, broken) == []


@pytest.mark.parametrize(("tolerance", "num"), [(-1.0, 0), (0.2, 0), (0.05, 1)])
def test_logprobs_may_differ_by_the_tolerance(tolerance: float, num: int) -> None:
    def with_logprob(value: float) -> executor_pb2.ExecuteResponse:
        return result(num_logprobs_per_token=[1, 0], logprob_token_ids=[5], logprobs=[value])

    found = differences(with_logprob(-1.0), with_logprob(-1.1), tolerance)
    assert len(found) == num
    assert all(what == "logprob" for _, _, what, _, _ in found)
    if tolerance >= 0:
        assert differences(with_logprob(-1.0), with_logprob(float("nan")), tolerance)
        assert differences(with_logprob(-1.0), result(), tolerance)[0][2] == "number of logprobs"
