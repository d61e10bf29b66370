"""The executor as a stage: its server, its worker thread, its life."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tokenloom.api.v1 import executor_pb2_grpc
from tokenloom.common.grpc_server import GrpcServer
from tokenloom.executor.build import build_executor
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.liveness import Liveness
from tokenloom.executor.servicer import SERVICE_NAME, ExecutorServicer

_STOP_GRACE_S = 1.0
_POLL_S = 0.05


class ExecutorStage:
    """Serves one model; made inside the running event loop."""

    name = "executor"

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._servicer = ExecutorServicer(self._worker)
        self._server = GrpcServer(
            config.listen,
            [(executor_pb2_grpc.add_ExecutorServiceServicer_to_server, self._servicer, SERVICE_NAME)],
            cluster_token=config.process.cluster_token,
        )

        self._watching: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The TCP port that it listens on, for a `listen` with port 0."""
        return self._server.port

    async def start(self) -> None:
        """Listen at once, then load the model in the worker's thread; ready at the end.

        Raises: SetupError if the address is taken or the model cannot be served.
        """
        await self._server.start()
        loop = asyncio.get_running_loop()
        loaded = await loop.run_in_executor(self._worker, build_executor, self._config)
        self._servicer.set_loaded(loaded)
        if limit_s := self._config.plan_hang_limit_s:
            liveness = Liveness(loaded.runner.progress, limit_s, self._server.set_live)
            self._watching = asyncio.create_task(liveness.watch())
        await self._server.set_serving(True)

    async def drain(self, grace_s: float) -> None:
        """Stop being ready and tell the scheduler, which lets what runs here end and then goes.

        Returns when it has gone or sends no more plans, or after `grace_s` seconds.
        """
        await self._server.set_serving(False)
        self._servicer.drain()
        deadline = asyncio.get_running_loop().time() + grace_s
        # Idleness is a matter of time: nothing could signal it.
        while not self._servicer.is_idle and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """End open streams and the worker."""
        if self._watching is not None:
            self._watching.cancel()
        self._servicer.end_streams()
        await self._server.stop(_STOP_GRACE_S)
        self._worker.shutdown(wait=False, cancel_futures=True)
