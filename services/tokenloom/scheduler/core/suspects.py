"""Which request kills the executor, or makes whole steps fail.

Every request in flight at a crash is a suspect. A crash counts against a request only if it had tokens in flight that
were in flight at the crashes before, too: `Suspicion` keeps the positions that all of them share. Once these are
computed and the results applied, the request is no suspect any more: it did what it is suspected of, and nothing
happened. So whatever a kill from outside hits, the next steps clear it.

    suspected once       runs on with all others
    suspected twice      is isolated: only groups of such requests share a plan, and that plan is alone in flight;
                         a group that crashes is halved, one that gets through is free again
    alone at a crash     is quarantined (ends with an error), if at least `MIN_CRASHES` crashes count against it

Nobody else is ever quarantined. A deadly request among n is found in 2 + log2(n) crashes (64: 8), at least
`MIN_CRASHES`: five kills from outside fail nobody, however they fall. A step that fails while the executor lives is the
executor's own word on the rows of that plan, so fewer are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenloom.scheduler.core.plan import ScheduledRow
from tokenloom.scheduler.core.request import Request

MIN_CRASHES = 6
MIN_FAILED_STEPS = 3


class ExecutorCrash(Exception):
    """A request that was alone in the executor when it died, after other crashes at the same tokens.

    Args:
        num_crashes: crashes that count against it.
    """

    def __init__(self, num_crashes: int) -> None:
        super().__init__(
            f"the engine crashed {num_crashes} times in a row while it computed this request, the last time with no "
            "other request in it; the request was given up"
        )
        self.num_crashes = num_crashes


@dataclass(slots=True)
class Suspicion:
    """What speaks against a request.

    Args:
        start, end: positions of tokens that were in flight at each of the crashes; `end` is behind the last one.
    """

    num_crashes: int
    start: int
    end: int


class Suspects:
    """The suspects, and the groups in which the isolated ones are tried."""

    def __init__(self) -> None:
        self._suspicions: dict[Request, Suspicion] = {}
        self._groups: deque[list[Request]] = deque()
        self._isolated: set[Request] = set()

    def __bool__(self) -> bool:
        return bool(self._suspicions)

    def __len__(self) -> int:
        return len(self._suspicions)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._suspicions)

    @property
    def isolated(self) -> Collection[Request]:
        """Requests that share plans with their own group only."""
        return self._isolated

    @property
    def groups(self) -> Sequence[Sequence[Request]]:
        """The groups of the isolated, the one to be tried next first."""
        return self._groups

    def num_crashes(self, request: Request) -> int:
        """Crashes that count against a request."""
        suspicion = self._suspicions.get(request)
        return 0 if suspicion is None else suspicion.num_crashes

    def blame(self, rows: Iterable[ScheduledRow], min_crashes: int) -> Request | None:
        """The executor died, or failed a step, with these rows in it.

        Args:
            min_crashes: how many must count against a request that was alone to quarantine it.

        Returns: the request that is quarantined; the caller ends it.
        """
        in_flight: dict[Request, tuple[int, int]] = {}
        for row in rows:
            if row.request.is_row_void:
                continue
            start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
            known_start, known_end = in_flight.get(row.request, (start, end))
            in_flight[row.request] = (min(start, known_start), max(end, known_end))
        alive = [request for request in in_flight if not request.is_finished]
        for request in alive:
            self._suspect(request, *in_flight[request])
        if len(in_flight) == len(alive) == 1 and self.num_crashes(alive[0]) >= min_crashes:
            return alive[0]
        self._isolate([r for r in alive if r in self._isolated or self.num_crashes(r) > 1])
        return None

    def _suspect(self, request: Request, start: int, end: int) -> None:
        known = self._suspicions.get(request)
        if known is None or max(start, known.start) >= min(end, known.end):
            self._suspicions[request] = Suspicion(1, start, end)
        else:
            known.num_crashes += 1
            known.start, known.end = max(start, known.start), min(end, known.end)

    def _isolate(self, requests: list[Request]) -> None:
        """Halve those that were in flight together; they are the next to be tried."""
        again = set(requests)
        self._isolated |= again
        self._groups = deque(left for group in self._groups if (left := [r for r in group if r not in again]))
        middle = (len(requests) + 1) // 2
        for half in (requests[middle:], requests[:middle]):
            if half:
                self._groups.appendleft(half)

    def note_progress(self, request: Request) -> None:
        """Results of a request were applied: free it if it got through all that it is suspected of."""
        suspicion = self._suspicions.get(request)
        if suspicion is not None and request.num_confirmed_tokens >= suspicion.end:
            self.forget(request)

    def forget(self, request: Request) -> None:
        """The request ended or is free again."""
        if self._suspicions.pop(request, None) is None or request not in self._isolated:
            return
        self._isolated.discard(request)
        self._groups = deque(left for group in self._groups if (left := [r for r in group if r is not request]))

    def postpone(self) -> None:
        """The first group cannot run now; let the one behind it."""
        self._groups.rotate(-1)
