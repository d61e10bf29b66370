"""What ended is kept for a time and within its bound; the one that nobody asked for longest goes first."""

from __future__ import annotations

import tracemalloc
from array import array
from typing import Any

import pytest

from tokenloom.common.metrics import REGISTRY
from tokenloom.scheduler.convert import Logprobs
from tokenloom.scheduler.core.request import FinishReason, Request
from tokenloom.scheduler.finished_store import FinishedRequest, FinishedStore
from tokenloom.scheduler.frames import TokenRow

KEEP_S = 60.0


def finished(name: str, num_tokens: int = 100, **changes: Any) -> FinishedRequest:
    fields: dict[str, Any] = {
        "request_id": name,
        "group_id": "group",
        "tenant": "",
        "cache_salt": "",
        "settings": b"settings",
        "prompt_token_ids": array("I", [5, 6]),
        "output_token_ids": array("I", range(num_tokens)),
        "told": (),
        "told_prompt": (),
        "num_without_logprobs": 0,
        "num_cached_tokens": 0,
        "reason": FinishReason.LENGTH,
        "error": None,
    }
    return FinishedRequest(**{**fields, **changes})


def names(store: FinishedStore, now_s: float = 1.0) -> list[str]:
    return [name for name in "abcdef" if store.find(name, now_s) is not None]


def test_each_is_kept_for_its_time_since_it_ended_or_was_last_asked_for() -> None:
    store = FinishedStore(KEEP_S, 1 << 20, 1 << 20)
    for at_s, name in enumerate("abc"):
        assert store.keep(finished(name), float(at_s))
    assert store.next_s == KEEP_S
    assert store.find("a", 10.0) is not None
    assert store.next_s == KEEP_S + 1, "b's turn: a was asked for"
    store.expire(KEEP_S + 1)
    assert names(store, KEEP_S + 1.5) == ["a", "c"]
    store.expire(2 * KEEP_S + 1.5)
    assert (len(store), store.num_bytes) == (0, 0)
    assert store.next_s is None


def test_beyond_the_bound_the_one_that_nobody_asked_for_longest_goes_first() -> None:
    size = finished("a").num_bytes
    store = FinishedStore(KEEP_S, 3 * size, 3 * size)
    for name in "abc":
        store.keep(finished(name), 0.0)
    store.find("a", 0.0)
    store.keep(finished("d"), 0.0)
    assert names(store) == ["a", "c", "d"]
    assert store.num_bytes == 3 * size
    store.keep(finished("e", num_tokens=100 + size // 4), 0.0)
    assert names(store) == ["d", "e"], "one that takes as much as two others"


def test_what_is_too_large_is_not_kept_and_drives_nothing_out() -> None:
    store = FinishedStore(KEEP_S, 1 << 20, 5000)
    assert store.keep(finished("a"), 0.0)
    assert not store.keep(finished("b", num_tokens=1400), 0.0)
    assert names(store) == ["a"]
    assert not FinishedStore(0.0, 1 << 20, 1 << 20).keep(finished("a"), 0.0), "no time at all"


def test_a_later_end_of_the_same_id_replaces_the_earlier_one() -> None:
    store = FinishedStore(KEEP_S, 1 << 20, 1 << 20)
    store.keep(finished("a", 100), 0.0)
    store.keep(finished("a", 7), 0.0)
    found = store.find("a", 0.0)
    assert found is not None
    assert len(found.output_token_ids) == 7
    assert store.num_bytes == finished("a", 7).num_bytes


def test_requests_and_groups_that_were_aborted_are_forgotten() -> None:
    store = FinishedStore(KEEP_S, 1 << 20, 1 << 20)
    for name, group in (("a", "g"), ("b", "g"), ("c", "h"), ("d", "h")):
        store.keep(finished(name, group_id=group), 0.0)
    store.forget("g")
    store.forget("c")
    store.forget("unknown")
    assert names(store) == ["d"]


@pytest.mark.parametrize(
    ("changes", "settings", "is_same"),
    [
        ({}, b"settings", True),
        ({"output_token_ids": [0, 1, 2]}, b"settings", True),
        ({"output_token_ids": [0, 2]}, b"settings", False),
        ({"output_token_ids": list(range(101))}, b"settings", False),
        ({"prompt_token_ids": [5, 7]}, b"settings", False),
        ({"prompt_token_ids": [5]}, b"settings", False),
        ({"tenant": "other"}, b"settings", False),
        ({"cache_salt": "other"}, b"settings", False),
        ({}, b"other seed", False),
    ],
)
def test_only_the_same_request_is_answered(changes: dict[str, Any], settings: bytes, is_same: bool) -> None:
    fields: dict[str, Any] = {"prompt_token_ids": [5, 6], "max_output_tokens": 9}
    assert finished("a").is_same(Request("a", **{**fields, **changes}), settings) == is_same


def test_one_whose_first_logprobs_are_lost_is_for_readers_that_have_these_tokens() -> None:
    for num_known, is_same in ((9, False), (10, True), (11, True)):
        request = Request("a", [5, 6], 100, output_token_ids=list(range(num_known)))
        assert finished("a", num_without_logprobs=10).is_same(request, b"settings") == is_same


def test_sizes_are_those_in_memory() -> None:
    """Within a factor, for small ones, long ones and those with logprobs."""

    def many(num_tokens: int, width: int) -> list[FinishedRequest]:
        def row(index: int) -> TokenRow:
            ids = [1000 + index + i for i in range(width)]
            return TokenRow(index, [index + 1000], Logprobs(width, ids, [float(i) for i in ids]))

        told = [tuple(row(i) for i in range(num_tokens if width else 0)) for _ in range(10)]
        return [finished(f"request-{i}", num_tokens, told=rows) for i, rows in enumerate(told)]

    for num_tokens, width in ((1, 0), (20_000, 0), (200, 1), (100, 21)):
        tracemalloc.start()
        kept = many(num_tokens, width)
        measured = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        counted = sum(one.num_bytes for one in kept)
        assert 0.6 * measured < counted < 2.5 * measured, (num_tokens, width, counted / measured)


def shown() -> tuple[float | None, ...]:
    names = ("tokenloom_num_finished_requests_kept", "tokenloom_finished_requests_kept_bytes")
    return tuple(map(REGISTRY.get_sample_value, names))


def test_the_gauges_show_what_is_kept() -> None:
    store = FinishedStore(KEEP_S, 1 << 20, 1 << 20)
    store.keep(finished("a"), 0.0)
    assert shown() == (1, finished("a").num_bytes)
    store.expire(KEEP_S)
    assert shown() == (0, 0)
