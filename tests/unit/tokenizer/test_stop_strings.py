from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.tokenizer.stop_strings import StopMatcher, StopStrings, failure_table

TEXTS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str], is_included: bool) -> tuple[str, str]:
    """The text up to the first stop string to be complete (the longest of several), and that stop string."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            found = max(complete, key=len)
            return text[: end if is_included else end - len(found)], found
    return text, ""


def feed(matcher: StopMatcher, pieces: list[str]) -> str:
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        if matcher.found:
            return out
    return out + matcher.flush()


@given(TEXTS, STOPS, st.booleans(), st.lists(st.integers(1, 5), min_size=24, max_size=24))
def test_matcher_equals_a_naive_search_however_the_text_is_cut(
    text: str, stops: list[str], is_included: bool, sizes: list[int]
) -> None:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    matcher = StopMatcher(StopStrings(stops, is_included))

    assert (feed(matcher, pieces), matcher.found) == naive(text, stops, is_included)


@given(TEXTS, STOPS)
def test_only_what_may_still_be_the_start_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    passed = matcher.push(text)
    if not matcher.found:
        held = text[len(passed) :]
        longest = max(k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k]))
        assert len(held) == longest


def test_a_stop_string_over_three_pieces_is_never_leaked() -> None:
    matcher = StopMatcher(StopStrings(["###END"]))
    assert [matcher.push(piece) for piece in ("text #", "##E", "ND more")] == ["text ", "", ""]
    assert matcher.found == "###END"


def test_a_stop_string_inside_one_piece_is_found() -> None:
    matcher = StopMatcher(StopStrings(["b"]))
    assert matcher.push("abc") == "a"
    assert matcher.found == "b"


def test_held_text_comes_at_the_end_if_the_stop_string_never_does() -> None:
    matcher = StopMatcher(StopStrings(["lazy\0"]))
    assert matcher.push("the lazy") == "the "
    assert matcher.flush() == "lazy"


def test_an_included_stop_string_ends_the_text() -> None:
    matcher = StopMatcher(StopStrings(["END"], is_included=True))
    assert matcher.push("x EN") + matcher.push("D tail") == "x END"


def test_without_stop_strings_text_passes_at_once() -> None:
    matcher = StopMatcher(StopStrings([]))
    assert matcher.push("any") == "any"
    assert matcher.flush() == ""


@pytest.mark.parametrize(("pattern", "table"), [("a", (0,)), ("aab", (0, 1, 0)), ("abababc", (0, 0, 1, 2, 3, 4, 0))])
def test_failure_table_has_the_lengths_of_the_borders(pattern: str, table: tuple[int, ...]) -> None:
    assert failure_table(pattern) == table
