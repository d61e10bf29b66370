"""One request in flight, between the session that fills it and the HTTP handler that empties it.

    session --accept, add_text, ..., complete or fail--> Generation --next_update--> handler --SSE or JSON--> client
            <----------------- on_abandoned ------------            <---abandon-----

Everything that arrives before the handler comes back merges into one Update, so a slow handler costs one write and not
one per step. What waits while the handler is busy writing is bounded: a client that takes nothing for long while much
waits loses its request.
A request whose client may return is then, and when the client went away, detached rather than cancelled.
After the terminal update (usage or error) nothing follows, whatever the session still sends.
When a session is lost, another one goes on behind what was taken; the handler sees a pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenloom.common.errors import DeadlineExceeded, Internal, ResourceExhausted, TokenloomError
from tokenloom.gateway.progress import Progress
from tokenloom.gateway.sized_work import IDS_PER_ENTRY

# Tokens and entries of logprobs in an event of a stream whose client may return; tokenizers tell no more at a time.
MAX_EVENT_SIZE = 16
_LOGPROB_BYTES = 64
_TOKEN_ID_BYTES = 8
# A client that takes a part in this time is not slow, however much comes at once; up to so many times the bound.
SLOW_READER_PATIENCE_S = 5.0
_BURST_FACTOR = 64


@dataclass(slots=True)
class Logprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    text: str
    utf8: bytes
    value: float


@dataclass(slots=True)
class Position:
    """Logprobs at one position: the token that stands there and the most likely ones, best first."""

    token: Logprob
    top: list[Logprob]


@dataclass(slots=True)
class Finish:
    """Why a choice ended: OpenAI's finish_reason, and the stop string or stop token that was found, if any."""

    reason: str
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Usage:
    """What a request took, in tokens."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class Accepted:
    """The request was taken: by which model, and the prompts as it sees them."""

    model: str
    prompts: list[list[int]]


@dataclass(slots=True)
class ChoiceUpdate:
    """What is new in one choice. `echoed` is the part of `text` that is known to be the prompt's.

    `earlier` are parts before it that are to be events of their own.
    """

    text: str = ""
    echoed: str = ""
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Position] = field(default_factory=list)
    prompt_logprobs: list[Position] = field(default_factory=list)
    finish: Finish | None = None
    earlier: list[ChoiceUpdate] = field(default_factory=list)

    @property
    def num_entries(self) -> int:
        """Its size for those who write it, in tokens with logprobs."""
        return self._num_own_entries + sum(part.num_entries for part in self.earlier)

    @property
    def size(self) -> int:
        """Tokens and entries of logprobs, without earlier parts."""
        return self.num_tokens + sum(1 + len(position.top) for position in self.logprobs)

    @property
    def _num_own_entries(self) -> int:
        positions = self.logprobs or self.prompt_logprobs
        num_tops = len(positions[0].top) if positions else 0
        num_positions = len(self.logprobs) + len(self.prompt_logprobs)
        return num_positions * (1 + num_tops) + len(self.token_ids) // IDS_PER_ENTRY


@dataclass(slots=True)
class Update:
    """What is new in a request."""

    accepted: Accepted | None = None
    choices: dict[int, ChoiceUpdate] = field(default_factory=dict)
    usage: Usage | None = None
    error: TokenloomError | None = None

    @property
    def is_last(self) -> bool:
        """Nothing follows."""
        return self.usage is not None or self.error is not None

    @property
    def num_entries(self) -> int:
        """Its size for those who write it."""
        return sum(choice.num_entries for choice in self.choices.values())

    def choice(self, index: int) -> ChoiceUpdate:
        """The update of one choice, made at need."""
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = ChoiceUpdate()
        return found


def _nothing() -> None:
    """Nobody to tell."""


class Generation:
    """A request in flight.

    Args:
        request_id: its id in every stage.
        max_buffered_bytes: text that may wait while the handler is busy; more is for a client that reads on.
        wants_prompts: the client asked for the ids of its prompts.
        may_return: the client may go away and come back for the rest.

    Attributes:
        progress: what was taken so far, for another session.
        is_over: the terminal update was made.
        is_detached: it ended for this side only.
        on_abandoned: called when this side ends the request; set by the session.
        on_slow_reader: called when the bound was hit or an ended answer was not taken in time; set by the handler.
    """

    def __init__(
        self, request_id: str, max_buffered_bytes: int, *, wants_prompts: bool = True, may_return: bool = False
    ) -> None:
        self.request_id = request_id
        self.wants_prompts = wants_prompts
        self.may_return = may_return
        self.is_detached = False
        self.progress = Progress()
        self.is_over = False
        self.on_abandoned: Callable[[], None] = _nothing
        self.on_slow_reader: Callable[[], None] = _nothing
        self._max_buffered_bytes = max_buffered_bytes
        self._num_buffered_bytes = 0
        self._num_taken_bytes = 0
        self._update = Update()
        self._texts: dict[int, list[str]] = {}
        self._has_news = asyncio.Event()
        self._is_awaited = False
        self._busy_since_s = time.monotonic()

    async def next_update(self) -> Update:
        """All that is new; waits until there is something."""
        self._is_awaited, self._num_taken_bytes = True, 0
        await self._has_news.wait()
        self._is_awaited, self._num_taken_bytes = False, self._num_buffered_bytes
        self._busy_since_s = time.monotonic()
        self._has_news.clear()
        update = self._update
        for choice_index, texts in self._texts.items():
            update.choice(choice_index).text = "".join(texts)
        self._forget()
        return update

    @property
    def num_held_bytes(self) -> int:
        """Text that waits for the client, or is being written to it."""
        return self._num_buffered_bytes + self._num_taken_bytes

    @property
    def can_go_on(self) -> bool:
        """Another session can go on with it."""
        return self.may_return or self.progress.has_all_ids

    @property
    def is_accepted(self) -> bool:
        """A tokenizer took the request, this one or one before."""
        return bool(self.progress.acceptance)

    def accept(self, accepted: Accepted, acceptance: bytes) -> None:
        """A tokenizer took the request for the first time; `acceptance` is what it sent, serialised."""
        if not self.is_over:
            self.progress.acceptance = acceptance
            self._update.accepted = accepted
            self._has_news.set()

    def add_text(
        self, choice_index: int, text: str, first_token_index: int, num_tokens: int, token_ids: Sequence[int] = ()
    ) -> None:
        """A choice went on. Tokens that do not follow those before are a fault, which ends the request."""
        if self.is_over:
            return
        progress = self.progress.choice(choice_index)
        if not num_tokens:
            self._add_echo(choice_index, progress.take_text_of_no_token(text) if text else "")
            return
        if first_token_index != progress.num_tokens:
            self.abandon(Internal(f"token {progress.num_tokens} was expected, token {first_token_index} came"))
            return
        progress.take_tokens(num_tokens, token_ids)
        update = self._update.choice(choice_index)
        if self.may_return and update.num_tokens and update.size + num_tokens > MAX_EVENT_SIZE:
            update = self._begin_part(choice_index, update)
        update.num_tokens += num_tokens
        self._add(choice_index, text)

    def _begin_part(self, choice_index: int, update: ChoiceUpdate) -> ChoiceUpdate:
        """Let what waits of a choice be an event of its own: a client that is cut off gets on by whole ones."""
        update.text = "".join(self._texts.pop(choice_index, ()))
        earlier, update.earlier = update.earlier, []
        earlier.append(update)
        self._update.choices[choice_index] = ChoiceUpdate(earlier=earlier)
        return self._update.choices[choice_index]

    def _add_echo(self, choice_index: int, text: str) -> None:
        if text:
            self._update.choice(choice_index).echoed = text
            self._add(choice_index, text)

    def _add(self, choice_index: int, text: str) -> None:
        self._texts.setdefault(choice_index, []).append(text)  # joined once, however many wait
        self._buffered(len(text) if text.isascii() else len(text.encode()))

    def add_details(
        self, choice_index: int, token_ids: list[int], logprobs: list[Position], prompt_logprobs: list[Position]
    ) -> None:
        """Ids and logprobs of tokens, for requests that asked."""
        if self.is_over:
            return
        if prompt_logprobs:
            prompt_logprobs = self.progress.choice(choice_index).take_prompt_logprobs(prompt_logprobs)
        choice = self._update.choice(choice_index)
        choice.token_ids += token_ids
        choice.logprobs += logprobs
        choice.prompt_logprobs += prompt_logprobs
        num_entries = sum(1 + len(position.top) for position in (*logprobs, *prompt_logprobs))
        self._buffered(len(token_ids) * _TOKEN_ID_BYTES + num_entries * _LOGPROB_BYTES)

    def finish_choice(self, choice_index: int, finish: Finish) -> None:
        """A choice ended."""
        if self.is_over:
            return
        if held := self.progress.choice(choice_index).take_finish():
            self._add(choice_index, held)
        if not self.is_over:
            self._update.choice(choice_index).finish = finish
            self._has_news.set()

    def complete(self, usage: Usage) -> None:
        """The request ended well."""
        if not self.is_over:
            self._update.usage = usage
            self._end()

    def fail(self, error: TokenloomError) -> None:
        """The request ended badly, by the tokenizer's word. What was told before still counts."""
        if not self.is_over:
            self._update.error = error
            self._end()

    def abandon(self, error: TokenloomError) -> None:
        """End it from this side and tell the session. Nothing happens if it is over.

        It is detached if its client may return, unless its time is up or something is wrong with it.
        """
        if not self.is_over:
            self.is_detached = self.may_return and not isinstance(error, DeadlineExceeded | Internal)
            self.fail(error)
            self.on_abandoned()

    def give_up_reader(self) -> None:
        """The client takes nothing: end it, or have an end that was not taken told as this one."""
        error = ResourceExhausted("the client did not take its answer in time", reason="SLOW_READER")
        if not self.is_over:
            self.abandon(error)
            return
        self._forget()
        self._update.error = error
        self._has_news.set()

    def expire(self, error: TokenloomError) -> None:
        """Its time is up: end it or, if only the client's taking of it is missing, tell the handler."""
        if self.is_over:
            self.on_slow_reader()
        else:
            self.abandon(error)

    def _buffered(self, num_bytes: int) -> None:
        self._num_buffered_bytes += num_bytes
        self._has_news.set()
        if self._is_awaited or self._num_buffered_bytes <= self._max_buffered_bytes:
            return
        is_stuck = time.monotonic() - self._busy_since_s >= SLOW_READER_PATIENCE_S
        if is_stuck or self._num_buffered_bytes > self._max_buffered_bytes * _BURST_FACTOR:
            self.give_up_slow_reader(f"the client left more than {self._max_buffered_bytes >> 10} KiB unread")

    def give_up_slow_reader(self, why: str) -> None:
        """Drop what waits, end the request and tell the handler."""
        self._forget()
        self.abandon(ResourceExhausted(why, reason="SLOW_READER"))
        self.on_slow_reader()

    def _forget(self) -> None:
        self._update = Update()
        self._texts = {}
        self._num_buffered_bytes = 0

    def _end(self) -> None:
        self.is_over = True
        self._has_news.set()
