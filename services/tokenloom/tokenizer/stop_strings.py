"""Finds stop strings in text that arrives in pieces.

Each stop string is matched by its Knuth-Morris-Pratt automaton, whose state is the length of the longest prefix of the
stop string that the text so far ends with. The largest state is therefore exactly how much text must be held back, and
the cost per character does not depend on the strings' lengths.

The first stop string to be complete wins; of several that end at the same character, the longest. So the result does
not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


def failure_table(pattern: str) -> tuple[int, ...]:
    """For each prefix of `pattern` the length of its longest proper prefix that is also its suffix.

    Source: Knuth, Morris and Pratt, Fast pattern matching in strings, SIAM J. Comput. 6(2), 1977.
    """
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return tuple(table)


class StopStrings:
    """The stop strings of a request, prepared once for all of its choices.

    Args:
        strings: none of them empty.
        is_included: a found stop string stays at the end of the text.
    """

    def __init__(self, strings: Sequence[str], is_included: bool = False) -> None:
        # Longest first, so that the first to be complete at a character is the longest.
        self.patterns = tuple((s, failure_table(s)) for s in sorted(set(strings), key=len, reverse=True))
        self.is_included = is_included


class StopMatcher:
    """Passes one choice's text on, holding back only what may still be the start of a stop string."""

    def __init__(self, stop_strings: StopStrings) -> None:
        self._patterns = stop_strings.patterns
        self._is_included = stop_strings.is_included
        self._states = [0] * len(self._patterns)
        self._held = ""
        self.found = ""
        """The stop string that was found; empty so far. Nothing may be pushed after it."""

    def push(self, text: str) -> str:
        """Take more text and return what can be passed on; sets `found` if a stop string is complete."""
        if not self._patterns:
            return text
        window = self._held + text
        for offset, char in enumerate(text, len(self._held) + 1):
            if self._advance(char):
                end = offset if self._is_included else offset - len(self.found)
                self._held = ""
                return window[:end]
        num_held = max(self._states)
        cut = len(window) - num_held
        self._held = window[cut:]
        return window[:cut]

    def flush(self) -> str:
        """Return the text still held back; for the end of the choice."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> bool:
        """Move every automaton over `char`; True if a stop string is complete now."""
        for i, (pattern, table) in enumerate(self._patterns):
            state = self._states[i]
            while state and pattern[state] != char:
                state = table[state - 1]
            if pattern[state] == char:
                state += 1
            if state == len(pattern):
                self.found = pattern
                return True
            self._states[i] = state
        return False
