"""One choice being generated, as the core sees it.

    WAITING --schedule()--> RUNNING --stop, length, error, abort--> FINISHED
       ^------preempt()--------'

Counts, all in tokens:

    |<------------------- num_tokens ------------------->|<- num_pending ->|
    |<--- num_prompt_tokens --->|<-- output_token_ids -->|  sampled by plans in flight, ids not known yet
    |<---- num_computed_tokens: KV written once all plans in flight have run ---->|
    |<-- num_confirmed_tokens: KV written by plans whose results were applied -->|

`num_computed_tokens` is at most `num_tokens + num_pending - 1` after a step that sampled: the newest token has no KV.
`num_gave_way` counts preemptions for blocks or shares (preemption.py). `is_row_void`: a step failed as a whole, and
what is still in flight of the request's row does not count. `num_charged_tokens` counts the prompt tokens that the
tenant was charged for or got from the cache: it never falls. `num_rate_tokens` were taken from the tenant's token
bucket at admission.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenloom.scheduler.core.tenants import Tenant


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    ERROR = "error"


class WaitReason(enum.Enum):
    """What a waiting request waits for."""

    CAPACITY = "capacity"
    PREFIX = "prefix"
    TENANT_LIMIT = "tenant_limit"


class RequestRefused(ValueError):
    """The request is not taken; nothing has changed.

    Args:
        message: in the caller's terms.
        field: the request field at fault; empty if the engine is just full.
        is_overload: trying again later may help.
        reason: of an overload, for programs: QUEUE_FULL, TENANT_QUEUE_FULL or TOKEN_RATE.
        retry_after_s: seconds after which trying again helps; None: unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        is_overload: bool = False,
        reason: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.is_overload = is_overload
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(slots=True, eq=False)
class Request:
    """One choice. Callers set the first group of fields; the core owns the others.

    Args:
        request_id: unique among living requests.
        prompt_token_ids: at least one token.
        max_output_tokens: most tokens to generate; lowered at admission to what context and KV memory hold.
        stop_token_ids: tokens that end the request, end-of-sequence included unless it is to be ignored.
        min_output_tokens: stop tokens do not count before so many tokens.
        output_token_ids: tokens generated before, for a resubmission; grows.
        priority_class: 0 is the most urgent; lowered at admission to the last class that there is.
        tenant: whom to charge.
        submitted_s: when it was first submitted, on the caller's clock; its age counts from then.
        cache_salt: prefixes are shared under the same salt only.
        reads_prefix_cache: False computes the whole prompt (prompt logprobs need every logit).
        deadline_s: when the request expires, on the caller's clock; None: never.
        payload: what the executor needs and the core does not; passed through.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_output_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_output_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    priority_class: int = 0
    tenant: str = ""
    submitted_s: float = 0.0
    cache_salt: str = ""
    reads_prefix_cache: bool = True
    deadline_s: float | None = None
    payload: Any = None

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    arrival: int = 0
    account: Tenant = field(default_factory=lambda: Tenant(""))
    current_class: int = 0
    order_key: tuple[float, int] = (0.0, 0)
    wait_reason: WaitReason = WaitReason.CAPACITY
    row_id: int | None = None
    token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_hashed_blocks: int = 0
    awaited_hash: bytes | None = None
    num_computed_tokens: int = 0
    num_confirmed_tokens: int = 0
    num_pending: int = 0
    num_plans_in_flight: int = 0
    num_cached_tokens: int | None = None
    num_charged_tokens: int = 0
    num_rate_tokens: int = 0
    num_preemptions: int = 0
    num_gave_way: int = 0
    is_row_void: bool = False
    is_resubmission: bool = False
    num_prompt_logprobs_done: int = 0

    def __post_init__(self) -> None:
        self.token_ids = self.prompt_token_ids + self.output_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        return len(self.token_ids)

    @property
    def num_lacking_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) + self.num_pending - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """The request has ended."""
        return self.finish_reason is not None

    @property
    def needs_no_more_plans(self) -> bool:
        """Length ends the request once the plans in flight are done (rule 5: never planned past a counted stop)."""
        return len(self.output_token_ids) + self.num_pending >= self.max_output_tokens

    def append_output(self, token_id: int) -> FinishReason | None:
        """Add a sampled token; returns why the request ends with it, or None."""
        output = self.output_token_ids
        output.append(token_id)
        self.token_ids.append(token_id)
        num_output = len(output)
        if token_id in self.stop_token_ids and num_output >= self.min_output_tokens:
            return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if num_output >= self.max_output_tokens else None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of a run of prompt tokens, as columns.

    Args:
        first_position: index in the prompt of the first token in the run.
        num_per_token: entries per token: the token itself, then the most likely ones.
        token_ids: entries of all tokens, one after the other.
        logprobs: logprob of each entry.
    """

    first_position: int
    num_per_token: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]

    @property
    def end_position(self) -> int:
        """Index behind the run's last token."""
        return self.first_position + len(self.token_ids) // self.num_per_token

    def since(self, position: int) -> PromptLogprobs | None:
        """The part of the run from `position` on; None if there is none."""
        if position >= self.end_position:
            return None
        skip = max(0, position - self.first_position) * self.num_per_token
        start = max(position, self.first_position)
        return PromptLogprobs(start, self.num_per_token, self.token_ids[skip:], self.logprobs[skip:])
