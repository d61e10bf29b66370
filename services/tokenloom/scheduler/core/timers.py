"""Times at which something is due for living requests.

A heap whose ended requests are dropped when they outnumber the living: short requests with far deadlines would pile up
in it otherwise.
"""

from __future__ import annotations

import heapq

from tokenloom.scheduler.core.request import Request

_SLACK = 64


class Timers:
    """Requests by the time at which they are due; those that ended are passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, due_s: float, request: Request, num_living: int) -> None:
        """Watch a request, which is not watched yet. `num_living` requests are alive, this one included."""
        heapq.heappush(self._heap, (due_s, request.arrival, request))
        if len(self._heap) > 2 * num_living + _SLACK:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)

    @property
    def next_s(self) -> float | None:
        """When the first living request is due, or None."""
        while self._heap and self._heap[0][2].is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_s: float) -> list[Request]:
        """Living requests that are due, the earliest first; watches them no more."""
        due = []
        while (next_s := self.next_s) is not None and next_s <= now_s:
            due.append(heapq.heappop(self._heap)[2])
        return due
