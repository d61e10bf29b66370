"""Which request kills the executor, or makes whole steps fail.

Every request in flight at a crash is a suspect. A crash counts against a request only if it had tokens in flight that
were in flight at the crashes before, too: `Suspicion` keeps the positions that all of them share. Once these are
computed and the results applied, the request is no suspect any more: it did what it is suspected of, and nothing
happened. So whatever a kill from outside hits, the next steps clear it.

    suspected once       runs on with all others
    suspected twice      is isolated: only groups of such requests share a plan, and that plan is alone in flight;
                         a group that crashes is halved, one that gets through is free again
    alone at crashes     is quarantined (ends with an error), once `MIN_CRASHES` crashes count against it and it was
                         alone in flight at `MIN_CRASHES_ALONE` of them

Nobody else is ever quarantined. A deadly request among n is found in 4 + log2(n) crashes (64: 10), at least
`MIN_CRASHES`: five kills from outside fail nobody, however they fall. While there is a deadly request, a neighbour
could fail only if three kills in a row hit trials of it alone, and no step of it ended in between.

A step that fails while the executor lives is the executor's own word on the rows of that plan: it makes suspects in the
same way, and `MIN_FAILED_STEPS_ALONE` such steps of a request alone end it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenloom.scheduler.core.plan import ScheduledRow
from tokenloom.scheduler.core.request import Request

MIN_CRASHES = 6
MIN_CRASHES_ALONE = 3
MIN_FAILED_STEPS_ALONE = 3


class ExecutorCrash(Exception):
    """A request that was alone in the executor when it died, after other crashes at the same tokens.

    Args:
        num_crashes: crashes that count against it.
        num_alone: those of them at which it was alone.
    """

    def __init__(self, num_crashes: int, num_alone: int) -> None:
        super().__init__(
            f"the engine crashed {num_crashes} times in a row while it computed this request, {num_alone} times with "
            "no other request in it; the request was given up"
        )
        self.num_crashes = num_crashes
        self.num_alone = num_alone


@dataclass(slots=True)
class Suspicion:
    """What speaks against a request; `_alone` counts when nobody else was there.

    Args:
        start, end: positions of tokens that were in flight each time; `end` is behind the last one.
    """

    start: int
    end: int
    num_crashes: int = 0
    num_crashes_alone: int = 0
    num_failed_steps: int = 0
    num_failed_steps_alone: int = 0

    @property
    def num_times(self) -> int:
        """Crashes and failed steps."""
        return self.num_crashes + self.num_failed_steps


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

    def suspicion(self, request: Request) -> Suspicion | None:
        """What speaks against a request; None: nothing."""
        return self._suspicions.get(request)

    def blame_for_crash(self, rows: Iterable[ScheduledRow]) -> Request | None:
        """The executor died with these rows in flight.

        Returns: the request that is quarantined; the caller ends it.
        """
        alone = self._suspect_all(rows, is_crash=True)
        if alone is None:
            return None
        known = self._suspicions[alone]
        return alone if known.num_crashes >= MIN_CRASHES and known.num_crashes_alone >= MIN_CRASHES_ALONE else None

    def blame_for_failed_step(self, rows: Iterable[ScheduledRow]) -> Request | None:
        """A step with these rows failed, and the executor lives.

        Returns: as `blame_for_crash`.
        """
        alone = self._suspect_all(rows, is_crash=False)
        is_sure = alone is not None and self._suspicions[alone].num_failed_steps_alone >= MIN_FAILED_STEPS_ALONE
        return alone if is_sure else None

    def _suspect_all(self, rows: Iterable[ScheduledRow], *, is_crash: bool) -> Request | None:
        """Count it against all requests of these rows and isolate them if need be; returns the one that was alone."""
        in_flight: dict[Request, tuple[int, int]] = {}
        for row in rows:
            if row.request.is_row_void:
                continue
            start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
            known_start, known_end = in_flight.get(row.request, (start, end))
            in_flight[row.request] = (min(start, known_start), max(end, known_end))
        is_alone = len(in_flight) == 1
        alive = [request for request in in_flight if not request.is_finished]
        for request in alive:
            suspicion = self._suspicion(request, *in_flight[request])
            if is_crash:
                suspicion.num_crashes += 1
                suspicion.num_crashes_alone += is_alone
            else:
                suspicion.num_failed_steps += 1
                suspicion.num_failed_steps_alone += is_alone
        self._isolate([r for r in alive if r in self._isolated or self._suspicions[r].num_times > 1])
        return alive[0] if is_alone and alive else None

    def _suspicion(self, request: Request, start: int, end: int) -> Suspicion:
        """What speaks against a request that had these positions in flight; begins anew at positions that are new."""
        known = self._suspicions.get(request)
        if known is None or max(start, known.start) >= min(end, known.end):
            known = self._suspicions[request] = Suspicion(start, end)
        known.start, known.end = max(start, known.start), min(end, known.end)
        return known

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
