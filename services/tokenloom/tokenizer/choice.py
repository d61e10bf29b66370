"""One choice in flight: its tokens to text, its logprobs, its end.

Text after any token is a function of the ids up to it alone: of the stream decoder, which waits for whole characters,
and the stop matcher, which holds back what may be the start of a stop string. So a choice that is taken up again from
its ids goes on exactly where its reader stopped. If the reader knows only their number, they come from the engine again
and are taken in silence (`skip`). Only what the end sets free is no such function: it is told as text of no token, so
that a reader who did not see the end knows what to drop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from tokenloom.common.errors import Cancelled, DeadlineExceeded, Internal, TokenloomError
from tokenloom.tokenizer.detokenizer import Detokenizer
from tokenloom.tokenizer.domain import Submission
from tokenloom.tokenizer.events import (
    MAX_LOGPROBS_PER_EVENT,
    MAX_SMALL_DELTA,
    TIME_IS_UP,
    ChoiceFinished,
    Delta,
    EngineFinish,
    EngineFinishReason,
    FinishReason,
    PositionLogprobs,
)
from tokenloom.tokenizer.stop_strings import StopMatcher, StopStrings

_MAX_PROMPT_LOGPROBS_PER_DELTA = 256


@dataclass(frozen=True)
class ChoiceRules:
    """What all choices of a request share.

    Args:
        skipped_token_ids: special tokens that are left out of the text.
        end_token_ids: tokens that end a choice; they are never text.
        stop_strings: prepared once, since their tables cost time.
        return_token_ids: the caller asked for the ids of deltas.
    """

    tokenizer: Tokenizer
    skipped_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    stop_strings: StopStrings
    return_token_ids: bool


class ChoiceOwner(Protocol):
    """The request that a choice belongs to."""

    def on_choice_started(self, choice: Choice) -> None:
        """The engine shows the first sign of it."""

    def on_choice_delta(self, delta: Delta) -> None:
        """More of it."""

    def on_choice_finished(self, choice: Choice, finished: ChoiceFinished) -> None:
        """It ended well. With a stop string the engine has to be told."""

    def on_choice_failed(self, error: TokenloomError) -> None:
        """It ended badly."""


class Choice:
    """An `EngineListener` that turns the engine's tokens into deltas."""

    def __init__(self, owner: ChoiceOwner, rules: ChoiceRules, submission: Submission) -> None:
        self._owner = owner
        self._rules = rules
        self._submission = submission
        self._detokenizer = Detokenizer(rules.tokenizer, rules.skipped_token_ids)
        self._matcher = StopMatcher(rules.stop_strings)
        self._token_ids: list[int] = []
        self._next_prompt_position = 1
        self._num_skipped = 0
        self._delta = self._next_delta()
        self.handle = 0
        """The engine session's name for it, set by who submits it."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache; None until the engine began to run it."""
        self.is_open = True
        """It has not ended."""

    def resume(self, token_ids: Sequence[int]) -> None:
        """Take ids that its reader has; deltas begin behind them. A long run may come in several calls.

        Whoever has a token has the prompt's logprobs, which come before it.
        """
        for token_id in token_ids:
            self._push(token_id)
        if token_ids:
            self._next_prompt_position = len(self._submission.prompt_token_ids)
        self._delta = self._next_delta()

    def skip(self, num_tokens: int) -> None:
        """Say nothing of the first tokens: its reader has them. A choice that has ended by then tells just its end."""
        self._num_skipped = num_tokens
        if num_tokens:
            self._next_prompt_position = len(self._submission.prompt_token_ids)

    def set_ended(self, token_ids: Sequence[int], num_skipped: int = 0) -> None:
        """Its reader saw its end: nothing more is told. Its tokens, by ids or number, count in the usage."""
        self._token_ids += token_ids
        self._num_skipped = num_skipped
        self.is_open = False

    @property
    def submission(self) -> Submission:
        """What the engine was, or will be, sent."""
        return self._submission

    @property
    def index(self) -> int:
        """Its number in the request."""
        return self._submission.choice_index

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids so far, those it was resumed with included."""
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens that it has; before any came from the engine, those that its reader counted."""
        return len(self._token_ids) or self._num_skipped

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Prompt logprobs were asked for and have not all arrived."""
        is_asked = self._submission.sampling.num_prompt_logprobs is not None
        return is_asked and self._next_prompt_position < len(self._submission.prompt_token_ids)

    # --- what the engine reports ---

    def on_started(self, num_cached_tokens: int) -> None:
        """The engine began to run it; a later start is a resumption and changes nothing."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(num_cached_tokens, len(self._submission.prompt_token_ids))
            self._delta.num_cached_tokens = self.num_cached_tokens
        self._owner.on_choice_started(self)

    def on_prompt_logprobs(self, first_position: int, logprobs: list[PositionLogprobs]) -> None:
        """Pass logprobs of the prompt on, in deltas of bounded size; what came before is cut off.

        Raises: Internal if positions are missing in between.
        """
        num_known = self._next_prompt_position - first_position
        if num_known < 0:
            missing = f"{self._next_prompt_position} to {first_position - 1}"
            raise Internal(f"logprobs of the prompt's tokens {missing} were lost")
        new = logprobs[num_known:]
        self._next_prompt_position += len(new)
        self._owner.on_choice_started(self)
        width = max((len(position.token_ids) for position in new), default=1)
        step = max(1, min(_MAX_PROMPT_LOGPROBS_PER_DELTA, MAX_LOGPROBS_PER_EVENT // width))
        for start in range(0, len(new), step):
            self._owner.on_choice_delta(Delta(self.index, prompt_logprobs=new[start : start + step]))

    def on_tokens(self, first_token_index: int, token_ids: list[int], logprobs: list[PositionLogprobs]) -> None:
        """Take new tokens, without those known already, and pass on what they say.

        Raises: Internal if tokens are missing in between.
        """
        num_known = len(self._token_ids) - first_token_index
        if num_known < 0:
            raise Internal(f"tokens {len(self._token_ids)} to {first_token_index - 1} of the choice were lost")
        self._owner.on_choice_started(self)
        for i in range(num_known, len(token_ids)):
            self._push(token_ids[i])
            if len(self._token_ids) > self._num_skipped:
                self._account(token_ids[i], logprobs[i] if logprobs else None)
                if self._submission.is_resumable and self._delta.size >= MAX_SMALL_DELTA:
                    self._send(is_last=False)
            elif len(self._token_ids) == self._num_skipped:
                self._drop_text()
            if self._matcher.found:
                self._finish_by_stop_string()
                return
        if len(self._token_ids) >= self._num_skipped:
            self._send(is_last=False)

    def on_finished(self, finish: EngineFinish) -> None:
        """End the choice as the engine says."""
        if not self.is_open:
            return
        if finish.reason in (EngineFinishReason.STOP_TOKEN, EngineFinishReason.LENGTH):
            self._owner.on_choice_started(self)  # one that failed before it began was never accepted
        match finish.reason:
            case EngineFinishReason.STOP_TOKEN:
                last = self._token_ids[-1] if self._token_ids else None
                self._finish(FinishReason.STOP, last if last in self._submission.stop.stop_token_ids else None)
            case EngineFinishReason.LENGTH:
                self._finish(FinishReason.LENGTH)
            case EngineFinishReason.DEADLINE:
                self.on_failed(DeadlineExceeded(TIME_IS_UP))
            case EngineFinishReason.ABORTED:
                self.on_failed(Cancelled("the request was aborted", reason="ABORTED"))
            case EngineFinishReason.ERROR:
                self.on_failed(finish.error or Internal("the engine failed"))

    def on_failed(self, error: TokenloomError) -> None:
        """End the choice badly."""
        if self.is_open:
            self.is_open = False
            self._owner.on_choice_failed(error)

    def end_if_complete(self) -> bool:
        """End the choice if nothing can follow its ids; for a session that was lost just before its end was told."""
        if not self.is_open:
            return True
        if not self._token_ids or self.needs_prompt_logprobs:
            return False
        last, limit = self._token_ids[-1], self._submission.stop.max_tokens
        is_stopped = last in self._rules.end_token_ids and len(self._token_ids) > self._submission.stop.min_tokens
        if self._matcher.found:
            self._owner.on_choice_started(self)
            self._finish_by_stop_string()
        elif is_stopped or (limit is not None and len(self._token_ids) >= limit):
            reason = EngineFinishReason.STOP_TOKEN if is_stopped else EngineFinishReason.LENGTH
            self.on_finished(EngineFinish(reason, None))
        return not self.is_open

    # --- text ---

    def _push(self, token_id: int) -> None:
        """Add a token and its text."""
        self._token_ids.append(token_id)
        if token_id not in self._rules.end_token_ids:
            self._add_text(self._detokenizer.push(token_id))

    def _add_text(self, text: str) -> None:
        """Pass text on through the matcher; text of the first `min_tokens` tokens can neither be nor begin a stop."""
        if len(self._token_ids) <= self._submission.stop.min_tokens:
            self._delta.text += text
        elif text and not self._matcher.found:
            self._delta.text += self._matcher.push(text)

    def _account(self, token_id: int, logprobs: PositionLogprobs | None) -> None:
        """Count a token in the next delta."""
        self._delta.num_tokens += 1
        self._delta.token_ids.append(token_id)
        if logprobs is not None:
            self._delta.logprobs.append(logprobs)

    def _send(self, is_last: bool) -> None:
        """Pass the gathered delta on if it says something; text may lag behind its tokens."""
        delta = self._delta
        if delta.text or delta.has_extras or (is_last and delta.num_tokens):
            self._delta = self._next_delta()
            self._owner.on_choice_delta(delta)

    def _drop_text(self) -> None:
        """Begin a new delta: what was gathered was told before."""
        num_cached_tokens = self._delta.num_cached_tokens
        self._delta = self._next_delta()
        self._delta.num_cached_tokens = num_cached_tokens

    def _next_delta(self) -> Delta:
        return Delta(
            self.index,
            first_token_index=len(self._token_ids),
            is_ids_wanted=self._rules.return_token_ids,
            is_kept_small=self._submission.is_resumable,
        )

    # --- ends ---

    def _finish(self, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """End by token: what is held back is text after all, unless it completes a stop string."""
        if len(self._token_ids) < self._num_skipped:
            self._end(ChoiceFinished(self.index, reason, stop_token_id=stop_token_id))
            return
        self._send(is_last=True)
        self._add_text(self._detokenizer.flush())
        if self._matcher.found:
            self._finish_by_stop_string()
            return
        self._delta.text += self._matcher.flush()
        self._end(ChoiceFinished(self.index, reason, stop_token_id=stop_token_id))

    def _finish_by_stop_string(self) -> None:
        self._end(ChoiceFinished(self.index, FinishReason.STOP, stop_string=self._matcher.found))

    def _end(self, finished: ChoiceFinished) -> None:
        if len(self._token_ids) < self._num_skipped:
            self._drop_text()
        self._send(is_last=True)
        self.is_open = False
        self._owner.on_choice_finished(self, finished)
