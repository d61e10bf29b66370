"""Tokens per second over the last seconds."""

from __future__ import annotations

import pytest

from tokenloom.scheduler.sliding_rate import SlidingRate


def test_rate_is_the_average_over_the_window() -> None:
    rate = SlidingRate(window_s=5.0)
    for i in range(100):
        rate.add(30, 1000.0 + i * 0.1)
    assert rate.per_second(1009.9) == pytest.approx(300, rel=0.06)


def test_rate_falls_to_exactly_zero_when_nothing_comes_any_more() -> None:
    rate = SlidingRate(window_s=5.0)
    rate.add(7, 100.0)
    rate.add(3, 102.5)
    assert rate.per_second(102.5) == 2.0
    assert rate.per_second(105.1) == 3 / 5
    assert rate.per_second(107.6) == 0.0


def test_an_idle_time_longer_than_the_window_leaves_nothing_behind() -> None:
    rate = SlidingRate(window_s=2.0)
    rate.add(1000, 0.0)
    rate.add(4, 1e6)
    assert rate.per_second(1e6) == 2.0


def test_memory_does_not_grow_with_the_number_of_events() -> None:
    rate = SlidingRate(window_s=5.0, num_slices=20)
    for i in range(100_000):
        rate.add(1, i * 0.001)
    assert len(rate._slices) <= 21
