"""A rate over the last few seconds; pure, time is an argument."""

from __future__ import annotations

from collections import deque


class SlidingRate:
    """Counts per second over a window that moves with the time.

    Counts are kept per slice of the window, so memory and work do not grow with the number of events.

    Args:
        window_s: seconds that are looked back at.
        num_slices: how finely old counts fall out of the window.
    """

    def __init__(self, window_s: float = 5.0, num_slices: int = 20) -> None:
        self._window_s = window_s
        self._num_slices = num_slices
        self._slices: deque[list[int]] = deque()  # [index, count], oldest first
        self._total = 0

    def add(self, count: int, now_s: float) -> None:
        """Count something that happened now; `now_s` never falls from call to call."""
        index = self._forget_old(now_s)
        if self._slices and self._slices[-1][0] == index:
            self._slices[-1][1] += count
        else:
            self._slices.append([index, count])
        self._total += count

    def per_second(self, now_s: float) -> float:
        """Average over the window that ends now."""
        self._forget_old(now_s)
        return self._total / self._window_s

    def _forget_old(self, now_s: float) -> int:
        """Drop the slices that the window has left; returns the present slice's index."""
        index = int(now_s * self._num_slices / self._window_s)
        while self._slices and self._slices[0][0] <= index - self._num_slices:
            self._total -= self._slices.popleft()[1]
        return index
