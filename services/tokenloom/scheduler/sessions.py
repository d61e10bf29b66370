"""Sessions of tokenizers and the requests they read.

A request belongs to a `Stream`, which remembers who reads it. When a session is lost its streams wait for a takeover:
another session submits or attaches with the same request id and is told the tokens it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from tokenloom.common.errors import TokenloomError
from tokenloom.scheduler.core.request import PromptLogprobs, Request
from tokenloom.scheduler.frames import Outbox, TokenRow

OUTBOX_BYTES = 16 << 20
MAX_REFUSED_TENANTS = 256


@dataclass(slots=True, eq=False)
class Stream:
    """A living request and its reader.

    Args:
        session: who is told its news; None while it waits for a takeover.
        handle: the session's name for the request.
        group_id: choices of one call share it.
        taken_s: when this engine took it, on the engine's clock; `request.submitted_s` counts its age, too.
        span: the request's span in this stage.
        has_begun: it was in a plan, and its reader knows.
        first_token_s: when this engine's first token of it was known.
        last_token_s: when its newest token was known.
        told: rows with logprobs, kept for a session that takes the request over; ids alone are in the request.
        told_prompt: runs of prompt logprobs, likewise.
        num_losses: how often its session was lost; tells takeover timers apart.
        is_resumable: its client may go away and come back (returns.py).
    """

    request: Request
    session: TokenizerSession | None
    handle: int
    group_id: str
    taken_s: float
    span: Span
    has_begun: bool = False
    first_token_s: float | None = None
    last_token_s: float | None = None
    told: list[TokenRow] = field(default_factory=list)
    told_prompt: list[PromptLogprobs] = field(default_factory=list)
    num_losses: int = 0
    is_resumable: bool = False
    num_resumed_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_resumed_tokens = len(self.request.output_token_ids)

    @property
    def num_without_logprobs(self) -> int:
        """Tokens at the begin whose logprobs were asked for and went with an earlier engine."""
        return self.num_resumed_tokens if self.request.payload.sampling.HasField("num_logprobs") else 0

    def rows_since(self, token_index: int) -> list[TokenRow]:
        """What a new reader lacks, which has the tokens before `token_index`."""
        return rows_since(self.told, self.request.output_token_ids, token_index)


def rows_since(told: Sequence[TokenRow], token_ids: Sequence[int], token_index: int) -> list[TokenRow]:
    """Rows from a token on: those with logprobs as they were told, what they lack from the ids alone."""
    kept = [row for row in told if row.first_token_index >= token_index]
    end = kept[0].first_token_index if kept else len(token_ids)
    missed = token_ids[token_index:end]
    return [TokenRow(token_index, missed, None), *kept] if missed else kept


@dataclass(slots=True, eq=False)
class TokenizerSession:
    """One tokenizer process's stream of frames.

    Args:
        on_closed: stops reading the tokenizer's frames, when the engine closes the session.
        streams: what it reads, by handle.
        refused_tenants: tenants whose last definition by this session was malformed, and why: submits are refused.
    """

    client_id: str
    on_closed: Callable[[], object] = lambda: None
    outbox: Outbox = field(default_factory=lambda: Outbox(OUTBOX_BYTES))
    streams: dict[int, Stream] = field(default_factory=dict)
    refused_tenants: dict[str, TokenloomError] = field(default_factory=dict)
