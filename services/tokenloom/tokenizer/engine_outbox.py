"""What waits to be sent to the engine: submissions, and ends of choices.

What is queued during one turn of the event loop goes out as one message, unless its prompts would make it too large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenloom.api.v1 import engine_pb2
from tokenloom.common.errors import TokenloomError
from tokenloom.common.keys_file import Tenant
from tokenloom.tokenizer import convert
from tokenloom.tokenizer.domain import Submission
from tokenloom.tokenizer.events import EngineFinish, PositionLogprobs
from tokenloom.tokenizer.metrics import RESUBMISSIONS

_MAX_SUBMITTED_IDS_PER_MESSAGE = 1 << 17  # more would hold the event loop up while the message is made


class EngineListener(Protocol):
    """A choice in flight. Its methods are called in the event loop and must not block."""

    @property
    def submission(self) -> Submission:
        """What is sent, and sent again."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids it has."""

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Some of the prompt's logprobs have not arrived."""

    def end_if_complete(self) -> bool:
        """End the choice if the ids it has are all it can have; True if so."""

    def on_started(self, num_cached_tokens: int) -> None:
        """The engine began to run it."""

    def on_prompt_logprobs(self, first_position: int, logprobs: list[PositionLogprobs]) -> None:
        """Logprobs of prompt tokens from a position on."""

    def on_tokens(self, first_token_index: int, token_ids: list[int], logprobs: list[PositionLogprobs]) -> None:
        """New tokens; some may be known already."""

    def on_finished(self, finish: EngineFinish) -> None:
        """The engine ended it; the last call."""

    def on_failed(self, error: TokenloomError) -> None:
        """It was refused or lost; the last call."""


@dataclass(slots=True)
class InFlight:
    """A choice in flight.

    Args:
        was_sent: the engine may have it already.
        was_sent_before: the engine of an earlier session may have it.
        is_in_session: it was sent, or is about to be, in the session that is up now.
    """

    listener: EngineListener
    was_sent: bool = False
    was_sent_before: bool = False
    is_in_session: bool = False


class EngineOutbox:
    """What waits to be written, by handle.

    Attributes:
        tenants: definitions that go out before any submission.
        submits: choices to submit, in order.
        attaches: choices of a lost session that are taken over only to be ended: request id and tokens had.
        finishes: tokens kept of choices that a stop string ended.
        cancels: why choices are given up.
        detaches: choices that are left to themselves.
        num_submitted_ids: ids in `submits`.
        filled: set while there is something.
    """

    def __init__(self) -> None:
        self.tenants: list[Tenant] = []
        self.submits: dict[int, InFlight] = {}
        self.attaches: dict[int, tuple[str, int]] = {}
        self.finishes: dict[int, int] = {}
        self.cancels: dict[int, str] = {}
        self.detaches: list[int] = []
        self.num_submitted_ids = 0
        self.filled = asyncio.Event()

    def add_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Define tenants."""
        self.tenants.extend(tenants)
        self.filled.set()

    def add_submit(self, handle: int, entry: InFlight) -> None:
        """Submit a choice."""
        self.submits[handle] = entry
        entry.is_in_session = True
        self.num_submitted_ids += _num_ids(entry)
        self.filled.set()

    def drop_submit(self, handle: int) -> bool:
        """Take a submission back; False if it was written."""
        entry = self.submits.pop(handle, None)
        if entry is None:
            return False
        self.num_submitted_ids -= _num_ids(entry)
        return True

    def clear(self) -> None:
        """Forget everything; for a new session."""
        self.tenants.clear()
        self.submits.clear()
        self.attaches.clear()
        self.finishes.clear()
        self.cancels.clear()
        self.detaches.clear()
        self.num_submitted_ids = 0
        self.filled.clear()

    def messages(self) -> Iterator[engine_pb2.EngineServiceSessionRequest]:
        """Empty the outbox into messages of bounded size."""
        self.filled.clear()
        while self.tenants or self.submits or self.finishes or self.cancels or self.detaches:  # attached ones are ended
            message = engine_pb2.EngineServiceSessionRequest(tenants=map(convert.tenant_policy, self.tenants))
            self.tenants.clear()
            num_ids = 0
            while self.submits and num_ids < _MAX_SUBMITTED_IDS_PER_MESSAGE:
                handle = next(iter(self.submits))
                entry = self.submits[handle]
                self.drop_submit(handle)
                num_ids += _num_ids(entry)
                message.submits.append(_submit(handle, entry))
            if not self.submits:
                for handle, (request_id, num_tokens) in self.attaches.items():
                    message.attaches.add(handle=handle, request_id=request_id, from_token_index=num_tokens)
                for handle, num_tokens_kept in self.finishes.items():
                    reason = engine_pb2.ENGINE_FINISH_REASON_STOP_STRING
                    message.finishes.add(handle=handle, num_tokens_kept=num_tokens_kept, reason=reason)
                for handle, why in self.cancels.items():
                    message.cancels.add(handle=handle, reason=why)
                for handle in self.detaches:
                    message.detaches.add(handle=handle)
                self.attaches.clear()
                self.finishes.clear()
                self.cancels.clear()
                self.detaches.clear()
            yield message


def _num_ids(entry: InFlight) -> int:
    return len(entry.listener.submission.prompt_token_ids) + len(entry.listener.token_ids)


def _submit(handle: int, entry: InFlight) -> engine_pb2.Submit:
    listener = entry.listener
    if entry.was_sent:
        RESUBMISSIONS.inc()
    proto = convert.submit_proto(
        handle, listener.submission, listener.token_ids, entry.was_sent, listener.needs_prompt_logprobs
    )
    entry.was_sent = True
    return proto
