"""Requests that wait, in the order in which they shall run: class, then arrival.

A preempted request keeps its arrival, so it comes back to its old place at the front.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from tokenloom.scheduler.core.request import Request


def order_of(request: Request) -> tuple[int, int]:
    """Sort key: the smallest runs first and is preempted last."""
    return (request.priority_class, request.arrival)


class WaitingQueue:
    """An ordered set of requests."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        bisect.insort(self._requests, request, key=order_of)

    def remove(self, request: Request) -> None:
        """Take a request out; it must be in."""
        index = bisect.bisect_left(self._requests, order_of(request), key=order_of)
        assert self._requests[index] is request
        del self._requests[index]
