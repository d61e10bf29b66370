"""Logprobs as OpenAI and vLLM write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenloom.gateway.generation import Logprob, Position

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


class CompletionLogprobs:
    """OpenAI's `logprobs` of one completion choice: parallel lists, whose offsets run on over a stream's chunks.

    With `echo` the prompt's tokens come first. The first of them has no logprob; its text is what the echoed text has
    before the second token.

    Args:
        echo: the text begins with the prompt's.
    """

    def __init__(self, echo: bool) -> None:
        self._echo = echo
        self._offset = 0
        self._echoed = ""
        self._has_begun = False

    def render(self, text: str, prompt: Sequence[Position], positions: Sequence[Position]) -> dict[str, Any]:
        """The lists for a chunk.

        Args:
            text: the chunk's text.
            prompt: logprobs of prompt tokens from the second on; left out without echo.
            positions: logprobs of generated tokens.
        """
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._echo and not self._has_begun:
            self._begin(lists, text, prompt or positions)
        for position in (*(prompt if self._echo else ()), *positions):
            top = {entry.text: max(entry.value, _LOWEST) for entry in position.top}
            self._append(lists, position.token.text, max(position.token.value, _LOWEST), top)
        return lists

    def _begin(self, lists: dict[str, list[Any]], text: str, known: Sequence[Position]) -> None:
        self._echoed += text
        if known:
            rest = self._echoed.find("".join(position.token.text for position in known))
            self._append(lists, self._echoed[: max(rest, 0)], None, None)
            self._has_begun = True

    def _append(self, lists: dict[str, list[Any]], token: str, logprob: float | None, top: Any) -> None:
        lists["tokens"].append(token)
        lists["token_logprobs"].append(logprob)
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(self._offset)
        self._offset += len(token)


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
