"""Which scheduler's plans an executor obeys.

Each Initialize begins an epoch: (boot id of this process, counter). Plans of any other epoch are refused, so that a
scheduler that was replaced, or that speaks to a restarted executor, cannot write into memory that is not its own. An
epoch ends with the stream that runs its plans: what was in flight there is lost, so nobody could go on from it.

Whoever has no epoch here may begin one and so replace the scheduler that has. Whoever was replaced may not: it would
take the executor back, and both would do nothing else. It may when the other one is gone.
"""

from __future__ import annotations

import secrets
import time

from tokenloom.common.errors import FailedPrecondition

_JOIN_LIMIT_S = 5.0


class Epochs:
    """The current epoch, and the one stream that runs its plans.

    Attributes:
        heartbeat_s: longest silence on its stream that the scheduler wants; 0: any.
    """

    def __init__(self) -> None:
        self.heartbeat_s = 0.0
        self.boot_id = secrets.token_hex(8)
        self._counter = 0
        self._owner: object | None = None
        self._is_over = False
        self._streams: dict[object, int] = {}
        self._is_joined = True
        self._began_s = 0.0

    @property
    def owner(self) -> object | None:
        """The stream that runs this epoch's plans."""
        return self._owner

    def begin(self, heartbeat_s: float = 0.0) -> int:
        """Begin a new epoch, which no stream owns yet; returns its counter."""
        self.heartbeat_s = heartbeat_s
        self._counter += 1
        self._owner = None
        self._is_over = False
        self._is_joined = False
        self._began_s = time.monotonic()
        return self._counter

    def join(self, stream: object) -> None:
        """A stream was opened; this epoch's plans will come on it, most likely. `end` must follow."""
        self._streams[stream] = self._counter
        self._is_joined = True

    def check_not_replaced(self, boot_id: str, counter: int) -> None:
        """Let a scheduler begin an epoch whose last one was `boot_id` and `counter`.

        Raises: FailedPrecondition if another one began a later epoch and still has a stream open, or will have soon.
        """
        if boot_id != self.boot_id or counter >= self._counter:
            return
        is_awaited = not self._is_joined and time.monotonic() - self._began_s < _JOIN_LIMIT_S
        if is_awaited or self._counter in self._streams.values():
            raise FailedPrecondition(
                "another scheduler has taken this executor over; it is left to that one", reason="EXECUTOR_IN_USE"
            )

    def is_current(self, counter: int) -> bool:
        """Whether plans of that epoch may run; safe to ask from any thread."""
        return counter == self._counter and not self._is_over

    def check(self, boot_id: str, counter: int, stream: object) -> None:
        """Make `stream` the owner of the epoch that its plan names, or confirm that it is.

        Raises: FailedPrecondition if the epoch is another, is over, or has another owner.
        """
        if self._counter == 0 or (boot_id, counter) != (self.boot_id, self._counter):
            raise FailedPrecondition(
                f"the plan is of epoch {boot_id or '?'}/{counter}, this executor is in "
                f"{self.boot_id}/{self._counter}; call Initialize",
                reason="STALE_EPOCH",
            )
        if self._is_over:
            raise FailedPrecondition(
                f"epoch {boot_id}/{counter} ended with its stream; call Initialize", reason="STALE_EPOCH"
            )
        if self._owner not in (None, stream):
            raise FailedPrecondition(
                "another stream runs the plans of this epoch; call Initialize to take over", reason="EPOCH_TAKEN"
            )
        self._owner = stream

    def end(self, stream: object) -> bool:
        """`stream` is closed; end the epoch if it owns it, and return whether it did."""
        self._streams.pop(stream, None)
        if self._owner is not stream:
            return False
        self._owner = None
        self._is_over = True
        return True
