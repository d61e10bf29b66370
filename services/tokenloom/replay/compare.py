"""Compares results with recorded ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenloom.api.v1 import common_pb2, executor_pb2

Value = int | float | str


@dataclass(frozen=True)
class Mismatch:
    """What came is not what was recorded.

    Args:
        step_id: the recorded step.
        row_id: the recorded row; 0 if the whole step is meant.
        position: index, in the row's ids, of the token in question; -1 if the whole step is meant.
        what: token, logprob, error.
        expected: a token id, a logprob, or an error; the latter also for none.
    """

    step_id: int
    row_id: int
    request_id: str
    position: int
    what: str
    expected: Value
    got: Value

    def __str__(self) -> str:
        where = f"step {self.step_id}"
        if self.row_id:
            where += f", row {self.row_id} ({self.request_id}), position {self.position}"
        return f"{where}: {self.what}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True)
class _Row:
    """A row's part in a result."""

    token_ids: list[int]
    logprob_ids: list[int]
    logprobs: list[float]


class Comparer:
    """Compares step by step. A row is no longer compared behind its first mismatch: what follows builds on it.

    Args:
        logprob_tolerance: largest accepted difference; below 0: logprobs are not compared.
    """

    def __init__(self, logprob_tolerance: float) -> None:
        self._tolerance = logprob_tolerance
        self._diverged: set[int] = set()
        self.num_tokens = 0

    def begin_section(self) -> None:
        """Row ids begin anew."""
        self._diverged.clear()

    def compare(
        self,
        expected: executor_pb2.ExecuteResponse,
        got: executor_pb2.ExecuteResponse,
        positions: dict[int, int],
        request_ids: dict[int, str],
    ) -> list[Mismatch]:
        """The mismatches of a step, at most one per row.

        Args:
            positions: of the next token of each row that was replayed; others are not compared.
        """
        step_id = expected.step_id
        if (error := _error(expected, "step_error")) != (other := _error(got, "step_error")):
            return [Mismatch(step_id, 0, "", -1, "error", error, other)]
        expected_rows, got_rows = _rows_of(expected), _rows_of(got)
        expected_errors, got_errors = _errors_of(expected), _errors_of(got)
        found = []
        for row_id, position in positions.items():
            if row_id in self._diverged:
                continue
            differences = self._differences(
                expected_errors.get(row_id) or expected_rows.get(row_id), got_errors.get(row_id) or got_rows.get(row_id)
            )
            for offset, what, one, two in differences:
                self._diverged.add(row_id)
                request_id = request_ids.get(row_id, "")
                found.append(Mismatch(step_id, row_id, request_id, position + offset, what, one, two))
                break
        return found

    def _differences(
        self, expected: _Row | str | None, got: _Row | str | None
    ) -> Iterator[tuple[int, str, Value, Value]]:
        """(offset of the token, what, expected, got)."""
        if not isinstance(expected, _Row) or not isinstance(got, _Row):
            if expected != got:
                yield 0, "error" if isinstance(expected or got, str) else "token", _shown(expected), _shown(got)
            return
        self.num_tokens += len(expected.token_ids)
        for i in range(max(len(expected.token_ids), len(got.token_ids))):
            one, two = _at(expected.token_ids, i), _at(got.token_ids, i)
            if one != two:
                yield i, "token", one, two
        if self._tolerance < 0:
            return
        if len(expected.logprobs) != len(got.logprobs):
            yield 0, "number of logprobs", len(expected.logprobs), len(got.logprobs)
        for one_logprob, two_logprob in zip(expected.logprobs, got.logprobs, strict=False):
            if not abs(one_logprob - two_logprob) <= self._tolerance:
                yield 0, "logprob", one_logprob, two_logprob


def _rows_of(result: executor_pb2.ExecuteResponse) -> dict[int, _Row]:
    rows: dict[int, _Row] = {}
    at = logprobs_at = 0
    for i, (row_id, count) in enumerate(zip(result.row_ids, result.num_sampled, strict=True)):
        width = result.num_logprobs_per_token[i] if result.num_logprobs_per_token else 0
        end, logprobs_end = at + count, logprobs_at + width * count
        rows[row_id] = _Row(
            list(result.sampled_token_ids[at:end]),
            list(result.logprob_token_ids[logprobs_at:logprobs_end]),
            list(result.logprobs[logprobs_at:logprobs_end]),
        )
        at, logprobs_at = end, logprobs_end
    return rows


def _errors_of(result: executor_pb2.ExecuteResponse) -> dict[int, str]:
    return {row.row_id: _named(row.error) for row in result.row_errors}


def _error(result: executor_pb2.ExecuteResponse, name: str) -> str:
    return _named(getattr(result, name)) if result.HasField("step_error") else "none"


def _named(error: common_pb2.Error) -> str:
    """What must be equal in two errors; messages may differ."""
    return f"error {error.reason or error.code}"


def _shown(value: _Row | str | None) -> Value:
    if isinstance(value, _Row):
        return value.token_ids[0] if value.token_ids else "no token"
    return value or "no token"


def _at(token_ids: list[int], i: int) -> int | str:
    return token_ids[i] if i < len(token_ids) else "no token"
