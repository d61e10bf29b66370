"""The connection to the executor: capabilities, a new epoch, then plans out and results in, in order.

A lost executor is looked for again, with backoff, for ever; each new connection is a new epoch, so a plan of an older
one can do no harm. One whose connection stands while it hangs is lost as well (stall.py).

An executor that is about to stop says so. It still gets plans, until the engine leaves it or it ends the stream; it
refuses a new epoch, so the next one that can be had is another process. One that another scheduler has taken over is
left to that one, and asked for again until it is free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from tokenloom.api.v1 import executor_pb2, executor_pb2_grpc
from tokenloom.common.channel import bearer_metadata, make_channel
from tokenloom.common.errors import DeadlineExceeded, TokenloomError, Unavailable, from_rpc_error
from tokenloom.common.schema import check_revision
from tokenloom.common.silence import running_time, tick_of
from tokenloom.common.telemetry import inject
from tokenloom.scheduler import convert
from tokenloom.scheduler.capabilities import Capabilities
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.core.plan import ModelOutput, SchedulerOutput
from tokenloom.scheduler.recorder import Recorder
from tokenloom.scheduler.stall import StallJudge, StepTimes

log = logging.getLogger(__name__)
END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_CALL_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_UNEXPECTED = "unexpected error"
_REPLACED = "STALE_EPOCH"  # another scheduler began an epoch: nothing speaks against the requests


@dataclass(frozen=True)
class StallLimits:
    """How long an executor may be silent; see SchedulerSettings for the fields."""

    stall_timeout_s: float
    step_timeout_s: float
    heartbeat_s: float

    @classmethod
    def of(cls, settings: SchedulerSettings) -> StallLimits:
        """As set; heartbeats come at least three times within the limit."""
        heartbeat_s = min(settings.heartbeat_s, settings.stall_timeout_s / 3)
        return cls(settings.stall_timeout_s, settings.step_timeout_s, heartbeat_s)


class ExecutorEvents(Protocol):
    """Whoever makes the plans."""

    def on_executor_ready(self, capabilities: Capabilities) -> None:
        """Plans may be sent from now on; earlier ones are void. Raises TokenloomError to refuse the executor."""

    def on_result(self, output: ModelOutput) -> None:
        """The oldest plan in flight was run."""

    def on_executor_draining(self) -> None:
        """It is about to stop, and asks that nothing new begins on it."""

    def on_executor_lost(self, reason: str, *, is_crash: bool) -> None:
        """No result will come any more for the plans in flight; no crash is it if it had said that it would stop."""


class ExecutorClient:
    """One executor.

    Args:
        address: where it listens.
        token: the cluster credential.
        num_blocks: how many KV blocks to lay out, given what it can do.
        limits: how long it may be silent.
        recorder: sees every plan and result; None: nobody does.
    """

    def __init__(
        self,
        address: str,
        token: str,
        num_blocks: Callable[[Capabilities], int],
        limits: StallLimits,
        recorder: Recorder | None = None,
    ) -> None:
        self._address = address
        self._metadata = bearer_metadata(token)
        self._num_blocks = num_blocks
        self._limits = limits
        self._recorder = recorder
        self._outgoing: asyncio.Queue[executor_pb2.ExecuteRequest] = asyncio.Queue()  # bounded by plans in flight
        self._epoch = executor_pb2.Epoch()
        self._times = StepTimes()
        self._judge = self._new_judge()
        self._beating_boot_id = ""
        self._is_draining = False
        self._left = asyncio.Event()
        self._last_problem = ""
        self._was_up = False

    def send(self, plan: SchedulerOutput, trace_context: Any = None) -> None:
        """Queue a plan for sending; its result comes as `on_result`."""
        trace = None if trace_context is None else inject(trace_context)
        request = convert.execute_request_of(plan, self._epoch, trace)
        if self._recorder is not None:
            self._recorder.plan(plan, request)
        self._outgoing.put_nowait(request)
        self._judge.on_plan(plan.num_scheduled_tokens)

    def leave(self) -> None:
        """End the stream; nothing is in flight."""
        self._left.set()

    async def run(self, events: ExecutorEvents) -> None:
        """Keep connected until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            channel: Any = make_channel(self._address)
            is_up = is_no_crash = False
            try:
                stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
                capabilities = await self._begin_epoch(stub)
                call = stub.Execute(metadata=self._metadata)
                events.on_executor_ready(capabilities)
                is_up = self._was_up = True
                backoff_s, self._last_problem = _FIRST_BACKOFF_S, ""
                await self._exchange(call, events)
                is_no_crash = self._is_draining
                self._report("the executor ended the stream", is_expected=is_no_crash)
            except grpc.aio.AioRpcError as error:
                problem = from_rpc_error(error)
                is_no_crash = is_up and (self._is_draining or problem.reason == _REPLACED)
                is_expected = is_no_crash or isinstance(problem, Unavailable | DeadlineExceeded)
                self._report(str(problem), is_expected=is_expected)
            except TokenloomError as error:
                self._report(str(error), is_expected=isinstance(error, Unavailable) and not is_up)
            except Exception:  # whatever it was, a new epoch starts from the tokens that are known
                log.exception("unexpected error in the exchange with executor %s", self._address)
                self._last_problem = _UNEXPECTED
            finally:
                await channel.close()
            if is_up:
                if self._recorder is not None and not is_no_crash:
                    self._recorder.save("executor-lost" if self._last_problem != _UNEXPECTED else "error")
                events.on_executor_lost(self._last_problem, is_crash=not is_no_crash)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _begin_epoch(self, stub: Any) -> Capabilities:
        capabilities_call = stub.GetCapabilities(
            executor_pb2.GetCapabilitiesRequest(), metadata=self._metadata, timeout=_CALL_TIMEOUT_S
        )
        response = await capabilities_call
        check_revision(response.schema_revision, "executor")
        capabilities = convert.capabilities_of(response)
        request = executor_pb2.InitializeRequest(
            num_blocks=self._num_blocks(capabilities), heartbeat_ms=round(self._limits.heartbeat_s * 1000)
        )
        if self._epoch.boot_id:
            request.last_epoch.CopyFrom(self._epoch)
        self._epoch = (await stub.Initialize(request, metadata=self._metadata, timeout=_CALL_TIMEOUT_S)).epoch
        self._outgoing = asyncio.Queue()
        self._is_draining = False
        self._left.clear()
        self._judge = self._new_judge(sends_heartbeats=capabilities.boot_id == self._beating_boot_id)
        if self._recorder is not None:
            self._recorder.begin_epoch(response, request.num_blocks)
        return capabilities

    def _new_judge(self, *, sends_heartbeats: bool = False) -> StallJudge:
        limits = self._limits
        return StallJudge(limits.stall_timeout_s, limits.step_timeout_s, self._times, sends_heartbeats=sends_heartbeats)

    async def _exchange(self, call: Any, events: ExecutorEvents) -> None:
        """Plans out and results in, until the executor ends the stream, is left, or hangs.

        Raises: Unavailable if it hangs; whatever ended the stream.
        """
        writer = asyncio.create_task(self._write(call))
        reader = asyncio.create_task(self._read(call, events))
        watch = asyncio.create_task(self._watch())
        left = asyncio.create_task(self._left.wait())
        try:
            await asyncio.wait({reader, watch, left}, return_when=asyncio.FIRST_COMPLETED)
            next(task for task in (reader, left, watch) if task.done()).result()
        finally:
            call.cancel()
            tasks = (writer, reader, watch, left)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Any, events: ExecutorEvents) -> None:
        while (response := await call.read()) is not END_OF_STREAM:
            if response.HasField("heartbeat"):
                self._judge.on_heartbeat(response.heartbeat.progress)
                self._beating_boot_id = self._epoch.boot_id
                if response.heartbeat.draining and not self._is_draining:
                    self._is_draining, self._was_up = True, False
                    events.on_executor_draining()
                continue
            self._judge.on_result()
            if self._recorder is not None:
                self._recorder.result(response)
            events.on_result(convert.model_output_of(response))

    async def _watch(self) -> None:
        async for passed_s in running_time(tick_of(self._limits.stall_timeout_s)):
            if problem := self._judge.pass_time(passed_s):
                raise Unavailable(f"it hangs: {problem}")

    async def _write(self, call: Any) -> None:
        while True:
            await call.write(await self._outgoing.get())

    def _report(self, problem: str, is_expected: bool) -> None:
        """Log a problem once, not at each attempt; that nobody answers is none while it starts."""
        if problem != self._last_problem:
            level = logging.INFO if is_expected and not self._was_up else logging.WARNING
            log.log(level, "executor %s: %s", self._address, problem)
        self._last_problem = problem
