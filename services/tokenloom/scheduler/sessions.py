"""Sessions of tokenizers and the requests they read.

A request belongs to a `Stream`, which remembers who reads it. When a session is lost its streams wait for a takeover:
another session submits or attaches with the same request id and is told the tokens it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.trace import Span

from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.frames import Outbox

OUTBOX_BYTES = 16 << 20


@dataclass(slots=True, eq=False)
class Stream:
    """A living request and its reader.

    Args:
        session: who is told its news; None while it waits for a takeover.
        handle: the session's name for the request.
        submitted_s: when it was taken, on the engine's clock.
        span: the request's span in this stage.
    """

    request: Request
    session: TokenizerSession | None
    handle: int
    group_id: str
    submitted_s: float
    span: Span
    first_token_s: float | None = None


@dataclass(slots=True, eq=False)
class TokenizerSession:
    """One tokenizer process's stream of frames."""

    client_id: str
    outbox: Outbox = field(default_factory=lambda: Outbox(OUTBOX_BYTES))
    streams: dict[int, Stream] = field(default_factory=dict)
