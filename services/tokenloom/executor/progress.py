"""How far the model's thread has come, for those who ask whether it still moves."""

from __future__ import annotations

import ctypes


class Progress:
    """A count that rises with every layer, every slice of logits and every plan that was run.

    Written by the model's thread alone, or by kernels that it has called; read by any.

    Attributes:
        counter: the count, for kernels.
        is_busy: a plan is being run.
    """

    def __init__(self) -> None:
        self.counter = ctypes.c_int64(0)
        self.is_busy = False

    @property
    def count(self) -> int:
        """How far it is."""
        return self.counter.value

    def advance(self) -> None:
        """Something was done."""
        self.counter.value += 1
