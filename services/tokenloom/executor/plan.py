"""What an executor is told and what it answers, as plain data: the wire's columns (executor.proto) unpacked by row.

Life of a row: it begins in the plan that lists it in `new_rows` and ends in the plan that lists it in
`finished_row_ids`. In between the executor keeps its token ids, block table and parameters; a plan brings differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenloom.common.errors import TokenloomError


@dataclass(frozen=True)
class SamplingParams:
    """How a row's next token is chosen; common.proto has the meaning and range of each field."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    """Noise is a function of it and the position; a greedy row needs none."""
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that are masked until `min_tokens` were generated, besides the model's end-of-sequence tokens."""

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken; no noise. Below 1e-5 a temperature leaves no other token a chance."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """Some penalty changes the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class NewRow:
    """A row that begins, with all that an executor needs to know of it."""

    row_id: int
    prompt_token_ids: Sequence[int]
    generated_token_ids: Sequence[int] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""
    grammar_key: str = ""


@dataclass(frozen=True)
class PlannedRow:
    """A row's share of a plan: it computes the tokens at `num_computed_tokens` and after.

    Args:
        row_id: a known row, or one that begins with this plan.
        num_scheduled_tokens: how many, at least 1.
        num_computed_tokens: tokens whose KV is written already: where the row's last plan ended, or in its first plan
            the length of a cached prefix.
        new_block_ids: appended to the row's block table.
        feeds_back: the last of the tokens is the one that the row's previous plan sampled.
    """

    row_id: int
    num_scheduled_tokens: int
    num_computed_tokens: int
    new_block_ids: Sequence[int] = ()
    feeds_back: bool = False

    @property
    def end(self) -> int:
        """Where its tokens end, exclusive."""
        return self.num_computed_tokens + self.num_scheduled_tokens


@dataclass(frozen=True)
class Plan:
    """One step: rows to forget, rows that begin, and the rows that compute."""

    step_id: int
    rows: Sequence[PlannedRow]
    new_rows: Sequence[NewRow] = ()
    finished_row_ids: Sequence[int] = ()


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprob entries of one token: the token itself first, then the most likely ones in order."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class SampledRow:
    """The token that a row sampled; logprobs only if it asked for them."""

    row_id: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of a run of prompt tokens; the first is at index `first_position` of the prompt."""

    row_id: int
    first_position: int
    entries: list[TokenLogprobs]


@dataclass(frozen=True)
class RowFailure:
    """A row that failed alone; the plan's other rows are good."""

    row_id: int
    error: TokenloomError


@dataclass
class StepTimings:
    """Where a step's time went, in microseconds."""

    queued_us: int = 0
    prepare_us: int = 0
    forward_us: int = 0
    sample_us: int = 0


@dataclass(frozen=True)
class Result:
    """What a plan gave; rows stand in no particular order."""

    step_id: int
    sampled: list[SampledRow]
    prompt_logprobs: list[PromptLogprobs]
    failures: list[RowFailure]
    timings: StepTimings
