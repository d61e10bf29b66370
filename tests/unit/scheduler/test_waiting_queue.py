"""The order of waiting requests."""

import pytest

from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.tenants import Tenant
from tokenloom.scheduler.core.waiting_queue import WaitingQueue

EVERYBODY = Tenant("")


def request(name: str, arrival: int, priority_class: int = 0) -> Request:
    made = Request(name, [1], 1, priority_class=priority_class)
    made.arrival = arrival
    made.current_class = priority_class
    made.order_key = (0.0, arrival)
    made.account = EVERYBODY
    return made


def names(queue: WaitingQueue) -> str:
    return "".join(waiting.request_id for waiting in queue)


def test_class_comes_before_arrival() -> None:
    queue = WaitingQueue()
    for waiting in (request("c", 0, 1), request("b", 2), request("d", 3, 1), request("a", 1)):
        queue.add(waiting)
    assert names(queue) == "abcd"
    assert len(queue) == 4


def test_request_that_comes_back_gets_its_old_place() -> None:
    queue = WaitingQueue()
    early, late = request("early", 0), request("late", 1)
    queue.add(early)
    queue.remove(early)
    queue.add(late)
    queue.add(early)
    assert names(queue) == "earlylate"


def test_removing_takes_out_that_request_only() -> None:
    queue = WaitingQueue()
    waiting = [request(name, arrival) for arrival, name in enumerate("abc")]
    for each in waiting:
        queue.add(each)
    queue.remove(waiting[1])
    assert names(queue) == "ac"


def test_removing_what_does_not_wait_is_found_out() -> None:
    queue = WaitingQueue()
    queue.add(request("a", 0))
    with pytest.raises(AssertionError):
        queue.remove(request("b", 0))
