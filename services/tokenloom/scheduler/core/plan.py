"""What goes out of the core and what comes back.

`SchedulerOutput` says what an executor must do in one step; `ModelOutput` what came of it; `RequestOutput` what the
request's reader is to be told.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenloom.scheduler.core.request import FinishReason, PromptLogprobs, Request


class PreemptReason(enum.Enum):
    """Why a running request lost its blocks: for a running one's next block, a more urgent class, a tenant's share."""

    BLOCKS = "blocks"
    PRIORITY = "priority"
    SHARE = "share"


@dataclass(frozen=True, slots=True, eq=False)
class Preemption:
    """A running request went back to the queue."""

    request: Request
    reason: PreemptReason


@dataclass(slots=True, eq=False)
class ScheduledRow:
    """One request's part in a step.

    Args:
        row_id: the request's present incarnation in the executor; a new one after a preemption.
        num_scheduled_tokens: tokens to compute, at least 1.
        num_computed_tokens: tokens whose KV is there when the step starts.
        new_block_ids: blocks to append to the row's table.
        is_new: the executor does not know the row yet.
        feeds_back: the last input is the token that the row's previous step samples.
        samples: the row samples a token.
    """

    request: Request
    row_id: int
    num_scheduled_tokens: int
    num_computed_tokens: int
    new_block_ids: list[int]
    is_new: bool
    feeds_back: bool
    samples: bool


@dataclass(slots=True, eq=False)
class SchedulerOutput:
    """The plan of one step.

    Args:
        step_id: rises by one from plan to plan.
        rows: what to compute.
        finished_row_ids: rows that the executor must forget, before it runs the rows.
        preempted: requests that lost their blocks since the last plan.
        num_scheduled_tokens: of all rows; at most the token budget.
        is_trial: its rows are suspects, and it is alone in flight (suspects.py).
    """

    step_id: int
    rows: list[ScheduledRow] = field(default_factory=list)
    finished_row_ids: list[int] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    num_scheduled_tokens: int = 0
    is_trial: bool = False


@dataclass(slots=True)
class RowOutput:
    """What a row sampled.

    Args:
        token_ids: usually one.
        logprobs: their logprobs if the request asked; passed through.
    """

    token_ids: Sequence[int]
    logprobs: Any = None


@dataclass(slots=True)
class ModelOutput:
    """The result of one step, by row_id.

    Args:
        step_id: the plan's.
        sampled: rows that sampled.
        prompt_logprobs: prompt logprobs of rows that asked.
        row_errors: rows that failed alone, with a reason that is passed through.
        step_error: the whole step failed and nothing of it counts; passed through.
    """

    step_id: int
    sampled: Mapping[int, RowOutput] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    row_errors: Mapping[int, Any] = field(default_factory=dict)
    step_error: Any = None


@dataclass(slots=True)
class RequestOutput:
    """News of one request.

    Args:
        first_token_index: index of the first new token in the request's output.
        token_ids: the new tokens.
        logprobs: one entry per group of tokens, as the executor gave them.
        prompt_logprobs: a run of prompt logprobs that was not told before.
        finish_reason: set on the request's last output.
        error: what went wrong, with reason ERROR.
    """

    request: Request
    first_token_index: int = 0
    token_ids: Sequence[int] = ()
    logprobs: Any = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: Any = None
