"""How far the model's thread has come, for those who ask whether it still moves."""

from __future__ import annotations


class Progress:
    """A count that rises with every layer, every slice of logits and every plan that was run.

    Written by the model's thread alone, read by any: an attribute's assignment is atomic.

    Attributes:
        is_busy: a plan is being run.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_busy = False

    def advance(self) -> None:
        """Something was done."""
        self.count += 1
