"""What the engine reports of a choice, and what a request brings forth from Accepted to Completed or Failed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tokenloom.common.errors import TokenloomError
from tokenloom.tokenizer.domain import SamplingParams, StopConditions

TIME_IS_UP = "the request's time was up"
MAX_LOGPROBS_PER_EVENT = 512
"""Entries of logprobs, over all positions, that are turned into protobuf in one go: up to 25 us each on a slow core."""
MAX_SMALL_DELTA = 16
"""Tokens and entries of logprobs in a delta of a resumable request."""


class PositionLogprobs(NamedTuple):
    """Logprobs at one position: entry 0 is the token that stands there, then the most likely ones, best first."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class EngineFinishReason(enum.Enum):
    """Why the engine ended a choice."""

    STOP_TOKEN = enum.auto()
    LENGTH = enum.auto()
    DEADLINE = enum.auto()
    ABORTED = enum.auto()
    ERROR = enum.auto()


class EngineFinish(NamedTuple):
    """How the engine ended a choice; `error` tells what went wrong, with reason ERROR."""

    reason: EngineFinishReason
    error: TokenloomError | None


class TokenRow(NamedTuple):
    """New tokens of one choice; `logprobs` has one entry per token, or none if they were not asked for."""

    handle: int
    first_token_index: int
    token_ids: list[int]
    logprobs: list[PositionLogprobs]


class FinishReason(enum.Enum):
    """Why a choice ended, as its reader sees it."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was taken; all that a retry needs."""

    request_id: str
    created_s: int
    model: str
    seed: int
    prompts: tuple[Sequence[int], ...]
    sampling: SamplingParams
    stop: StopConditions


@dataclass(slots=True)
class Delta:
    """More of one choice. Mutable, so that a slow reader's deltas merge; see `append`.

    Args:
        first_token_index: index of the first of `num_tokens` tokens within the choice.
        token_ids: of these tokens.
        is_ids_wanted: the caller asked for ids.
        num_cached_tokens: prompt tokens that the choice found in the prefix cache; None but on its first tokens.
        is_kept_small: its client may lose its connection at any time, and gets on by whole events only.
    """

    choice_index: int
    text: str = ""
    first_token_index: int = 0
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    is_ids_wanted: bool = False
    num_cached_tokens: int | None = None
    is_kept_small: bool = False

    @property
    def has_extras(self) -> bool:
        """Carries more than text for its reader."""
        return bool((self.is_ids_wanted and self.token_ids) or self.logprobs or self.prompt_logprobs)

    @property
    def num_logprobs(self) -> int:
        """Entries of logprobs over all positions."""
        return sum(len(position.token_ids) for position in (*self.logprobs, *self.prompt_logprobs))

    @property
    def size(self) -> int:
        """Tokens and entries of logprobs."""
        return self.num_tokens + self.num_logprobs

    def append(self, later: Delta) -> None:
        """Take the delta that follows into this one; neither has prompt logprobs."""
        self.text += later.text
        self.num_tokens += later.num_tokens
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """A choice ended; `stop_string` and `stop_token_id` say by what, if by one."""

    choice_index: int
    reason: FinishReason
    stop_string: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """The request ended well; counts of tokens."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended badly."""

    error: TokenloomError


Event = Accepted | Delta | ChoiceFinished | Completed | Failed


class EventSink(Protocol):
    """Where a request's events go. Called in the event loop; must not block."""

    def put(self, event: Event) -> None:
        """Take the next event."""
