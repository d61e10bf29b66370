"""Keeps the names of special tokens in callers' strings plain text.

A message that holds `<|im_end|>` must not end its turn. Where a caller's string holds the name of a special token, the
name is wrapped in two marks: characters of a private-use plane that occur nowhere else in the input. The rendered text
is cut at the marks into segments, and the marked ones are encoded as plain text. All else is encoded in one piece, so
that a conversation without such names gives exactly the tokens that transformers gives.

Source: `mark_control_tokens` and `encode_marked_chat` in transformers, utils/chat_template_utils.py; its marks are two
fixed characters, which it removes from callers' texts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom.common.errors import InvalidArgument
from tokenloom.tokenizer.encoder import Segment

_MAX_NAMES = 4096
_PRIVATE_PLANE = range(0xF0000, 0xF0400)


@dataclass(frozen=True)
class Marks:
    """Characters that occur nowhere in a render's input: around a name, and behind the final message."""

    start: str
    end: str
    cut: str

    def segments(self, text: str) -> Iterator[Segment]:
        """Cut rendered text at the marks: what stands between a start and an end is plain, stray marks vanish."""
        text = unescaped(unescaped(text, self.start), self.end)
        pieces = re.split(f"{self.start}([^{self.start}{self.end}]*){self.end}", text)
        for i, piece in enumerate(pieces):
            for part in re.split(f"[{self.start}{self.end}]", piece):
                if part:
                    yield Segment(part, is_plain=i % 2 == 1)


class SpecialNames:
    """Finds the names of special tokens.

    Args:
        names: how the special tokens are written; empty lets callers write special tokens.
    """

    def __init__(self, names: Sequence[str]) -> None:
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def marked(self, inputs: dict[str, Any], strings: Sequence[str], marks: Marks) -> dict[str, Any]:
        """`inputs` (JSON values) with the names in their strings wrapped in marks; the same object if there are none.

        Args:
            strings: all strings in `inputs`.

        Raises: InvalidArgument if the strings hold more than 4,096 names; each becomes a segment of its own.
        """
        pattern = self._pattern
        found = (match for text in strings for match in pattern.finditer(text)) if pattern else iter(())
        num_found = sum(1 for _ in itertools.islice(found, _MAX_NAMES + 1))
        if num_found > _MAX_NAMES:
            message = f"the messages hold more than {_MAX_NAMES} names of special tokens"
            raise InvalidArgument(message, field="messages")
        if pattern is None or not num_found:
            return inputs
        wrapped = f"{marks.start}\\g<0>{marks.end}"
        changed: dict[str, Any] = _mapped(inputs, lambda text: pattern.sub(wrapped, text))
        return changed


def free_marks(strings: Sequence[str]) -> Marks:
    """Marks that no string holds.

    Raises: InvalidArgument if the strings use up a thousand private-use characters.
    """
    used = {char for text in strings if not text.isascii() for char in text}
    free = (char for point in _PRIVATE_PLANE if (char := chr(point)) not in used)
    found = list(itertools.islice(free, 3))
    if len(found) < 3:
        raise InvalidArgument("the messages use up the private-use characters U+F0000 to U+F03FF", field="messages")
    return Marks(*found)


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, names in objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


def unescaped(text: str, mark: str) -> str:
    """Undo what `tojson(ensure_ascii=true)` does to a mark."""
    return text.replace(json.dumps(mark)[1:-1], mark)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with `change` applied to all of its strings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value
