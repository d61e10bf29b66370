"""The short form of `make soak`. Memory is judged by the long form alone: half a minute is mostly warming up."""

from __future__ import annotations

import asyncio

import pytest

from tests.soak.memory import slope_of
from tests.soak.run import Plan, soak


def test_under_load_with_aborts_and_kills_no_request_fails_and_nothing_is_held_at_the_end() -> None:
    report = asyncio.run(soak(Plan(load_s=20.0, kill_every_s=5.0, capacity_s=3.0, share=0.5)))
    assert not report.problems(max_slope_mib=None)
    assert set(report.kills.values()) == {1}
    assert report.tally.num_done > 100
    assert report.tally.num_aborted > 5


def test_the_slope_is_that_of_the_line_through_the_samples() -> None:
    assert slope_of([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == pytest.approx(2.0)
    assert slope_of([(0.0, 4.0), (1.0, 4.0), (5.0, 4.0)]) == pytest.approx(0.0)
