"""The step loop: requests in, plans to the executor, results to the requests' readers.

There is no loop to see: every event (a frame from a tokenizer, a result from the executor, a deadline) changes the core
and then calls `_pump`, which makes plans while the executor takes more. All of it runs on one event loop without
awaiting, so nothing is locked and a reader can never hold a step back.

Threads of control that end here: sessions (servicer.py), the executor's results (executor_client.py), timers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol

from tokenloom.common.errors import (
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    TokenloomError,
    Unavailable,
)
from tokenloom.scheduler import metrics
from tokenloom.scheduler.capabilities import Capabilities
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.core.plan import ModelOutput, RequestOutput, SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request, RequestRefused
from tokenloom.scheduler.core.scheduler import Scheduler
from tokenloom.scheduler.frames import FinishedRow, TokenRow
from tokenloom.scheduler.sessions import OUTBOX_BYTES, Stream, TokenizerSession
from tokenloom.scheduler.tracing import StepTracer, end_request_span
from tokenloom.scheduler.watchers import StepWatchers

log = logging.getLogger(__name__)
_OVERLOAD_RETRY_S = 1.0
_REMEMBERED_IDS = 4096


class PlanSink(Protocol):
    """Where plans go."""

    def send(self, plan: SchedulerOutput, trace_context: Any = None) -> None:
        """Queue a plan; its result comes back through `Engine.on_result`."""


class Engine:
    """The scheduler's state and what it does on each event.

    Args:
        settings: of the stage.
        executor: takes the plans.
    """

    def __init__(self, settings: SchedulerSettings, executor: PlanSink) -> None:
        self._settings = settings
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, Stream] = {}
        self._ended_ids: OrderedDict[str, None] = OrderedDict()
        self._sessions: set[TokenizerSession] = set()
        self._tracer = StepTracer()
        self._sent_s: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_pump_due = False
        self._is_draining = False
        self._became_idle = asyncio.Event()
        self.watchers = StepWatchers()
        self.capabilities: Capabilities | None = None
        self.core: Scheduler | None = None
        self.is_executor_up = False
        self.readiness_changed = asyncio.Event()
        metrics.watch_engine(lambda: self.core)

    @property
    def is_ready(self) -> bool:
        """New requests are taken and run."""
        return self.is_executor_up and not self._is_draining

    # --- sessions -----------------------------------------------------------------------------------------------

    def open_session(self, session: TokenizerSession) -> None:
        """A tokenizer connected."""
        self._sessions.add(session)
        if self._is_draining:
            session.outbox.drain()
        log.info("session of %s opened", session.client_id)

    def lose_session(self, session: TokenizerSession) -> None:
        """A tokenizer's stream ended; its requests wait `takeover_s` for another one."""
        self._sessions.discard(session)
        session.outbox.close()
        left = list(session.streams.values())
        session.streams.clear()
        for stream in left:
            stream.session = None
            stream.num_losses += 1
        log.info("session of %s ended with %d requests alive", session.client_id, len(left))
        if left:
            losses = [(stream, stream.num_losses) for stream in left]
            self._loop.call_later(self._settings.takeover_s, self._abort_orphans, losses)

    def _abort_orphans(self, losses: Iterable[tuple[Stream, int]]) -> None:
        """End the requests that nobody took over since this very loss."""
        for stream, num_losses in losses:
            is_orphan = stream.session is None and stream.num_losses == num_losses
            if is_orphan and self._streams.get(stream.request.request_id) is stream:
                self._end(stream.request.request_id, FinishReason.ABORTED)
        self._pump_soon()

    def _close_session(self, session: TokenizerSession) -> None:
        """Give up on a reader that does not read."""
        log.warning("session of %s does not read; closing it", session.client_id)
        session.outbox.fail(
            ResourceExhausted(f"the session was not read: over {OUTBOX_BYTES >> 20} MiB waited", reason="SLOW_READER")
        )
        session.on_closed()
        self.lose_session(session)

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, session: TokenizerSession, stream: Stream, *, is_resubmission: bool) -> None:
        """Take a new request, or take over a living one of the same id; a refusal goes into the outbox."""
        known = self._streams.get(stream.request.request_id)
        if known is not None and known.request.prompt_token_ids != stream.request.prompt_token_ids:
            error = FailedPrecondition("the request id is in use for another prompt", field="request_id")
            session.outbox.reject(stream.handle, error)
            end_request_span(stream, error)
            return
        if known is not None:
            self.attach(session, stream.handle, stream.request.request_id, len(stream.request.output_token_ids))
            end_request_span(stream)
            return
        try:
            self._add(stream.request, is_resubmission)
        except TokenloomError as error:
            metrics.REFUSED.inc()
            session.outbox.reject(stream.handle, error)
            end_request_span(stream, error)
            return
        metrics.PROMPT_TOKENS.inc(stream.request.num_prompt_tokens)
        self._streams[stream.request.request_id] = stream
        session.streams[stream.handle] = stream
        self._pump_soon()

    def _add(self, request: Request, is_resubmission: bool) -> None:
        if self.core is None or self._is_draining:
            why = "the engine is stopping" if self._is_draining else "the executor is not ready yet"
            raise Unavailable(why, retry_after_s=_OVERLOAD_RETRY_S)
        try:
            self.core.add_request(request, is_resubmission=is_resubmission)
        except RequestRefused as error:
            if error.is_overload:
                raise ResourceExhausted(str(error), reason="QUEUE_FULL", retry_after_s=_OVERLOAD_RETRY_S) from None
            raise InvalidArgument(str(error), field=error.field) from None

    def attach(self, session: TokenizerSession, handle: int, request_id: str, from_token_index: int) -> None:
        """Let `session` read a living request from a token on."""
        stream = self._streams.get(request_id)
        if stream is None:
            session.outbox.reject(
                handle, FailedPrecondition(f"request {request_id!r} is not alive", field="request_id")
            )
            return
        if stream.session is not None:
            self._supersede(stream, stream.session)
        stream.session, stream.handle = session, handle
        session.streams[handle] = stream
        if stream.request.num_cached_tokens is not None:
            session.outbox.accept(handle, stream.request.num_cached_tokens)
        for run in stream.told_prompt:
            session.outbox.add_prompt_logprobs(handle, run)
        for row in stream.rows_since(from_token_index):
            session.outbox.add_tokens(dataclasses.replace(row, handle=handle))

    def _supersede(self, stream: Stream, session: TokenizerSession) -> None:
        """Tell a living session that another one reads its request from now on."""
        session.streams.pop(stream.handle, None)
        error = Cancelled("another session took the request over", reason="SUPERSEDED")
        num_generated = len(stream.request.output_token_ids)
        session.outbox.finish(FinishedRow(stream.handle, FinishReason.ERROR, num_generated, error))

    def finish(self, session: TokenizerSession, handle: int, reason: FinishReason) -> None:
        """A tokenizer found the end of a request, or its client went away. Unknown handles have ended already."""
        stream = session.streams.get(handle)
        if stream is not None:
            self._end(stream.request.request_id, reason)
            self._pump_soon()

    def abort(self, request_id: str) -> bool | None:
        """End a request, or all choices of a group.

        Returns: True if one was alive, False if it had ended before, None if no such request is known.
        """
        ids = [s.request.request_id for s in self._streams.values() if request_id in (s.request.request_id, s.group_id)]
        for alive in ids:
            self._end(alive, FinishReason.ABORTED)
        self._pump_soon()
        return True if ids else False if request_id in self._ended_ids else None

    def flush_prefix_cache(self) -> int:
        """Forget all cached prefixes that no request holds; returns the number of blocks."""
        return self.core.kv.pool.flush() if self.core else 0

    def drain(self) -> None:
        """Take no new requests and tell the tokenizers."""
        self._is_draining = True
        self.readiness_changed.set()
        for session in list(self._sessions):
            session.outbox.drain()

    async def wait_until_idle(self, limit_s: float) -> None:
        """Return when no request is alive, or after `limit_s` seconds."""
        if self._streams:
            self._became_idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._became_idle.wait(), limit_s)

    def stop(self) -> None:
        """End what is left, with an error that says why."""
        if self._timer is not None:
            self._timer.cancel()
        if self.core is not None:
            error = Unavailable("the engine stopped before the request was done", reason="STOPPED")
            for request_id in list(self._streams):
                ended = self.core.finish(request_id, FinishReason.ERROR)
                if ended is not None:
                    ended.error = error
                    self._tell(ended)
        for session in list(self._sessions):
            session.outbox.close()

    def _end(self, request_id: str, reason: FinishReason) -> None:
        if self.core is not None and (ended := self.core.finish(request_id, reason)) is not None:
            self._tell(ended)

    # --- executor -----------------------------------------------------------------------------------------------

    def on_executor_ready(self, capabilities: Capabilities) -> None:
        """A new executor, or the old one back: everything that ran starts again from the tokens it has."""
        if self.capabilities is not None and not capabilities.serves_same_model_as(self.capabilities):
            raise FailedPrecondition(
                f"the executor now serves {capabilities.model_id}; restart the scheduler to serve that"
            )
        self.capabilities = capabilities
        num_blocks = capabilities.num_blocks(self._settings)
        if self.core is None:
            self.core = Scheduler(capabilities.scheduler_config(self._settings), num_blocks)
        else:
            for output in self.core.reset(num_blocks, capabilities.scheduler_config(self._settings)):
                self._tell(output)
        self._sent_s.clear()
        self.is_executor_up = True
        self.readiness_changed.set()
        log.info(
            "executor ready: %s, %d blocks of %d tokens", capabilities.description, num_blocks, capabilities.block_size
        )
        self._pump_soon()

    def on_executor_lost(self, reason: str) -> None:
        """Plans in flight are void; requests wait."""
        metrics.EXECUTOR_LOSSES.inc()
        self.is_executor_up = False
        self.readiness_changed.set()
        self._tracer.abandon(reason)
        log.warning("executor lost (%s); %d requests wait for it", reason, len(self._streams))

    def on_result(self, output: ModelOutput) -> None:
        """Apply a result and keep the executor busy."""
        assert self.core is not None
        now = self._loop.time()
        metrics.STEP_TIME.observe(now - self._sent_s.pop(output.step_id, now))
        self._tracer.end(output.step_id, output.step_error)
        wasted = self.core.stats.num_wasted_rows
        news = self.core.update(output) + self.core.expire(now)
        metrics.WASTED_ROWS.inc(self.core.stats.num_wasted_rows - wasted)
        self._make_plans(now)  # before the news: the executor waits for plans, readers do not
        for told in news:
            self._tell(told)
        self._arm_timer(self.core.next_deadline_s)

    # --- plans --------------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Make plans once the events of this turn of the loop are in."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        if self.core is None:
            return
        now = self._loop.time()
        for told in self.core.expire(now):
            self._tell(told)
        self._make_plans(now)
        self._arm_timer(self.core.next_deadline_s)

    def _make_plans(self, now: float) -> None:
        """Give the executor as many plans as it takes. Nothing ends here, so streams and core stay in step."""
        core = self.core
        if core is None or self.capabilities is None or not self.is_executor_up:
            return
        depth = min(self._settings.plans_in_flight, self.capabilities.max_plans_in_flight)
        while len(core.plans_in_flight) < depth and (plan := core.schedule()) is not None:
            self._send(plan, now)
        if (plan := core.release_rows()) is not None:
            self._executor.send(plan)

    def _send(self, plan: SchedulerOutput, now: float) -> None:
        streams = self._streams
        for row in plan.rows:
            if row.is_new and not (stream := streams[row.request.request_id]).has_begun:
                self._begin(stream, now)
        self._sent_s[plan.step_id] = now
        self._executor.send(plan, self._tracer.begin(plan, streams))
        metrics.STEP_TOKENS.observe(plan.num_scheduled_tokens)
        metrics.PREEMPTIONS.inc(len(plan.preempted))
        assert self.core is not None
        self.watchers.publish(plan, self.core)

    def _begin(self, stream: Stream, now: float) -> None:
        stream.has_begun = True
        num_cached = stream.request.num_cached_tokens or 0
        metrics.QUEUE_TIME.observe(now - stream.submitted_s)
        metrics.PREFIX_QUERIES.inc(stream.request.num_prompt_tokens)
        metrics.PREFIX_HITS.inc(num_cached)
        stream.span.add_event("scheduled", {"num_cached_tokens": num_cached})
        if stream.session is not None:
            stream.session.outbox.accept(stream.handle, num_cached)

    def _arm_timer(self, deadline_s: float | None) -> None:
        if self._timer is not None:
            if self._timer.when() == deadline_s:
                return
            self._timer.cancel()
            self._timer = None
        if deadline_s is not None:
            self._timer = self._loop.call_at(deadline_s, self._on_deadline)

    def _on_deadline(self) -> None:
        self._timer = None
        self._pump()

    # --- news ---------------------------------------------------------------------------------------------------

    def _tell(self, output: RequestOutput) -> None:
        request = output.request
        stream = self._streams[request.request_id]
        row: TokenRow | None = None
        if output.token_ids:
            row = TokenRow(stream.handle, output.first_token_index, list(output.token_ids), output.logprobs)
            if row.logprobs is not None:
                stream.told.append(row)
            metrics.GENERATION_TOKENS.inc(len(output.token_ids))
            if stream.first_token_s is None:
                stream.first_token_s = self._loop.time()
                metrics.TIME_TO_FIRST_TOKEN.observe(stream.first_token_s - stream.submitted_s)
                stream.span.add_event("first_token")
        if output.prompt_logprobs is not None:
            stream.told_prompt.append(output.prompt_logprobs)
        session = stream.session
        if session is not None:
            self._fill_outbox(session, stream.handle, row, output)
        if output.finish_reason is not None:
            self._forget(stream, output)
        if session is not None and session.outbox.is_overflown and session in self._sessions:
            self._close_session(session)

    def _fill_outbox(self, session: TokenizerSession, handle: int, row: TokenRow | None, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None:
            session.outbox.add_prompt_logprobs(handle, output.prompt_logprobs)
        if row is not None:
            session.outbox.add_tokens(row)
        if output.finish_reason is not None:
            num_generated = len(output.request.output_token_ids)
            session.outbox.finish(FinishedRow(handle, output.finish_reason, num_generated, _error_of(output)))

    def _forget(self, stream: Stream, output: RequestOutput) -> None:
        assert output.finish_reason is not None
        metrics.FINISHED.labels(output.finish_reason.value).inc()
        metrics.REQUEST_TIME.observe(self._loop.time() - stream.submitted_s)
        del self._streams[stream.request.request_id]
        if not self._streams:
            self._became_idle.set()
        if stream.session is not None:
            stream.session.streams.pop(stream.handle, None)
        self._ended_ids[stream.request.request_id] = None
        if len(self._ended_ids) > _REMEMBERED_IDS:
            self._ended_ids.popitem(last=False)
        end_request_span(stream, _error_of(output))
        if log.isEnabledFor(logging.INFO):
            _log_end(stream)


def _log_end(stream: Stream) -> None:
    request = stream.request
    assert request.finish_reason is not None
    fields = {
        "request_id": request.request_id,
        "reason": request.finish_reason.value,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens or 0,
        "num_generated_tokens": len(request.output_token_ids),
        "num_preemptions": request.num_preemptions,
    }
    log.info("request ended", extra=fields)


def _error_of(output: RequestOutput) -> TokenloomError | None:
    error = output.error
    if error is None or isinstance(error, TokenloomError):
        return error
    return Internal(str(error))
