"""Logprobs as OpenAI and vLLM write them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from tokenloom.gateway.generation import ChoiceUpdate, Logprob, Position

# JSON has no infinity; OpenAI writes this for a token that cannot come.
_LOWEST = -9999.0


def chat_logprobs(positions: Sequence[Position]) -> dict[str, Any]:
    """OpenAI's `logprobs` of a chat choice."""
    return {
        "content": [
            {**_chat_entry(position.token), "top_logprobs": [_chat_entry(entry) for entry in position.top]}
            for position in positions
        ],
        "refusal": None,
    }


def _chat_entry(entry: Logprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": max(entry.value, _LOWEST), "bytes": list(entry.utf8)}


class EchoedPrompt:
    """The logprobs of a prompt that is echoed, which come once and go out with each of its choices.

    Args:
        num_tokens: tokens of the prompt; 0 if not known, then the first generated token tells that it is complete.

    Attributes:
        positions: logprobs of its tokens from the second on, as far as they came.
        is_complete: all came.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.positions: list[Position] = []
        self.is_complete = num_tokens == 1

    def add(self, update: ChoiceUpdate) -> None:
        """Take in what an update of the prompt's first choice brought."""
        self.positions += update.prompt_logprobs
        has_all = len(self.positions) >= self._num_tokens - 1 if self._num_tokens else bool(update.logprobs)
        self.is_complete = self.is_complete or has_all or update.finish is not None


class CompletionLogprobs:
    """OpenAI's `logprobs` of one completion choice: parallel lists, whose offsets run on over a stream's chunks.

    Offsets count characters of the text. A character may be spread over tokens; each of them has its offset.

    Args:
        prompt: comes first; generated tokens are held until it is complete. None without echo. Its first token has no
            logprob; its text is what the echoed text has before the second token.
    """

    def __init__(self, prompt: EchoedPrompt | None) -> None:
        self._prompt = prompt
        self._decoder = _new_decoder()
        self._offset = 0
        self._text = ""
        self._echoed = ""
        self._held: list[Position] = []

    @property
    def is_holding(self) -> bool:
        """Its prompt did not go out yet."""
        return self._prompt is not None

    def render(self, update: ChoiceUpdate) -> dict[str, Any]:
        """The lists for a chunk. With the choice's end nothing is held any more."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        positions: Sequence[Position] = update.logprobs
        if self._prompt is not None:
            self._text += update.text
            self._echoed += update.echoed
            self._held += update.logprobs
            if not self._prompt.is_complete and update.finish is None:
                return lists
            self._append_prompt(lists, self._prompt.positions)
            positions, self._prompt = self._held, None
        for position in positions:
            self._append(lists, position)
        return lists

    def _append_prompt(self, lists: dict[str, list[Any]], positions: Sequence[Position]) -> None:
        tokens = [position.token.utf8 for position in positions]
        if self._echoed:
            first, are_text = _split_from_end(self._echoed.encode(), tokens)
        else:
            following = tokens or [position.token.utf8 for position in self._held]
            first, are_text = _split_from_start(self._text.encode(), following), [True] * len(tokens)
        lists["tokens"].append(first.decode(errors="replace"))
        lists["token_logprobs"].append(None)
        lists["top_logprobs"].append(None)
        lists["text_offset"].append(0)
        self._offset += len(self._decoder.decode(first))
        for position, is_text in zip(positions, are_text, strict=True):
            self._append(lists, position, is_text)

    def _append(self, lists: dict[str, list[Any]], position: Position, is_text: bool = True) -> None:
        token = position.token
        lists["tokens"].append(token.text)
        lists["token_logprobs"].append(max(token.value, _LOWEST))
        lists["top_logprobs"].append(_with_token(position))
        lists["text_offset"].append(self._offset)
        if is_text:
            self._offset += len(self._decoder.decode(token.utf8))


def _new_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _with_token(position: Position) -> dict[str, float]:
    """The most likely tokens and, as with OpenAI, the one that stands there even if it is not among them."""
    top: dict[str, float] = {}
    for entry in (*position.top, position.token):
        top.setdefault(entry.text, max(entry.value, _LOWEST))
    return top


def _split_from_end(text: bytes, tokens: Sequence[bytes]) -> tuple[bytes, list[bool]]:
    """What a prompt's text has before its known tokens, and which of these are in it (special ones may not be)."""
    end, are_text = len(text), []
    for token in reversed(tokens):
        are_text.append(text.endswith(token, 0, end))
        end -= len(token) if are_text[-1] else 0
    return text[:end], are_text[::-1]


def _split_from_start(text: bytes, tokens: Sequence[bytes]) -> bytes:
    """What a text has before the tokens that are known, if it is not known where the prompt ends in it.

    A text that repeats itself leaves a choice; a first token of at least one byte is more likely than an empty one.
    """
    known = b"".join(tokens)
    start = text.find(known, 1)
    return text[: max(start, 0)]


def prompt_logprobs(positions: Iterable[Position]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token a map from token id to logprob, null for the first token."""
    return [None, *(_prompt_entry(position) for position in positions)]


def _prompt_entry(position: Position) -> dict[str, Any]:
    ranks = {entry.token_id: rank for rank, entry in enumerate(position.top, start=1)}
    return {
        str(entry.token_id): {
            "logprob": max(entry.value, _LOWEST),
            "rank": ranks.get(entry.token_id),
            "decoded_token": entry.text,
        }
        for entry in (position.token, *position.top)
    }
