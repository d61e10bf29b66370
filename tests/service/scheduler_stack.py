"""The scheduler stage over real sockets, between a fake executor and a hand-driven tokenizer session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from tests.fakes import EXECUTOR_SERVICE, FakeExecutor
from tokenloom.api.v1 import common_pb2, engine_pb2, engine_pb2_grpc, executor_pb2_grpc
from tokenloom.common.channel import make_channel
from tokenloom.common.config import ProcessSettings
from tokenloom.common.grpc_server import GrpcServer
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.stage import SchedulerStage

LIMIT_S = 20.0


def run(test: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(test, LIMIT_S))


async def serve_executor(folder: Path, executor: FakeExecutor) -> GrpcServer:
    add = executor_pb2_grpc.add_ExecutorServiceServicer_to_server
    server = GrpcServer(f"unix:{folder}/executor.sock", [(add, executor, EXECUTOR_SERVICE)])
    await server.start()
    return server


@asynccontextmanager
async def scheduler_on(
    folder: Path, executor: FakeExecutor, *, executor_server: GrpcServer | None = None, **changes: Any
) -> AsyncIterator[SchedulerStage]:
    """A scheduler stage that is ready, its fake executor beside it."""
    server = executor_server or await serve_executor(folder, executor)
    settings = SchedulerSettings(
        ProcessSettings(cluster_token=changes.pop("cluster_token", "")),
        listen=f"unix:{folder}/scheduler.sock",
        executor=f"unix:{folder}/executor.sock",
        **changes,
    )
    stage = SchedulerStage(settings)
    await stage.start()
    try:
        while not stage.engine.is_ready:
            await asyncio.sleep(0.01)
        yield stage
    finally:
        await stage.stop()
        await server.stop(0.1)
    assert not executor.violations, executor.violations
    assert executor.num_epochs == 1, "the scheduler lost its executor"


class Tokenizer:
    """A session driven by hand; collects what it is told."""

    def __init__(self, folder: Path) -> None:
        self.channel: Any = make_channel(f"unix:{folder}/scheduler.sock")
        self.stub: Any = engine_pb2_grpc.EngineServiceStub(self.channel)
        self.frames: list[engine_pb2.EngineServiceSessionResponse] = []
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, engine_pb2.Finished] = {}
        self.rejected: dict[int, common_pb2.Error] = {}
        self.cached: dict[int, int] = {}
        self.logprob_ids: dict[int, list[int]] = {}

    async def open(self, **hello: Any) -> engine_pb2.Welcome:
        self.call = self.stub.Session()
        hello = {"schema_revision": 1, "client_id": "test", **hello}
        await self.call.write(engine_pb2.EngineServiceSessionRequest(hello=engine_pb2.Hello(**hello)))
        first: engine_pb2.EngineServiceSessionResponse = await self.call.read()
        return first.welcome

    async def send(self, **parts: Any) -> None:
        await self.call.write(engine_pb2.EngineServiceSessionRequest(**parts))

    async def read(self) -> None:
        """Read until there are news of requests; how busy the engine is does not count."""
        while True:
            frame = await self.read_frame()
            if frame.rejected or frame.accepted or frame.HasField("outputs") or frame.finished:
                return

    async def read_frame(self) -> engine_pb2.EngineServiceSessionResponse:
        """Read one frame, whatever it tells."""
        frame: engine_pb2.EngineServiceSessionResponse = await self.call.read()
        self.frames.append(frame)
        outputs, at, logprobs_at = frame.outputs, 0, 0
        for handle, first, count in zip(outputs.handles, outputs.first_token_indexes, outputs.num_tokens, strict=True):
            told = self.tokens.setdefault(handle, [])
            assert first == len(told), "tokens are told once, in order"
            told += outputs.token_ids[at : at + count]
            at += count
        for handle, count, width in zip(
            outputs.handles, outputs.num_tokens, outputs.num_logprobs_per_token, strict=True
        ):
            entries = list(outputs.logprob_token_ids[logprobs_at : logprobs_at + count * width])
            self.logprob_ids.setdefault(handle, []).extend(entries)
            logprobs_at += count * width
        assert logprobs_at == len(outputs.logprobs)
        self.cached |= {accepted.handle: accepted.num_cached_tokens for accepted in frame.accepted}
        self.finished |= {finished.handle: finished for finished in frame.finished}
        self.rejected |= {rejected.handle: rejected.error for rejected in frame.rejected}
        return frame

    async def read_until_ended(self, *handles: int) -> None:
        while not set(handles) <= self.finished.keys() | self.rejected.keys():
            await self.read()

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


def submit(handle: int, prompt: list[int], max_tokens: int = 8, **fields: Any) -> engine_pb2.Submit:
    return engine_pb2.Submit(
        handle=handle,
        request_id=fields.pop("request_id", f"request-{handle}"),
        prompt_token_ids=prompt,
        stop=stop_conditions(max_tokens, **fields.pop("stop", {})),
        **fields,
    )


def stop_conditions(max_tokens: int, **fields: Any) -> common_pb2.StopConditions:
    return common_pb2.StopConditions(max_tokens=max_tokens, **fields)
