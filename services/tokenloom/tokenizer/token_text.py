"""Text and bytes of single tokens, for logprobs.

A token need not be whole characters, so its bytes are worked out from the way its vocabulary writes them: byte-level
BPE spells each byte as a printable character (GPT-2), SentencePiece spells a space as U+2581 and lone bytes
as `<0x0A>`.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CACHED_TOKENS = 65_536


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Source: `bytes_to_unicode` in openai/gpt-2, encoder.py: printable Latin-1 stands for itself, other bytes for the
    code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenTexts:
    """Looks up what single tokens say.

    Args:
        tokenizer: its vocabulary and decoder; not changed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._decoders = _decoder_types(tokenizer)
        self.lookup = lru_cache(maxsize=_CACHED_TOKENS)(self._lookup)
        """lookup(token_id): the token's text alone (U+FFFD where its bytes are no whole character) and its bytes."""

    def _lookup(self, token_id: int) -> tuple[str, bytes]:
        utf8 = self._bytes_of(token_id)
        return utf8.decode("utf-8", "replace"), utf8

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # a row of the model's vocabulary that the tokenizer does not use
            return b""
        if "ByteLevel" in self._decoders:
            alphabet = byte_level_alphabet()
            if all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
            return token.encode()
        if "ByteFallback" in self._decoders and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self._decoders & {"Metaspace", "ByteFallback"}:
            return token.replace("\u2581", " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _decoder_types(tokenizer: Tokenizer) -> frozenset[str]:
    """Names of the steps of the tokenizer's decoder."""
    if tokenizer.decoder is None:
        return frozenset()
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps = state.get("decoders") or [state]
    return frozenset(step["type"] for step in steps)
