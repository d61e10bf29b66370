"""Requests that wait, in the order in which they shall be served.

    class        the lowest number first
    tenant       the lowest virtual token counter first
    order_key    within a tenant: the earliest deadline, then arrival

Each tenant has a lane per class, sorted by `order_key`; a heap per class holds the lanes by counter. Counters change
while lanes lie in the heap, but they only rise: a lane that comes up with an old counter is put back with the new one.
So neither a step's cost nor an arrival's grows with the number of requests that wait.

A preempted request keeps its `order_key`, so it comes back to its old place in its lane.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from operator import attrgetter

from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.tenants import Tenant

_BY_ORDER = attrgetter("order_key")
_SLACK = 64


class _Lane:
    """Waiting requests of one tenant in one class.

    Args:
        payer: whose counter says when the lane is served.

    `position` and `is_passed` belong to a walk: the request it looks at next, and that it is through with the lane.
    """

    __slots__ = ("is_in_heap", "is_passed", "payer", "position", "requests")

    def __init__(self, payer: Tenant) -> None:
        self.payer = payer
        self.requests: list[Request] = []
        self.position = 0
        self.is_passed = False
        self.is_in_heap = False


class _ClassQueue:
    """The lanes of one class."""

    def __init__(self) -> None:
        self.lanes: dict[Tenant, _Lane] = {}
        self._heap: list[tuple[float, int, _Lane]] = []
        self._num_pushed = 0
        self._compact_at = _SLACK

    def add(self, request: Request, payer: Tenant) -> None:
        lane = self.lanes.get(payer)
        if lane is None:
            lane = self.lanes[payer] = _Lane(payer)
        bisect.insort(lane.requests, request, key=_BY_ORDER)
        self.push(lane)

    def remove(self, request: Request, payer: Tenant) -> None:
        lane = self.lanes[payer]
        index = bisect.bisect_left(lane.requests, request.order_key, key=_BY_ORDER)
        assert lane.requests[index] is request
        del lane.requests[index]
        if index < lane.position:
            lane.position -= 1

    def push(self, lane: _Lane) -> None:
        """Put a lane into the heap, unless it is there or a walk is through with it."""
        if not lane.is_in_heap and not lane.is_passed:
            lane.is_in_heap = True
            self._num_pushed += 1
            heapq.heappush(self._heap, (lane.payer.counter, self._num_pushed, lane))

    def pop(self) -> _Lane | None:
        """Take the lane to serve next out of the heap; None: there is none."""
        while self._heap:
            counter, _, lane = self._heap[0]
            if lane.requests and counter != lane.payer.counter:
                self._num_pushed += 1
                heapq.heapreplace(self._heap, (lane.payer.counter, self._num_pushed, lane))
                continue
            heapq.heappop(self._heap)
            lane.is_in_heap = False
            if lane.requests:
                return lane
            del self.lanes[lane.payer]
        return None

    def compact(self) -> None:
        """Drop the empty lanes when the heap is mostly those; lanes that empty are left in it until they come up."""
        if len(self._heap) < self._compact_at:
            return
        for payer in [payer for payer, lane in self.lanes.items() if not lane.requests]:
            del self.lanes[payer]
        self._heap = [entry for entry in self._heap if entry[2].requests]
        heapq.heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + _SLACK


class WaitingQueue:
    """An ordered set of requests; keeps count of them and of their tokens, in all and by tenant.

    Args:
        is_fair: False puts all requests into one lane: classes and tenants are ignored.
    """

    def __init__(self, is_fair: bool = True) -> None:
        self._classes: dict[int, _ClassQueue] = {}
        self._everybody = None if is_fair else Tenant("")
        self._num_requests = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        for number in sorted(self._classes):
            for lane in self._classes[number].lanes.values():
                yield from lane.requests

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        class_queue = self._classes.get(request.current_class)
        if class_queue is None:
            class_queue = self._classes[request.current_class] = _ClassQueue()
        class_queue.add(request, self._payer(request))
        self._count(request.account, 1, request.num_tokens)

    def remove(self, request: Request) -> None:
        """Take a request out; it must be in."""
        self._classes[request.current_class].remove(request, self._payer(request))
        self._count(request.account, -1, -request.num_tokens)

    def note_grown(self, request: Request, num_tokens: int) -> None:
        """A request that waits got tokens: the result of a plan in which it ran."""
        self._count(request.account, 0, num_tokens)

    def service_key(self, request: Request) -> tuple[int, float, tuple[float, int]]:
        """Sort key over tenants, waiting or not: the smallest is served first."""
        return (request.current_class, self._payer(request).counter, request.order_key)

    def walk(self, max_passed: int) -> Walk:
        """Look at the requests in the order of service; see `Walk`."""
        return Walk(self._classes, max_passed)

    def last_of(self, tenant: Tenant) -> Request | None:
        """The request of a tenant that would run last of those that never ran; None if all did."""
        for number in sorted(self._classes, reverse=True):
            lane = self._classes[number].lanes.get(tenant)
            for request in reversed(lane.requests) if lane is not None else ():
                if request.num_cached_tokens is None and not request.is_resubmission:
                    return request
        return None

    def _count(self, tenant: Tenant, num_requests: int, num_tokens: int) -> None:
        self._num_requests += num_requests
        self.num_tokens += num_tokens
        tenant.num_waiting += num_requests
        tenant.num_waiting_tokens += num_tokens

    def _payer(self, request: Request) -> Tenant:
        return self._everybody or request.account


class Walk:
    """A walk along the queue; `head` is the request to look at. It must be ended, which puts everything back.

    Requests may be added while it lasts. The head may be taken out of the queue, and then `take` must be called.

    Args:
        max_passed: how often it may pass somebody, so that a step's cost does not grow with the queue.
    """

    def __init__(self, classes: dict[int, _ClassQueue], max_passed: int) -> None:
        self._classes = classes
        self._numbers = iter([number for number in sorted(classes) if classes[number].lanes])
        self._num_passes_left = max_passed
        self._class_queue: _ClassQueue | None = None
        self._lane: _Lane | None = None
        self._touched: dict[_Lane, _ClassQueue] = {}
        self.head: Request | None = None
        self._find_head()

    def take(self) -> None:
        """The head was taken out of the queue."""
        self._leave_lane()
        self._find_head()

    def pass_request(self, *, is_counted: bool = True) -> None:
        """The head waits on; others of its tenant may run.

        Args:
            is_counted: False for requests that must not keep others from being looked at, however many they are.
        """
        if not is_counted:
            self._num_passes_left += 1
        self._pass(by=1)

    def pass_tenant(self, *, is_last_class: bool = False) -> None:
        """Nobody of the head's tenant and class runs now.

        Args:
            is_last_class: nobody of the classes behind it, either.
        """
        if is_last_class:
            self._numbers = iter(())
        assert self._lane is not None
        self._pass(by=len(self._lane.requests))

    def stop(self) -> None:
        """Nobody else runs."""
        self.head = None

    def end(self) -> None:
        """Leave the queue as it was, less what was taken."""
        self.head = None
        for lane, class_queue in self._touched.items():
            lane.position, lane.is_passed = 0, False
            if lane.requests:
                class_queue.push(lane)
            elif not lane.is_in_heap:
                del class_queue.lanes[lane.payer]
        for class_queue in set(self._touched.values()):
            class_queue.compact()
        self._touched.clear()

    def _pass(self, by: int) -> None:
        assert self._lane is not None
        self._lane.position += by
        self._num_passes_left -= 1
        if self._num_passes_left <= 0:
            return self.stop()
        self._leave_lane()
        return self._find_head()

    def _leave_lane(self) -> None:
        lane = self._lane
        assert lane is not None
        assert self._class_queue is not None
        lane.is_passed = lane.position >= len(lane.requests)
        self._class_queue.push(lane)
        self._lane = None

    def _find_head(self) -> None:
        while True:
            if self._class_queue is not None and (lane := self._class_queue.pop()) is not None:
                self._touched[lane] = self._class_queue
                self._lane, self.head = lane, lane.requests[lane.position]
                return
            number = next(self._numbers, None)
            if number is None:
                self.head = None
                return
            self._class_queue = self._classes[number]
