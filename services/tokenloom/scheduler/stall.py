"""When an executor counts as lost although its connection stands: it says nothing, or its plans do not move.

Two rules. An executor that sends heartbeats and was not heard of at all for `stall_timeout_s` is stopped, or its event
loop hangs. And one that has plans, but gave no result and told no progress for the same time, and for ten times what
the plan should take, is stuck in one of them. What a plan should take is what plans of its size or larger took of
late; while none was measured, `step_timeout_s` is the limit. A plan that was given up once has twice the time when it
comes again, so that an executor that became slow is not lost for ever.

Time is handed in, and only time in which this process ran counts (common/silence.py).
"""

from __future__ import annotations

from collections import deque

from tokenloom.common.silence import Silence

_MARGIN = 10.0
_DECAY = 0.95


class StepTimes:
    """What steps took, by their number of tokens: the slowest of late, in classes of powers of two."""

    def __init__(self) -> None:
        self._slowest_s: dict[int, float] = {}

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(seconds, _DECAY * self._slowest_s.get(size, 0.0))

    def expected_s(self, num_tokens: int) -> float | None:
        """What a step of so many tokens may take; None: nothing is known of such steps, nor of larger ones."""
        sizes = [size for size in self._slowest_s if size >= num_tokens.bit_length()]
        return self._slowest_s[min(sizes)] if sizes else None


class StallJudge:
    """Watches one connection to an executor.

    Args:
        stall_timeout_s: longest silence.
        step_timeout_s: longest time without a result while no step was measured.
        times: what steps took; kept over connections.
        sends_heartbeats: this executor did so in an earlier connection.
    """

    def __init__(
        self, stall_timeout_s: float, step_timeout_s: float, times: StepTimes, *, sends_heartbeats: bool = False
    ) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._step_timeout_s = step_timeout_s
        self._times = times
        self.sends_heartbeats = sends_heartbeats
        self._silence = Silence()
        self._standstill = Silence()
        self._progress = -1
        self._now_s = 0.0
        self._began_s = 0.0
        self._in_flight: deque[int] = deque()

    def on_plan(self, num_tokens: int) -> None:
        """A plan was sent."""
        if not self._in_flight:
            self._began_s = self._now_s
            self._standstill.end()
        self._in_flight.append(num_tokens)

    def on_result(self) -> None:
        """The oldest plan in flight was run."""
        self._silence.end()
        self._standstill.end()
        if self._in_flight and (num_tokens := self._in_flight.popleft()):
            self._times.add(num_tokens, self._now_s - self._began_s)
        self._began_s = self._now_s

    def on_heartbeat(self, progress: int) -> None:
        """The executor gave a sign of life."""
        self.sends_heartbeats = True
        self._silence.end()
        if progress != self._progress:
            self._progress = progress
            self._standstill.end()

    def pass_time(self, seconds: float) -> str:
        """Let time pass; returns why the executor counts as lost, or nothing."""
        self._now_s += seconds
        silent_s = self._silence.pass_time(seconds)
        still_s = self._standstill.pass_time(seconds)
        if self.sends_heartbeats and silent_s >= self._stall_timeout_s:
            return f"nothing was heard of it for {silent_s:.1f} s"
        if self._in_flight and still_s >= (limit_s := self._limit_s(self._in_flight[0])):
            self._times.add(self._in_flight[0], 2 * limit_s / _MARGIN)
            return f"a plan of {self._in_flight[0]} tokens did not move for {still_s:.1f} s"
        return ""

    def _limit_s(self, num_tokens: int) -> float:
        expected_s = self._times.expected_s(num_tokens)
        step_s = self._step_timeout_s if expected_s is None else _MARGIN * expected_s
        return max(self._stall_timeout_s, step_s)
