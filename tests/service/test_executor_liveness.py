"""An executor whose model is stuck in a plan says that it is not alive; a slow one does not."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from tests.service.executor_stack import LIMIT_S, Client, new_row
from tests.tiny_models import write_tiny_model
from tokenloom.common.config import ProcessSettings
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.runner import Runner
from tokenloom.executor.stage import ExecutorStage

HANG_S = 0.3
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def liveness(client: Client) -> int:
    return int((await client.health.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)).status)


async def until_liveness(client: Client, status: int) -> None:
    while await liveness(client) != status:
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("moves", [False, True])
def test_liveness_is_lost_while_a_plan_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    go_on, execute = threading.Event(), Runner.execute

    def slow_execute(self: Runner, plan: Any) -> Any:
        while not go_on.wait(0.05):
            if moves:
                self.progress.advance()
        return execute(self, plan)

    monkeypatch.setattr(Runner, "execute", slow_execute)

    async def test() -> None:
        config = ExecutorConfig(
            ProcessSettings(),
            listen=f"unix:{tmp_path}/executor.sock",
            model=str(write_tiny_model(tmp_path / "model", "llama")),
            dtype="float32",
            kv_cache_bytes=1 << 20,
            num_threads=1,
            plan_hang_limit_s=HANG_S,
        )
        stage = ExecutorStage(config)
        await stage.start()
        client = Client(config.listen)
        try:
            await client.initialize()
            await asyncio.sleep(2 * HANG_S)
            assert await liveness(client) == SERVING, "without plans nothing has to move"
            call = client.stream()
            await call.write(client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
            if moves:
                await asyncio.sleep(4 * HANG_S)
            else:
                await until_liveness(client, NOT_SERVING)
                assert await client.serving() == SERVING, "readiness is the scheduler's business"
            go_on.set()
            assert (await call.read()).step_id == 1
            await until_liveness(client, SERVING)
        finally:
            go_on.set()
            await client.channel.close()
            await stage.stop()

    async def bounded() -> None:
        await asyncio.wait_for(test(), LIMIT_S)

    asyncio.run(bounded())
