"""The connection to the executor: capabilities, a new epoch, then plans out and results in, in order.

A lost executor is looked for again, with backoff, for ever; each new connection is a new epoch, so a plan of an older
one can do no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from tokenloom.api.v1 import executor_pb2, executor_pb2_grpc
from tokenloom.common.channel import bearer_metadata, make_channel
from tokenloom.common.errors import DeadlineExceeded, TokenloomError, Unavailable, from_rpc_error
from tokenloom.common.schema import check_revision
from tokenloom.common.telemetry import inject
from tokenloom.scheduler import convert
from tokenloom.scheduler.capabilities import Capabilities
from tokenloom.scheduler.core.plan import ModelOutput, SchedulerOutput
from tokenloom.scheduler.recorder import Recorder

log = logging.getLogger(__name__)
END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_CALL_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_UNEXPECTED = "unexpected error"


class ExecutorEvents(Protocol):
    """Whoever makes the plans."""

    def on_executor_ready(self, capabilities: Capabilities) -> None:
        """Plans may be sent from now on; earlier ones are void. Raises TokenloomError to refuse the executor."""

    def on_result(self, output: ModelOutput) -> None:
        """The oldest plan in flight was run."""

    def on_executor_lost(self, reason: str) -> None:
        """No result will come any more for the plans in flight."""


class ExecutorClient:
    """One executor.

    Args:
        address: where it listens.
        token: the cluster credential.
        num_blocks: how many KV blocks to lay out, given what it can do.
        step_timeout_s: how long a plan in flight may go without any result.
        recorder: sees every plan and result; None: nobody does.
    """

    def __init__(
        self,
        address: str,
        token: str,
        num_blocks: Callable[[Capabilities], int],
        step_timeout_s: float,
        recorder: Recorder | None = None,
    ) -> None:
        self._address = address
        self._metadata = bearer_metadata(token)
        self._num_blocks = num_blocks
        self._step_timeout_s = step_timeout_s
        self._recorder = recorder
        self._outgoing: asyncio.Queue[executor_pb2.ExecuteRequest] = asyncio.Queue()  # bounded by plans in flight
        self._epoch = executor_pb2.Epoch()
        self._num_in_flight = 0
        self._last_problem = ""
        self._was_up = False

    def send(self, plan: SchedulerOutput, trace_context: Any = None) -> None:
        """Queue a plan for sending; its result comes as `on_result`."""
        trace = None if trace_context is None else inject(trace_context)
        request = convert.execute_request_of(plan, self._epoch, trace)
        if self._recorder is not None:
            self._recorder.plan(plan, request)
        self._outgoing.put_nowait(request)
        self._num_in_flight += 1

    async def run(self, events: ExecutorEvents) -> None:
        """Keep connected until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            channel: Any = make_channel(self._address)
            is_up = False
            try:
                stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
                capabilities = await self._begin_epoch(stub)
                call = stub.Execute(metadata=self._metadata)
                events.on_executor_ready(capabilities)
                is_up = self._was_up = True
                backoff_s, self._last_problem = _FIRST_BACKOFF_S, ""
                await self._exchange(call, events)
                raise Unavailable("the executor ended the stream")
            except grpc.aio.AioRpcError as error:
                problem = from_rpc_error(error)
                self._report(str(problem), is_expected=isinstance(problem, Unavailable | DeadlineExceeded))
            except TokenloomError as error:
                self._report(str(error), is_expected=isinstance(error, Unavailable))
            except Exception:  # whatever it was, a new epoch starts from the tokens that are known
                log.exception("unexpected error in the exchange with executor %s", self._address)
                self._last_problem = _UNEXPECTED
            finally:
                await channel.close()
            if is_up:
                if self._recorder is not None:
                    self._recorder.save("executor-lost" if self._last_problem != _UNEXPECTED else "error")
                events.on_executor_lost(self._last_problem)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _begin_epoch(self, stub: Any) -> Capabilities:
        capabilities_call = stub.GetCapabilities(
            executor_pb2.GetCapabilitiesRequest(), metadata=self._metadata, timeout=_CALL_TIMEOUT_S
        )
        response = await capabilities_call
        check_revision(response.schema_revision, "executor")
        capabilities = convert.capabilities_of(response)
        request = executor_pb2.InitializeRequest(num_blocks=self._num_blocks(capabilities))
        self._epoch = (await stub.Initialize(request, metadata=self._metadata, timeout=_CALL_TIMEOUT_S)).epoch
        self._outgoing = asyncio.Queue()
        self._num_in_flight = 0
        if self._recorder is not None:
            self._recorder.begin_epoch(response, request.num_blocks)
        return capabilities

    async def _exchange(self, call: Any, events: ExecutorEvents) -> None:
        writer = asyncio.create_task(self._write(call))
        try:
            while True:
                response = await self._read(call)
                if response is END_OF_STREAM:
                    return
                self._num_in_flight -= 1
                if self._recorder is not None:
                    self._recorder.result(response)
                events.on_result(convert.model_output_of(response))
        finally:
            writer.cancel()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await writer

    async def _read(self, call: Any) -> Any:
        """The next result. Waits without limit while no plan is in flight."""
        pending = asyncio.ensure_future(call.read())
        try:
            while True:
                was_idle = self._num_in_flight == 0
                done, _ = await asyncio.wait((pending,), timeout=self._step_timeout_s)
                if done:
                    return pending.result()
                if not was_idle:
                    raise Unavailable(f"the executor gave no result for {self._step_timeout_s:.0f} s")
        finally:
            pending.cancel()

    async def _write(self, call: Any) -> None:
        while True:
            await call.write(await self._outgoing.get())

    def _report(self, problem: str, is_expected: bool) -> None:
        """Log a problem once, not at each attempt; that nobody answers yet is none while the stack starts."""
        if problem != self._last_problem:
            level = logging.INFO if is_expected and not self._was_up else logging.WARNING
            log.log(level, "executor %s: %s", self._address, problem)
        self._last_problem = problem
