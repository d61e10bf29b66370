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


def of_tenant(tenant: Tenant, name: str, arrival: int, priority_class: int = 0) -> Request:
    made = request(name, arrival, priority_class)
    made.account = tenant
    return made


def walked(queue: WaitingQueue, max_passed: int = 1000) -> str:
    """The order in which a walk comes by, taking nobody."""
    walk, seen = queue.walk(max_passed), ""
    while walk.head is not None:
        seen += walk.head.request_id
        walk.pass_request()
    walk.end()
    return seen


def test_tenant_with_the_lowest_counter_comes_first_and_its_requests_in_their_order() -> None:
    queue, a, b = WaitingQueue(), Tenant("a", counter=5.0), Tenant("b", counter=3.0)
    for made in (of_tenant(a, "p", 0), of_tenant(a, "q", 1), of_tenant(b, "s", 3), of_tenant(b, "r", 2)):
        queue.add(made)
    assert walked(queue) == "rspq"
    b.counter = 9.0
    assert walked(queue) == "pqrs", "counters that rose in the meantime count"


def test_plain_queue_knows_no_tenants() -> None:
    queue, a, b = WaitingQueue(is_fair=False), Tenant("a", counter=5.0), Tenant("b", counter=3.0)
    for made in (of_tenant(a, "p", 0), of_tenant(b, "q", 1), of_tenant(a, "r", 2)):
        queue.add(made)
    assert walked(queue) == "pqr"


def test_charging_the_tenant_of_who_was_taken_lets_others_go_first() -> None:
    queue, a, b = WaitingQueue(), Tenant("a"), Tenant("b", counter=1.0)
    for made in (of_tenant(a, "p", 0), of_tenant(a, "q", 1), of_tenant(b, "r", 2)):
        queue.add(made)
    walk, taken = queue.walk(1000), ""
    while (head := walk.head) is not None:
        queue.remove(head)
        head.account.counter += 2.0
        walk.take()
        taken += head.request_id
    walk.end()
    assert taken == "prq"
    assert len(queue) == 0


def test_passing_a_tenant_passes_all_its_requests_of_the_class() -> None:
    queue, a, b = WaitingQueue(), Tenant("a"), Tenant("b", counter=1.0)
    for made in (of_tenant(a, "p", 0), of_tenant(a, "q", 1), of_tenant(b, "r", 2), of_tenant(a, "s", 3, 1)):
        queue.add(made)
    walk = queue.walk(1000)
    walk.pass_tenant()
    assert walk.head is not None
    assert walk.head.request_id == "r"
    walk.pass_tenant()
    assert walk.head is not None
    assert walk.head.request_id == "s"
    walk.end()
    walk = queue.walk(1000)
    walk.pass_tenant(is_last_class=True)
    walk.pass_tenant()
    assert walk.head is None
    walk.end()
    assert walked(queue) == "pqrs"


def test_walk_passes_only_so_many() -> None:
    queue = WaitingQueue()
    for arrival, name in enumerate("abcdef"):
        queue.add(request(name, arrival))
    assert walked(queue, max_passed=3) == "abc"
    assert walked(queue) == "abcdef"


def test_request_that_comes_back_during_a_walk_is_there_afterwards() -> None:
    queue, a, b = WaitingQueue(), Tenant("a"), Tenant("b", counter=1.0)
    queue.add(of_tenant(a, "p", 5))
    queue.add(of_tenant(b, "r", 6))
    walk = queue.walk(1000)
    walk.pass_tenant()
    queue.add(of_tenant(a, "o", 0))
    assert walk.head is not None
    assert walk.head.request_id == "r"
    walk.pass_request()
    assert walk.head is None, "the walk is through with the first tenant"
    walk.end()
    assert walked(queue) == "opr"


def test_counts_follow_requests_and_tokens_in_all_and_by_tenant() -> None:
    queue, a = WaitingQueue(), Tenant("a")
    made = of_tenant(a, "p", 0)
    queue.add(made)
    made.append_output(7)
    queue.note_grown(made, 1)
    assert (len(queue), queue.num_tokens, a.num_waiting, a.num_waiting_tokens) == (1, 2, 1, 2)
    queue.remove(made)
    assert (len(queue), queue.num_tokens, a.num_waiting, a.num_waiting_tokens) == (0, 0, 0, 0)


def test_last_of_a_tenant_is_of_the_lowest_class_and_never_ran() -> None:
    queue, a = WaitingQueue(), Tenant("a")
    ran, resubmitted = of_tenant(a, "ran", 9, 2), of_tenant(a, "again", 8, 2)
    ran.num_cached_tokens, resubmitted.is_resubmission = 0, True
    for made in (of_tenant(a, "p", 0), of_tenant(a, "q", 1, 1), of_tenant(a, "r", 2, 1), ran, resubmitted):
        queue.add(made)
    last = queue.last_of(a)
    assert last is not None
    assert last.request_id == "r"
    assert queue.last_of(Tenant("b")) is None


def test_lanes_of_tenants_that_left_do_not_pile_up() -> None:
    queue = WaitingQueue()
    queue.add(of_tenant(Tenant("stays"), "s", 0))
    for arrival in range(1, 5000):
        passer_by = of_tenant(Tenant(str(arrival), counter=float(arrival)), "p", arrival)
        queue.add(passer_by)
        queue.remove(passer_by)
        assert walked(queue) == "s"
    (class_queue,) = queue._classes.values()
    assert len(class_queue.lanes) < 200
