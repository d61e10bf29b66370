"""Requests of lower classes rise with their age."""

import pytest

from tokenloom.scheduler.core.ageing import Ageing
from tokenloom.scheduler.core.request import FinishReason, Request


def watched(ageing: Ageing, priority_class: int, submitted_s: float = 0.0) -> Request:
    request = Request("a", [1], 1, priority_class=priority_class, submitted_s=submitted_s)
    request.current_class = ageing.class_of(request, submitted_s)
    ageing.watch(request, num_living=1)
    return request


def test_class_falls_by_one_per_age_down_to_the_most_urgent() -> None:
    ageing = Ageing(10.0, num_classes=4)
    request = Request("a", [1], 1, priority_class=2, submitted_s=100.0)
    assert [ageing.class_of(request, now_s) for now_s in (90.0, 100.0, 109.9, 110.0, 120.0, 500.0)] == [
        2,
        2,
        2,
        1,
        0,
        0,
    ]


def test_class_beyond_the_last_counts_as_that() -> None:
    assert watched(Ageing(10.0, num_classes=4), priority_class=1000).current_class == 3


def test_nobody_rises_without_ageing() -> None:
    ageing = Ageing(0.0, num_classes=4)
    request = watched(ageing, priority_class=3)
    assert ageing.class_of(request, 1e9) == 3
    assert ageing.pop_due(1e9) == []


def test_due_requests_are_told_once_with_their_new_class() -> None:
    ageing = Ageing(10.0, num_classes=4)
    request = watched(ageing, priority_class=3)
    assert ageing.pop_due(9.9) == []
    assert ageing.pop_due(25.0) == [(request, 1)]
    assert ageing.pop_due(25.0) == [], "it is watched no more"
    request.current_class = 1
    ageing.watch(request, num_living=1)
    assert ageing.pop_due(30.0) == [(request, 0)]
    request.current_class = 0
    ageing.watch(request, num_living=1)
    assert ageing.pop_due(1e9) == []


@pytest.mark.parametrize("ageing_s", [0.1, 0.3, 1 / 3, 0.7, 1e-3])
def test_whoever_is_due_rises_however_the_division_rounds(ageing_s: float) -> None:
    ageing = Ageing(ageing_s, num_classes=100)
    request = watched(ageing, priority_class=99, submitted_s=0.1)
    for num_risen in range(1, 100):
        ((_, new_class),) = ageing.pop_due(0.1 + num_risen * ageing_s)
        assert new_class <= 99 - num_risen
        request.current_class = 99 - num_risen
        ageing.watch(request, num_living=1)


def test_requests_that_ended_are_not_told() -> None:
    ageing = Ageing(10.0, num_classes=4)
    watched(ageing, priority_class=3).finish_reason = FinishReason.ABORTED
    assert ageing.pop_due(100.0) == []
