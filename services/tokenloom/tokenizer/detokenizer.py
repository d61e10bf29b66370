"""Token ids to text, a few at a time.

The tokenizers library's stream decoder returns text as soon as it ends with a whole character, and decodes what waits
again with every token. So tokens whose end never is one (bytes that are no text) would wait for ever, at a quadratic
cost. But only the last character can still change: beyond a few waiting tokens all before it is told, and the decoder
starts again from the last ones. What waits at the end (half a character) is told by `flush`. The joined pieces equal
the whole decode, except for byte tokens of SentencePiece that are no UTF-8, which the whole decode judges by their run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_MAX_WAITING_TOKENS = 8
_KEPT_TOKENS = 4  # hold the last character's bytes: it has at most four, and each token has at least one
_HALF_CHARACTER = "\ufffd"


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
        self._window: list[int] = []
        """The token with which the stream last returned text, if it did, and those that wait behind it."""
        self._has_returned = False
        self._num_told = 0
        """Characters of the stream's next text that were told already."""

    def push(self, token_id: int) -> str:
        """Take a token and return the text that it completes; empty inside a character."""
        if token_id in self._skipped:
            return ""
        text = self._step(token_id)
        return self._settle() if len(self._window) > _MAX_WAITING_TOKENS + 1 else text

    def flush(self) -> str:
        """Return the text of the tokens whose character never became whole; for the end of the choice."""
        tail = self._waiting()[self._num_told :]
        self._num_told += len(tail)
        return tail

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # SentencePiece bytes behind a character that was told: their run is no longer UTF-8
            text = self._waiting()
            self._stream = DecodeStream(skip_special_tokens=False)
            self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        text = text[self._num_told :]
        self._window, self._has_returned, self._num_told = [token_id], True, 0
        return text

    def _waiting(self) -> str:
        """The text that the stream has not returned, half a character at its end included."""
        num_returned = len(self._decode(self._window[:1])) if self._has_returned else 0
        return self._decode(self._window)[num_returned:]

    def _settle(self) -> str:
        """Return what waits but for the last character, and let the stream start again from the last tokens."""
        waiting = self._waiting()
        is_half = waiting.endswith(_HALF_CHARACTER)
        text = waiting[self._num_told : len(waiting) - is_half]
        kept = [*self._window[:1], *self._window[-_KEPT_TOKENS:]]
        self._stream = DecodeStream(skip_special_tokens=False)
        self._window, self._has_returned, self._num_told = [], False, 0
        for token_id in kept:
            self._step(token_id)
        self._num_told = len(self._waiting()) - is_half
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def decode_whole(tokenizer: Tokenizer, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
    """The text of all of `token_ids` at once."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
