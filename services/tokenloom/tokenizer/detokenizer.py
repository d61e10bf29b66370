"""Token ids to text, a few at a time.

The tokenizers library's stream decoder returns text as soon as it is whole characters, at a cost that does not grow
with the length of the text. What it still holds at the end (half a character) is told by decoding everything once, so
that the joined pieces always equal the whole decode.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Decodes the tokens of one choice.

    Args:
        tokenizer: decodes; not changed.
        special_token_ids: ids that are left out of the text; empty to show them.
    """

    def __init__(self, tokenizer: Tokenizer, special_token_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped = special_token_ids
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._num_emitted = 0
        self._is_behind = False

    def push(self, token_id: int) -> str:
        """Take a token and return the text that it completes; empty inside a character."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id)
        self._is_behind = text is None
        self._num_emitted += len(text or "")
        return text or ""

    def flush(self) -> str:
        """Return the text of the tokens whose character never became whole; for the end of the choice."""
        if not self._is_behind:
            return ""
        self._is_behind = False
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        tail = whole[self._num_emitted :]
        self._num_emitted += len(tail)
        return tail


def decode_whole(tokenizer: Tokenizer, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
    """The text of all of `token_ids` at once."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
