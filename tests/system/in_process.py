"""The four stages in the test's own process, over real sockets, on a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.tiny_models import write_tiny_model
from tokenloom.common.config import ProcessSettings
from tokenloom.common.stage import Stage
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.stage import ExecutorStage
from tokenloom.gateway.config import GatewayConfig
from tokenloom.gateway.server import GatewayStage
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.stage import SchedulerStage
from tokenloom.tokenizer.config import TokenizerConfig
from tokenloom.tokenizer.stage import TokenizerStage


@asynccontextmanager
async def all_stages(folder: Path, **scheduler: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Stages that are ready; gives a client of the gateway.

    Args:
        folder: for sockets and the model.
        scheduler: settings of the scheduler.
    """
    model = str(write_tiny_model(folder / "tiny-llama", "llama"))
    at = {name: f"unix:{folder}/{name}" for name in ("executor", "scheduler", "tokenizer")}
    process = ProcessSettings()
    gateway = GatewayStage(GatewayConfig(process, listen="127.0.0.1:0", tokenizer=(at["tokenizer"],)))
    executor = ExecutorConfig(process, listen=at["executor"], model=model, dtype="float32", num_threads=1)
    stages: list[Stage] = [
        ExecutorStage(executor),
        SchedulerStage(SchedulerSettings(process, listen=at["scheduler"], executor=at["executor"], **scheduler)),
        TokenizerStage(TokenizerConfig(process, listen=at["tokenizer"], scheduler=at["scheduler"], model=model)),
        gateway,
    ]
    for stage in stages:
        await stage.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=60) as client:
            await _wait_until_ready(client)
            yield client
    finally:
        for stage in reversed(stages):
            await stage.stop()


async def _wait_until_ready(client: httpx.AsyncClient) -> None:
    for _ in range(400):
        if (await client.get("/ready")).status_code == 200:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the stack is not ready")
