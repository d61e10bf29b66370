"""An executor in the test's own process, and a client that does by hand what a scheduler does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.tiny_models import make_tiny_model
from tokenloom.api.v1 import common_pb2, executor_pb2, executor_pb2_grpc
from tokenloom.common.channel import bearer_metadata, make_channel
from tokenloom.common.config import ProcessSettings
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.servicer import SERVICE_NAME
from tokenloom.executor.stage import ExecutorStage

GREEDY = common_pb2.SamplingParams(temperature=0.0)
LIMIT_S = 30.0
END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class Client:
    """What a scheduler does, by hand."""

    def __init__(self, address: str, token: str = "") -> None:
        self.channel: Any = make_channel(address)
        self._metadata = bearer_metadata(token)
        self.stub: Any = executor_pb2_grpc.ExecutorServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
        self.epoch = executor_pb2.Epoch()

    async def initialize(self, num_blocks: int = 50) -> None:
        request = executor_pb2.InitializeRequest(num_blocks=num_blocks)
        self.epoch = (await self.stub.Initialize(request, timeout=LIMIT_S, metadata=self._metadata)).epoch

    def plan(self, step_id: int, rows: list[tuple[int, int, int, list[int]]], **others: Any) -> Any:
        """A plan of rows (id, scheduled, computed, new blocks); single tokens after the first feed back."""
        return executor_pb2.ExecuteRequest(
            **{
                "epoch": self.epoch,
                "step_id": step_id,
                "row_ids": [row[0] for row in rows],
                "num_scheduled_tokens": [row[1] for row in rows],
                "num_computed_tokens": [row[2] for row in rows],
                "feeds_back": [row[1] == 1 and row[2] > 0 for row in rows],
                "num_new_blocks": [len(row[3]) for row in rows],
                "new_block_ids": [block for row in rows for block in row[3]],
                **others,
            }
        )

    def stream(self) -> Any:
        return self.stub.Execute(timeout=LIMIT_S)

    async def serving(self) -> int:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=LIMIT_S)
        return int(answer.status)


def new_row(row_id: int, prompt: list[int], **others: Any) -> executor_pb2.NewRow:
    return executor_pb2.NewRow(**{"row_id": row_id, "prompt_token_ids": prompt, "sampling": GREEDY, **others})


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for what nothing signals; `run_with_executor` bounds it."""
    while not is_so():
        await asyncio.sleep(0.01)


async def ask(call: Any, plan: Any) -> Any:
    await call.write(plan)
    return await call.read()


@asynccontextmanager
async def running_executor(folder: Path, tmp_path: Path, cluster_token: str = "") -> AsyncIterator[Client]:
    listen = f"unix:{tmp_path}/executor.sock"
    process = ProcessSettings(cluster_token=cluster_token)
    config = ExecutorConfig(
        process, listen=listen, model=str(folder), dtype="float32", kv_cache_bytes=1 << 20, num_threads=1
    )
    stage = ExecutorStage(config)
    await stage.start()
    client = Client(listen, cluster_token)
    try:
        yield client
    finally:
        await client.channel.close()
        await stage.stop()


Test = Callable[[Client], Awaitable[None]]


def run_with_executor(test: Test, folder: Path, tmp_path: Path) -> None:
    """Run a test's body against a fresh executor."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), running_executor(folder, tmp_path) as client:
            await test(client)

    asyncio.run(main())


def generate(prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' greedy continuation by the model of `folder`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_tiny_model("llama")
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found
