"""Which scheduler's plans an executor obeys.

Each Initialize begins an epoch: (boot id of this process, counter). Plans of any other epoch are refused, so that a
scheduler that was replaced, or that speaks to a restarted executor, cannot write into memory that is not its own. An
epoch ends with the stream that runs its plans: what was in flight there is lost, so nobody could go on from it.
"""

from __future__ import annotations

import secrets

from tokenloom.common.errors import FailedPrecondition


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
        return self._counter

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
        """End the epoch if `stream` owns it; returns whether it did."""
        if self._owner is not stream:
            return False
        self._owner = None
        self._is_over = True
        return True
