"""Requests expire in time; those that ended are neither expired nor kept."""

from tokenloom.scheduler.core.request import FinishReason, Request
from tokenloom.scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenloom.scheduler.core.timers import Timers


def scheduler_with(deadlines: dict[str, float | None]) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(), num_blocks=8)
    for name, deadline_s in deadlines.items():
        scheduler.add_request(Request(name, [1], 1, deadline_s=deadline_s))
    return scheduler


def test_requests_end_when_their_deadline_has_come_and_not_before() -> None:
    scheduler = scheduler_with({"never": None, "late": 7.0, "early": 5.0})
    assert scheduler.next_deadline_s == 5.0
    assert scheduler.expire(4.9) == []
    (told,) = scheduler.expire(5.0)
    assert (told.request.request_id, told.finish_reason) == ("early", FinishReason.DEADLINE)
    assert [told.request.request_id for told in scheduler.expire(9.0)] == ["late"]
    assert scheduler.next_deadline_s is None
    assert scheduler.num_requests == 1


def test_request_that_ended_does_not_expire() -> None:
    scheduler = scheduler_with({"a": 5.0, "b": 6.0})
    scheduler.finish("a", FinishReason.ABORTED)
    assert scheduler.next_deadline_s == 6.0
    assert [told.request.request_id for told in scheduler.expire(10.0)] == ["b"]


def test_ended_requests_with_far_deadlines_do_not_pile_up() -> None:
    timers = Timers()
    for arrival in range(10_000):
        request = Request(str(arrival), [1], 1)
        request.arrival = arrival
        timers.add(1e9, request, num_living=1)
        request.finish_reason = FinishReason.LENGTH
    assert len(timers) < 100
