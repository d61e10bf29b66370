"""Results by row, and the ways in which a check ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenloom.api.v1 import common_pb2, executor_pb2


class Failed(Exception):
    """The executor breaks the rule; the message says how."""


class Skipped(Exception):
    """The check cannot be made with this executor; the message says why."""


@dataclass(frozen=True)
class Sampled:
    """What a row sampled.

    Args:
        width: logprob entries per token.
        logprob_ids: tokens of the entries.
    """

    token_ids: Sequence[int]
    width: int
    logprob_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class Result:
    """A plan's result."""

    step_id: int
    sampled: dict[int, Sampled]
    row_errors: dict[int, common_pb2.Error]
    step_error: common_pb2.Error | None
    prompt_logprobs: list[executor_pb2.RowPromptLogprobs]


def result_of(response: executor_pb2.ExecuteResponse) -> Result:
    """A result's columns by row.

    Raises: Failed if they do not fit together.
    """
    num_rows, counts = len(response.row_ids), list(response.num_sampled)
    widths = list(response.num_logprobs_per_token) or [0] * num_rows
    if len(counts) != num_rows or len(widths) != num_rows:
        raise Failed(f"{num_rows} row_ids, {len(counts)} num_sampled, {len(widths)} num_logprobs_per_token")
    if sum(counts) != len(response.sampled_token_ids):
        raise Failed(f"num_sampled adds up to {sum(counts)}; {len(response.sampled_token_ids)} sampled_token_ids came")
    num_entries = sum(count * width for count, width in zip(counts, widths, strict=True))
    if not num_entries == len(response.logprob_token_ids) == len(response.logprobs):
        raise Failed(
            f"{num_entries} logprob entries were due; {len(response.logprob_token_ids)} tokens and "
            f"{len(response.logprobs)} logprobs came"
        )
    sampled: dict[int, Sampled] = {}
    at = logprobs_at = 0
    for row_id, count, width in zip(response.row_ids, counts, widths, strict=True):
        end, logprobs_end = at + count, logprobs_at + count * width
        sampled[row_id] = Sampled(
            list(response.sampled_token_ids[at:end]),
            width,
            list(response.logprob_token_ids[logprobs_at:logprobs_end]),
            list(response.logprobs[logprobs_at:logprobs_end]),
        )
        at, logprobs_at = end, logprobs_end
    if len(sampled) != num_rows:
        raise Failed(f"a row stands twice in the result: {list(response.row_ids)}")
    return Result(
        response.step_id,
        sampled,
        {row.row_id: row.error for row in response.row_errors},
        response.step_error if response.HasField("step_error") else None,
        list(response.prompt_logprobs),
    )
