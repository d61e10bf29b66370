"""One Execute stream: takes plans as they come, has them run in order, gives results in the same order.

If the scheduler asked for heartbeats, one goes out at once and then whenever nothing did for as long as it said: from
the event loop, also while a plan computes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from opentelemetry import trace

from tokenloom.api.v1 import executor_pb2
from tokenloom.common.errors import FailedPrecondition, Internal, InvalidArgument, TokenloomError
from tokenloom.common.pulse import Pulse
from tokenloom.executor import convert, metrics
from tokenloom.executor.epochs import Epochs
from tokenloom.executor.plan import Plan, Result, SamplingParams
from tokenloom.executor.runner import Runner
from tokenloom.executor.spans import RowSpans

log = logging.getLogger(__name__)
MAX_PLANS_IN_FLIGHT = 4
IDLE_S = 1.0
Outcome = Result | TokenloomError
"""FailedPrecondition ends the stream; any other error fails one plan."""


@dataclass(frozen=True)
class StreamParts:
    """What a stream works with; shared by all streams of a process.

    Args:
        worker: the one thread that runs everything on the model.
        defaults: sampling parameters of rows that leave them open.
        is_draining: the executor is about to stop.
    """

    runner: Runner
    worker: ThreadPoolExecutor
    epochs: Epochs
    spans: RowSpans
    defaults: SamplingParams
    is_draining: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class _InFlight:
    """A plan whose result is yet to be sent."""

    step_id: int
    span: trace.Span
    outcome: asyncio.Future[Outcome]


class PlanStream:
    """Runs the plans of one stream; at most MAX_PLANS_IN_FLIGHT are taken and not yet answered."""

    def __init__(self, parts: StreamParts) -> None:
        self._parts = parts
        self._slots = asyncio.Semaphore(MAX_PLANS_IN_FLIGHT)
        self._in_flight: deque[_InFlight | None] = deque()  # bounded by the slots
        self._has_news = asyncio.Event()
        self._is_beat_due = self._is_ending = False
        self._heartbeat_s = parts.epochs.heartbeat_s
        self._last_step_id: int | None = None
        self._busy_s = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """No plan is here, and for a second there was none."""
        return not self._in_flight and time.monotonic() - self._busy_s > IDLE_S

    async def read(self, requests: AsyncIterator[executor_pb2.ExecuteRequest]) -> None:
        """Take plans until the scheduler ends the stream or one is of another epoch."""
        try:
            async for request in requests:
                await self._slots.acquire()
                if self._is_ending:
                    return
                plan = self._accept(request)
                self._put(plan)
                if plan.outcome.done() and isinstance(plan.outcome.result(), FailedPrecondition):
                    return
        finally:
            self._put(None)

    async def responses(self) -> AsyncIterator[executor_pb2.ExecuteResponse]:
        """Results in the order of the plans, and heartbeats between them if they were asked for.

        Raises: FailedPrecondition after the results before it, if a plan is of another epoch.
        """
        pulse = Pulse(self._heartbeat_s, self.beat)
        self.beat()
        try:
            while True:
                self._has_news.clear()
                while self._in_flight and (self._in_flight[0] is None or self._in_flight[0].outcome.done()):
                    if (plan := self._in_flight.popleft()) is None:
                        return
                    plan.span.end()
                    response = self._response(plan.step_id, plan.outcome.result())
                    self._busy_s = time.monotonic()
                    pulse.note_sent()
                    yield response
                    self._slots.release()
                if self._is_beat_due:
                    self._is_beat_due = False
                    pulse.note_sent()
                    yield self._heartbeat()
                else:
                    await self._has_news.wait()
        finally:
            pulse.stop()

    def beat(self) -> None:
        """Send a heartbeat now, if the scheduler asked for any."""
        if self._heartbeat_s:
            self._is_beat_due = True
            self._has_news.set()

    def _heartbeat(self) -> executor_pb2.ExecuteResponse:
        progress, is_draining = self._parts.runner.progress.count, self._parts.is_draining()
        return executor_pb2.ExecuteResponse(heartbeat=executor_pb2.Heartbeat(progress=progress, draining=is_draining))

    def _put(self, plan: _InFlight | None) -> None:
        self._in_flight.append(plan)
        if plan is None or plan.outcome.done():
            self._has_news.set()
        else:
            plan.outcome.add_done_callback(lambda _: self._has_news.set())

    def end(self) -> None:
        """End the stream once what is in flight is answered; later plans are not run."""
        self._is_ending = True
        self._put(None)

    def void(self) -> None:
        """End the stream with FAILED_PRECONDITION once what is in flight is answered: a new epoch has begun."""
        self._put(_InFlight(0, trace.INVALID_SPAN, _known(_stale())))

    def end_spans(self) -> None:
        """End the spans of plans that nobody will be told of; to be called when the stream has ended."""
        while self._in_flight:
            if (plan := self._in_flight.popleft()) is not None:
                plan.span.end()

    def _accept(self, request: executor_pb2.ExecuteRequest) -> _InFlight:
        """Hand a plan to the worker, or know its outcome at once if it is faulty."""
        arrived_s = time.perf_counter()
        parts = self._parts
        span: trace.Span = trace.INVALID_SPAN
        try:
            parts.epochs.check(request.epoch.boot_id, request.epoch.counter, self)
            self._check_order(request.step_id)
            plan = convert.plan_from_proto(request, parts.defaults)
            parts.spans.follow(request)
            counter = request.epoch.counter
            loop = asyncio.get_running_loop()
            outcome: asyncio.Future[Outcome] = loop.run_in_executor(parts.worker, self._run, plan, counter, arrived_s)
            span = parts.spans.step(request)
        except TokenloomError as error:
            outcome = _known(error)
        return _InFlight(request.step_id, span, outcome)

    def _check_order(self, step_id: int) -> None:
        last, self._last_step_id = self._last_step_id, step_id
        if last is not None and step_id != last + 1:
            raise InvalidArgument(f"plan {step_id} follows plan {last}", reason="MALFORMED_PLAN")

    def _run(self, plan: Plan, epoch_counter: int, arrived_s: float) -> Outcome:
        """Run a plan; in the worker's thread. Errors are outcomes here, nothing is raised."""
        if not self._parts.epochs.is_current(epoch_counter):
            return _stale()
        started_s = time.perf_counter()
        progress = self._parts.runner.progress
        progress.is_busy = True
        try:
            result = self._parts.runner.execute(plan)
        except TokenloomError as error:
            log.warning("%s", error)
            return error
        except Exception:
            log.exception("plan %d failed", plan.step_id)
            return Internal("the step failed; the executor's log has the details", reason="STEP_FAILED")
        finally:
            progress.is_busy = False
        metrics.ROWS.set(self._parts.runner.num_rows)
        result.timings.queued_us = int((started_s - arrived_s) * 1e6)
        metrics.STEP_SECONDS.observe(time.perf_counter() - started_s)
        metrics.TOKENS.inc(sum(row.num_scheduled_tokens for row in plan.rows))
        return result

    def _response(self, step_id: int, outcome: Outcome) -> executor_pb2.ExecuteResponse:
        if isinstance(outcome, FailedPrecondition):
            raise outcome
        metrics.STEPS.inc()
        if isinstance(outcome, TokenloomError):
            metrics.STEP_ERRORS.inc()
            return convert.failed_step_to_proto(step_id, outcome)
        metrics.SAMPLED_TOKENS.inc(len(outcome.sampled))
        metrics.ROW_ERRORS.inc(len(outcome.failures))
        return convert.result_to_proto(outcome)


def _stale() -> FailedPrecondition:
    return FailedPrecondition("the epoch of this stream is over", reason="STALE_EPOCH")


def _known(outcome: Outcome) -> asyncio.Future[Outcome]:
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    future.set_result(outcome)
    return future
