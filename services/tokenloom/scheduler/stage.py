"""The scheduler as a process: server, engine, executor client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from tokenloom.api.v1 import engine_pb2_grpc
from tokenloom.common.grpc_server import GrpcServer
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.engine import Engine
from tokenloom.scheduler.executor_client import ExecutorClient, StallLimits
from tokenloom.scheduler.recorder import make_recorder
from tokenloom.scheduler.servicer import EngineServicer

log = logging.getLogger(__name__)
SERVICE = "tokenloom.api.v1.EngineService"
_PAUSE_AFTER_FAILURE_S = 0.5


class SchedulerStage:
    """Implements `tokenloom.common.stage.Stage`.

    Args:
        on_set_up: called once, when the first executor is there and the engine core with it: `start` does not wait for
            that.
    """

    name = "scheduler"

    def __init__(self, settings: SchedulerSettings, on_set_up: Callable[[], object] = lambda: None) -> None:
        self._on_set_up = on_set_up
        token = settings.process.cluster_token
        self._recorder = make_recorder(settings, lambda: () if self.engine.core is None else self.engine.core.running)
        self._client = ExecutorClient(
            settings.executor, token, lambda can: can.num_blocks(settings), StallLimits.of(settings), self._recorder
        )
        self.engine = Engine(settings, self._client)
        servicer = EngineServicer(self.engine, self._recorder, settings.heartbeat_s)
        services = [(engine_pb2_grpc.add_EngineServiceServicer_to_server, servicer, SERVICE)]
        self.server = GrpcServer(settings.listen, services, cluster_token=token)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen, and look for the executor in the background."""
        await self.server.start()
        self._tasks = [
            asyncio.create_task(self._follow_executor()),
            asyncio.create_task(self._follow_readiness()),
        ]

    async def drain(self, grace_s: float) -> None:
        """Give new requests back to the tokenizers, which keep them for the next engine; wait for those here."""
        self.engine.drain()
        await self.server.set_serving(False)
        await self.engine.wait_until_idle(grace_s)

    async def stop(self) -> None:
        """Leave the executor, hand what is left over to the tokenizers, close everything."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.engine.stop()
        await self.server.stop(1.0)
        await asyncio.to_thread(self._recorder.close)

    async def _follow_executor(self) -> None:
        """Keep connected to the executor; begin a new epoch when the engine failed."""
        while True:
            self.engine.has_failed.clear()
            connection = asyncio.create_task(self._client.run(self.engine))
            failure = asyncio.create_task(self.engine.has_failed.wait())
            try:
                await asyncio.wait({connection, failure}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                connection.cancel()
                failure.cancel()
                await asyncio.wait({connection, failure})
            if not connection.cancelled() and (error := connection.exception()) is not None:
                log.error("unexpected error in the connection to the executor", exc_info=error)
            if self.engine.is_executor_up:
                self._recorder.save("error")
                self.engine.on_executor_lost("the engine failed and begins anew")
            await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _follow_readiness(self) -> None:
        is_set_up = False
        while True:
            self.engine.readiness_changed.clear()  # first, so that a change during the call is not lost
            if self.engine.is_ready and not is_set_up:
                is_set_up = True
                self._on_set_up()
            await self.server.set_serving(self.engine.is_ready)
            await self.engine.readiness_changed.wait()
