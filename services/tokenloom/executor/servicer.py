"""ExecutorService over gRPC: plans in, results out, in order.

All work on the model happens in one thread, so that the event loop stays free for frames and health checks and a
runner needs no locks. Plans wait for that thread in the order they came; when too many wait, a stream is not read from
and gRPC's flow control holds the scheduler back. Initialize begins a new epoch: it waits for the plan that runs, and
what is queued of the old epoch is never run. An epoch ends with its stream, too, however that ends.

A servicer that drains begins no epoch and takes no stream; the one that is open goes on until its scheduler ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tokenloom.api.v1 import executor_pb2, executor_pb2_grpc
from tokenloom.common.errors import InvalidArgument, Unavailable
from tokenloom.executor import convert, metrics
from tokenloom.executor.capabilities import Capabilities
from tokenloom.executor.epochs import Epochs
from tokenloom.executor.plan_stream import MAX_PLANS_IN_FLIGHT, PlanStream, StreamParts
from tokenloom.executor.runner import Runner
from tokenloom.executor.spans import RowSpans

log = logging.getLogger(__name__)
SERVICE_NAME = "tokenloom.api.v1.ExecutorService"
_LOAD_LIMIT_S = 600.0
_LEAST_HEARTBEAT_S = 0.01


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run."""

    runner: Runner
    capabilities: Capabilities


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Serves one model to one scheduler at a time; made inside the running event loop.

    Args:
        worker: the one thread that runs everything on the model; owned by the caller.
    """

    def __init__(self, worker: ThreadPoolExecutor) -> None:
        self._worker = worker
        self._loaded: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._epochs = Epochs()
        self._spans = RowSpans()
        self._streams: set[PlanStream] = set()
        self._is_draining = False

    def set_loaded(self, loaded: Loaded) -> None:
        """The model is ready; calls that wait for it go on."""
        self._loaded.set_result(loaded)

    @property
    def is_idle(self) -> bool:
        """No stream is open, or none has brought a plan for a second."""
        return all(stream.is_idle for stream in self._streams)

    def drain(self) -> None:
        """Tell the schedulers that nothing new shall begin here."""
        self._is_draining = True
        for stream in self._streams:
            stream.beat()

    def end_streams(self) -> None:
        """End all streams, each behind the results of what is in flight."""
        for stream in self._streams:
            stream.end()

    async def GetCapabilities(
        self, request: executor_pb2.GetCapabilitiesRequest, context: object
    ) -> executor_pb2.GetCapabilitiesResponse:
        """Answer once the model is loaded."""
        loaded = await self._loaded_unless_draining()
        return convert.capabilities_to_proto(loaded.capabilities, self._epochs.boot_id, MAX_PLANS_IN_FLIGHT)

    async def Initialize(
        self, request: executor_pb2.InitializeRequest, context: object
    ) -> executor_pb2.InitializeResponse:
        """Lay out KV memory and begin an epoch; earlier plans, rows and streams are void."""
        loaded = await self._loaded_unless_draining()
        most = loaded.capabilities.max_num_blocks
        if not 2 <= request.num_blocks <= most:
            raise InvalidArgument(f"{request.num_blocks} blocks; from 2 to {most} fit", field="num_blocks")
        if request.HasField("last_epoch"):
            self._epochs.check_not_replaced(request.last_epoch.boot_id, request.last_epoch.counter)
        if isinstance(stream := self._epochs.owner, PlanStream):
            stream.void()
        self._spans.end_all()
        counter = self._epochs.begin(_heartbeat_s(request.heartbeat_ms))
        await asyncio.get_running_loop().run_in_executor(self._worker, loaded.runner.initialize, request.num_blocks)
        metrics.EPOCHS.inc()
        log.info("epoch %d begins with %d blocks", counter, request.num_blocks)
        epoch = executor_pb2.Epoch(boot_id=self._epochs.boot_id, counter=counter)
        return executor_pb2.InitializeResponse(epoch=epoch)

    async def Execute(
        self, request_iterator: AsyncIterator[executor_pb2.ExecuteRequest], context: object
    ) -> AsyncIterator[executor_pb2.ExecuteResponse]:
        """Run a scheduler's plans; one stream per epoch."""
        loaded = await self._loaded_unless_draining()
        defaults = loaded.capabilities.default_sampling
        parts = StreamParts(loaded.runner, self._worker, self._epochs, self._spans, defaults, lambda: self._is_draining)
        stream = PlanStream(parts)
        self._streams.add(stream)
        self._epochs.join(stream)
        reader = asyncio.create_task(stream.read(request_iterator))
        try:
            async for response in stream.responses():
                yield response
        finally:
            self._streams.discard(stream)
            if self._epochs.end(stream):
                self._spans.end_all()
            reader.cancel()
            # How the client ended the stream no longer matters.
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reader
            stream.end_spans()

    async def _loaded_unless_draining(self) -> Loaded:
        if self._is_draining:
            raise Unavailable("the executor is about to stop", reason="DRAINING", retry_after_s=1)
        try:
            async with asyncio.timeout(_LOAD_LIMIT_S):
                return await asyncio.shield(self._loaded)
        except TimeoutError:
            raise Unavailable("the model is still loading", retry_after_s=10) from None


def _heartbeat_s(heartbeat_ms: int) -> float:
    return max(heartbeat_ms / 1000, _LEAST_HEARTBEAT_S) if heartbeat_ms else 0.0
