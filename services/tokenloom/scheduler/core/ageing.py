"""Requests of lower classes rise with their age, so that endless urgent arrivals starve nobody.

A request moves up one class per `ageing_s` since it was first submitted, whether it waits or runs.
"""

from __future__ import annotations

from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.timers import Timers


class Ageing:
    """Which class living requests are in.

    Args:
        ageing_s: age per class; 0: nobody rises.
        num_classes: classes that there are; higher numbers count as the last one.
    """

    def __init__(self, ageing_s: float, num_classes: int) -> None:
        self._ageing_s = ageing_s
        self._last_class = num_classes - 1
        self._timers = Timers()

    def watch(self, request: Request, num_living: int) -> None:
        """Remember when a request rises next, from its present class. `num_living` requests are alive."""
        if self._ageing_s and request.current_class > 0:
            num_risen = self._asked(request) - request.current_class
            self._timers.add(request.submitted_s + (num_risen + 1) * self._ageing_s, request, num_living)

    def class_of(self, request: Request, now_s: float) -> int:
        """The class that a request is in, by what it asked for and its age."""
        risen = max(0, int((now_s - request.submitted_s) / self._ageing_s)) if self._ageing_s else 0
        return max(0, self._asked(request) - risen)

    def pop_due(self, now_s: float) -> list[tuple[Request, int]]:
        """Living requests that are to rise, with the class they rise to; they are watched no more."""
        # At least one class, since the division may fall short of the very time that was watched for.
        return [
            (request, min(self.class_of(request, now_s), request.current_class - 1))
            for request in self._timers.pop_due(now_s)
        ]

    def _asked(self, request: Request) -> int:
        return min(request.priority_class, self._last_class)
