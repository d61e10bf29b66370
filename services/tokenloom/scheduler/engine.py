"""The engine: requests in, plans to the executor, results to the requests' readers.

There is no loop to see: every event (a frame from a tokenizer, a result from the executor, a deadline) changes the core
and then calls `_pump`, which makes plans while the executor takes more. All of it runs on one event loop without
awaiting, so nothing is locked and a reader can never hold a step back.

Threads of control that end here: sessions (servicer.py), the executor's results (executor_client.py), timers. What a
session reads is kept in registry.py, what it is told is written in news.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from tokenloom.common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, TokenloomError, Unavailable
from tokenloom.scheduler import metrics
from tokenloom.scheduler.cache_watchers import CacheWatchers
from tokenloom.scheduler.capabilities import Capabilities
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.core.plan import ModelOutput, SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request, RequestRefused
from tokenloom.scheduler.core.scheduler import Scheduler
from tokenloom.scheduler.core.tenants import TenantPolicy
from tokenloom.scheduler.engine_collector import COLLECTOR
from tokenloom.scheduler.executor_wait import ExecutorWait
from tokenloom.scheduler.load import LoadReporter, LoadState, load_of
from tokenloom.scheduler.news import OVERLOAD_RETRY_S, NewsTeller, overload_of
from tokenloom.scheduler.registry import Registry
from tokenloom.scheduler.returns import Returns
from tokenloom.scheduler.sessions import Stream, TokenizerSession
from tokenloom.scheduler.sliding_rate import SlidingRate
from tokenloom.scheduler.suspect_log import log_suspects
from tokenloom.scheduler.tracing import StepTracer, end_request_span
from tokenloom.scheduler.watchers import StepWatchers

log = logging.getLogger(__name__)
_MAX_TENANTS = 65_536


class PlanSink(Protocol):
    """Where plans go."""

    def send(self, plan: SchedulerOutput, trace_context: Any = None) -> None:
        """Queue a plan; its result comes back through `Engine.on_result`."""

    def leave(self) -> None:
        """Let the executor go and look for the next one; nothing is in flight."""


class Engine:
    """The scheduler's state and what it does on each event. Its clock is `time.monotonic`.

    Args:
        settings: of the stage.
        executor: takes the plans.

    Attributes:
        readiness_changed: set when `is_ready` may have changed.
        has_failed: set when a plan could not be made for a reason that nobody foresaw. Whoever holds the connection to
            the executor begins a new epoch then, which starts again from the tokens that are known.
    """

    def __init__(self, settings: SchedulerSettings, executor: PlanSink) -> None:
        self._settings = settings
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._tenants: dict[str, TenantPolicy] = {}
        self._tracer = StepTracer()
        self._rate = SlidingRate()
        self._sent_s: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s: float | None = None
        self._is_pump_due = False
        self._is_draining = False
        self._is_stopped = False
        self._executor_wait = ExecutorWait(settings.executor_wait_s, self._give_up_waiting)
        self.registry = Registry()
        self._returns = Returns(settings.resumable_s, settings.resumable_bytes, self._abort_alone)
        self._teller = NewsTeller(self.registry, self._returns.note_end)
        self._reporter = LoadReporter(self.load, self.registry.tell_load)
        self.watchers = StepWatchers()
        self.cache_watchers = CacheWatchers()
        self.capabilities: Capabilities | None = None
        self.core: Scheduler | None = None
        self.is_executor_up = False
        self._is_executor_draining = False
        self._has_executor_crashed = False
        self.readiness_changed = asyncio.Event()
        self.has_failed = asyncio.Event()
        COLLECTOR.watch(lambda: self.core, settings.max_metric_tenants)

    @property
    def is_ready(self) -> bool:
        """New requests are taken and run."""
        return self._runs_new_requests and not self._is_draining

    @property
    def _runs_new_requests(self) -> bool:
        return self.is_executor_up and not self._is_executor_draining

    def load(self) -> LoadState | None:
        """How busy the engine is; None before there was an executor."""
        if self.core is None:
            return None
        tokens_per_second = self._rate.per_second(time.monotonic())
        return load_of(self.core, tokens_per_second, waits_for_executor=not self._runs_new_requests)

    # --- sessions -----------------------------------------------------------------------------------------------

    def open_session(self, session: TokenizerSession) -> None:
        """A tokenizer connected."""
        self.registry.open(session)
        if self._is_draining:
            session.outbox.drain()
        if (load := self.load()) is not None:
            session.outbox.set_load(load)

    def lose_session(self, session: TokenizerSession) -> None:
        """A tokenizer's stream ended; its requests wait `takeover_s` for another one, resumable ones `resumable_s`."""
        left = self.registry.lose(session)
        if self._is_stopped:
            return
        for stream in left:
            if stream.is_resumable:
                self._returns.wait_for(stream)
        if losses := [(stream, stream.num_losses) for stream in left if not stream.is_resumable]:
            self._loop.call_later(self._settings.takeover_s, self._abort_orphans, losses)

    def _abort_orphans(self, losses: list[tuple[Stream, int]]) -> None:
        for request_id in self.registry.orphans(losses):
            self._end(request_id, FinishReason.ABORTED)

    def _abort_alone(self, stream: Stream) -> None:
        self._end(stream.request.request_id, FinishReason.ABORTED)

    # --- requests -----------------------------------------------------------------------------------------------

    def set_tenant(self, name: str, policy: TenantPolicy) -> None:
        """Set what a tenant may have, from now on; remembered also while there is no executor.

        Raises: ResourceExhausted if too many tenants are defined; nothing has changed then.
        """
        if name not in self._tenants and len(self._tenants) >= _MAX_TENANTS:
            raise ResourceExhausted(f"{_MAX_TENANTS} tenants are defined already, which is the most", field="tenants")
        self._tenants[name] = policy
        if self.core is not None:
            self.core.set_tenant(name, policy)
            self._pump_soon()

    def submit(self, session: TokenizerSession, stream: Stream, *, is_resubmission: bool) -> None:
        """Take a new request, or take over a living one of the same id; a refusal goes into the outbox.

        A resumable one that has ended is told from what is kept of it.
        """
        request = stream.request
        known = self.registry.streams.get(request.request_id)
        if known is not None and _is_same(known.request, request) and not self._returns.can_be_read_by(known, request):
            self._end(request.request_id, FinishReason.ABORTED)  # and begins anew, so that nothing is missing
            known = None
        if known is not None and _is_same(known.request, request):
            self.registry.attach(session, stream.handle, request.request_id, len(request.output_token_ids))
            end_request_span(stream)
            return
        if known is None and stream.is_resumable and self._returns.answer(session, stream):
            end_request_span(stream)
            return
        try:
            if known is not None:
                raise FailedPrecondition("the request id is in use for another request", field="request_id")
            self._add(request, is_resubmission)
        except TokenloomError as error:
            metrics.REFUSED.labels(error.reason).inc()
            session.outbox.reject(stream.handle, error)
            end_request_span(stream, error)
            return
        self.registry.add(stream)
        self._pump_soon()

    def _add(self, request: Request, is_resubmission: bool) -> None:
        if self._is_draining:  # tokenizers keep it for the next engine
            raise Unavailable("the engine is about to stop", reason="DRAINING", retry_after_s=OVERLOAD_RETRY_S)
        if self.core is None:
            raise Unavailable("the executor is not ready yet", retry_after_s=OVERLOAD_RETRY_S)
        self._executor_wait.check()
        now = time.monotonic()
        try:
            displaced = self.core.add_request(request, now, is_resubmission=is_resubmission)
        except RequestRefused as error:
            if error.is_overload:
                raise overload_of(error) from None
            raise InvalidArgument(str(error), field=error.field) from None
        if displaced is not None:
            self._teller.tell([displaced], now)

    def attach(self, session: TokenizerSession, handle: int, request_id: str, from_token_index: int) -> None:
        """Let `session` read a living request from a token on."""
        self.registry.attach(session, handle, request_id, from_token_index)

    def finish(self, session: TokenizerSession, handle: int, reason: FinishReason) -> None:
        """A tokenizer found the end of a request, or its client went away. Unknown handles have ended already."""
        stream = session.streams.get(handle)
        if stream is not None:
            self._end(stream.request.request_id, reason)

    def detach(self, session: TokenizerSession, handle: int) -> None:
        """A request's client went away and may come back; one that is not resumable ends."""
        stream = session.streams.get(handle)
        if stream is not None and stream.is_resumable:
            self.registry.detach(session, handle)
            self._returns.wait_for(stream)
        else:
            self.finish(session, handle, FinishReason.ABORTED)

    def abort(self, request_id: str) -> bool | None:
        """End a request, or all choices of a group.

        Returns: True if one was alive, False if it had ended before, None if no such request is known.
        """
        ids = self.registry.ids_of(request_id)
        for alive in ids:
            self._end(alive, FinishReason.ABORTED)
        self._returns.forget(request_id)
        return True if ids else False if self.registry.has_ended(request_id) else None

    def flush_prefix_cache(self) -> int:
        """Forget all cached prefixes that no request holds; returns the number of blocks."""
        num_flushed = self.core.kv.pool.flush() if self.core else 0
        self._pump_soon()
        return num_flushed

    def drain(self) -> None:
        """Take no new requests and tell the tokenizers; what runs or waits here goes on, also if it is attached."""
        self._is_draining = True
        self.readiness_changed.set()
        for session in self.registry.sessions:
            session.outbox.drain()

    async def wait_until_idle(self, limit_s: float) -> None:
        """Return when no request is alive, or after `limit_s` seconds."""
        await self.registry.wait_until_idle(limit_s)

    def stop(self) -> None:
        """Close the sessions. What is left does not fail: tokenizers keep it and bring it to the next engine."""
        self._is_draining = self._is_stopped = True
        if left := list(self.registry.streams.values()):
            log.info("%d requests are left to the next engine", len(left))
        handed_over = Unavailable("the engine stopped before the request was done", reason="STOPPED")
        for stream in left:
            end_request_span(stream, handed_over)
        if self._timer is not None:
            self._timer.cancel()
        self._reporter.stop()
        self._returns.stop()
        self._executor_wait.end()
        for session in self.registry.sessions:
            session.outbox.close()

    def _end(self, request_id: str, reason: FinishReason, error: TokenloomError | None = None) -> None:
        if self.core is not None and (ended := self.core.finish(request_id, reason)) is not None:
            ended.error = error
            self._teller.tell([ended], time.monotonic())
            self._pump_soon()

    # --- executor -----------------------------------------------------------------------------------------------

    def on_executor_ready(self, capabilities: Capabilities) -> None:
        """A new executor, or the old one back: everything that ran starts again from the tokens it has."""
        if self.capabilities is not None and not capabilities.serves_same_model_as(self.capabilities):
            raise FailedPrecondition(
                f"the executor now serves {capabilities.model_id}; restart the scheduler to serve that"
            )
        self.capabilities = capabilities
        num_blocks, config = capabilities.num_blocks(self._settings), capabilities.scheduler_config(self._settings)
        if self.core is None:
            self.core = Scheduler(config, num_blocks)
            for name, policy in self._tenants.items():
                self.core.set_tenant(name, policy)
        else:
            news = self.core.reset(num_blocks, config, is_crash=self._has_executor_crashed)
            self._teller.tell(news, time.monotonic())
            log_suspects(self.core)
        self.cache_watchers.watch(self.core.kv.pool)
        self._sent_s.clear()
        self.is_executor_up = True
        self._is_executor_draining = False
        self._executor_wait.end()
        self._tell_readiness()
        log.info(
            "executor ready: %s, %d blocks of %d tokens", capabilities.description, num_blocks, capabilities.block_size
        )
        self._pump_soon()

    def on_executor_draining(self) -> None:
        """The executor is about to stop: what runs there goes on, what waits begins on the next one."""
        log.info("the executor is about to stop")
        self._is_executor_draining = True
        self._tell_readiness()
        self._pump_soon()

    def on_executor_lost(self, reason: str, *, is_crash: bool = True) -> None:
        """Plans in flight are void; requests wait for another executor, `executor_wait_s` at most.

        Args:
            is_crash: False if it stopped as it had said, or another scheduler took it over.
        """
        self._has_executor_crashed = is_crash
        self.is_executor_up = False
        self._executor_wait.begin()
        self._tell_readiness()
        self._tracer.abandon(reason)
        if is_crash:
            metrics.EXECUTOR_LOSSES.inc()
        level = logging.WARNING if is_crash else logging.INFO
        log.log(level, "executor lost (%s); %d requests wait for the next one", reason, len(self.registry.streams))

    def _give_up_waiting(self) -> None:
        error = self._executor_wait.error()
        log.error("%s; %d requests fail, new ones are refused", error.message, len(self.registry.streams))
        for request_id in list(self.registry.streams):
            self._end(request_id, FinishReason.ERROR, error)

    def _tell_readiness(self) -> None:
        self.readiness_changed.set()
        self._reporter.report_now()

    def on_result(self, output: ModelOutput) -> None:
        """Apply a result and keep the executor busy."""
        core = self.core
        assert core is not None
        now = time.monotonic()
        if (sent_s := self._sent_s.pop(output.step_id, None)) is not None:  # a plan without rows is no step
            metrics.STEP_TIME.observe(now - sent_s)
        self._tracer.end(output.step_id, output.step_error)
        self._rate.add(core.plans_in_flight[0].num_scheduled_tokens, now)
        news = core.update(output) + core.expire(now)
        if output.step_error is not None:
            log.warning("step %d failed: %s", output.step_id, output.step_error)
            log_suspects(core)
        self._make_plans(now)  # before the news: the executor waits for plans, readers do not
        self._teller.tell(news, now)
        self._after_changes(core)

    # --- plans --------------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Make plans once the events of this turn of the loop are in."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        core = self.core
        if core is None:
            return
        now = time.monotonic()
        try:
            self._teller.tell(core.expire(now), now)
            self._make_plans(now)
            self._after_changes(core)
        except Exception:  # without a plan in flight nothing would ever call again
            log.exception("unexpected error while making plans")
            self.has_failed.set()

    def _make_plans(self, now: float) -> None:
        """Give the executor as many plans as it takes. Nothing ends here, so streams and core stay in step."""
        core = self.core
        if core is None or self.capabilities is None or not self.is_executor_up:
            return
        depth = min(self._settings.plans_in_flight, self.capabilities.max_plans_in_flight)
        admits_new = not self._is_executor_draining
        while len(core.plans_in_flight) < depth and (plan := core.schedule(now, admits_new=admits_new)) is not None:
            self._send(core, plan, now)
        if self._is_executor_draining and not core.running and not core.plans_in_flight:
            self._executor.leave()
        elif (plan := core.release_rows()) is not None:
            self._executor.send(plan)
            self._show(core, plan, now)

    def _send(self, core: Scheduler, plan: SchedulerOutput, now: float) -> None:
        streams = self.registry.streams
        for row in plan.rows:
            if row.is_new and not (stream := streams[row.request.request_id]).has_begun:
                self._teller.tell_begin(stream, now)
        self._sent_s[plan.step_id] = now
        self._executor.send(plan, self._tracer.begin(plan, streams))
        metrics.STEP_TOKENS.observe(plan.num_scheduled_tokens)
        self._show(core, plan, now)

    def _show(self, core: Scheduler, plan: SchedulerOutput, now: float) -> None:
        if self.watchers.has_readers:
            load = load_of(core, self._rate.per_second(now))
            self.watchers.publish(plan, core.config.max_num_batched_tokens, load, now)

    def _after_changes(self, core: Scheduler) -> None:
        """What follows from every change of the core: readers that are full, routers, the next deadline."""
        for session in self.registry.overflown_sessions():
            self.registry.give_up(session)
            self.lose_session(session)
        self.cache_watchers.publish()
        self._reporter.note_change()
        self._arm_timer(core.next_deadline_s)

    def _arm_timer(self, deadline_s: float | None) -> None:
        if deadline_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_s = deadline_s
        if deadline_s is not None:
            self._timer = self._loop.call_at(deadline_s, self._on_deadline)

    def _on_deadline(self) -> None:
        self._timer = self._timer_s = None
        self._pump()


def _is_same(known: Request, again: Request) -> bool:
    """A request that is submitted again is the living one: nobody takes over another's."""
    return (known.tenant, known.cache_salt, known.prompt_token_ids) == (
        again.tenant,
        again.cache_salt,
        again.prompt_token_ids,
    )
