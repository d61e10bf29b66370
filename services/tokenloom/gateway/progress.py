"""What was taken of a request so far: all that it needs to go on through another session.

The text of tokens is a function of their ids, so of a choice's output its ids are kept, at 4 bytes each. What a
choice's end sets free (half a character, the begin of a stop string) is text of no token, which would come again from
another session; so it is held back until the end itself is there. A client that is back has tokens of which only the
number is known; then the next session, too, is told numbers. Echo and the prompt's logprobs come before the first
token, and what came of them before a loss is dropped when it comes again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class ChoiceProgress:
    """One choice.

    Attributes:
        token_ids: of its tokens so far; fewer than `num_tokens` if the session does not tell ids, or the client came
            back with some.
        num_tokens: of which text was taken.
        num_cached_tokens: prompt tokens that it found in the prefix cache; None: not told.
        has_echo: its prompt's text was taken.
        is_finished: its end was taken.
        has_final_text: the client came back with what its end sets free.
        held_text: text of no token behind its tokens.
    """

    token_ids: array[int] = field(default_factory=lambda: array("I"))
    num_tokens: int = 0
    num_cached_tokens: int | None = None
    has_echo: bool = False
    is_finished: bool = False
    has_final_text: bool = False
    held_text: str = ""
    _num_prompt_logprobs: int = 0
    _num_repeated: int = 0

    def take_tokens(self, num_tokens: int, token_ids: Sequence[int]) -> None:
        """More tokens; their ids, if the session tells them."""
        self.num_tokens += num_tokens
        self.token_ids.extend(token_ids)

    def take_text_of_no_token(self, text: str) -> str:
        """Echo or held text. Returns: the part of it that is news now, which is an echo that did not come before."""
        if self.num_tokens:
            self.held_text += text
            return ""
        is_news, self.has_echo = not self.has_echo, True
        return text if is_news else ""

    def take_prompt_logprobs(self, positions: list[T]) -> list[T]:
        """Logprobs of further prompt tokens. Returns: those that did not come before."""
        num_known = min(self._num_repeated, len(positions))
        self._num_repeated -= num_known
        self._num_prompt_logprobs += len(positions) - num_known
        return positions[num_known:]

    def take_finish(self) -> str:
        """Its end. Returns: the text that was held, if the client does not have it."""
        self.is_finished = True
        text, self.held_text = self.held_text, ""
        return "" if self.has_final_text else text

    def resume(self) -> None:
        """Another session goes on behind its tokens; if it has none, what stands before them comes again."""
        self.held_text = ""
        self._num_repeated = self._num_prompt_logprobs


@dataclass(slots=True)
class Progress:
    """All choices.

    Attributes:
        acceptance: the tokenizer's Accepted, serialised; empty before it came.
        choices: those of which something came, by index.
    """

    acceptance: bytes = b""
    choices: dict[int, ChoiceProgress] = field(default_factory=dict)

    def choice(self, index: int) -> ChoiceProgress:
        """The progress of one choice, made at need."""
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = ChoiceProgress()
        return found

    @property
    def num_tokens(self) -> int:
        """Tokens taken, of all choices."""
        return sum(choice.num_tokens for choice in self.choices.values())

    @property
    def has_all_ids(self) -> bool:
        """The ids of all tokens are known."""
        return all(len(choice.token_ids) == choice.num_tokens for choice in self.choices.values())

    def resume(self) -> None:
        """Another session goes on."""
        for choice in self.choices.values():
            choice.resume()
