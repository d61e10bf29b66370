"""The four stages in the test's own process, over real sockets, on a tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvloop

from tests.tiny_models import MAX_POSITION_EMBEDDINGS, write_tiny_model
from tokenloom.api.v1 import engine_pb2_grpc, inference_pb2_grpc
from tokenloom.common.channel import PUBLIC_MESSAGE_BYTES, make_channel
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

T = TypeVar("T")


@dataclass(frozen=True)
class Stages:
    """Running stages, seen through their interfaces.

    Attributes:
        client: of the gateway.
        engine: stub of the scheduler's EngineService.
        inference: stub of the tokenizer's InferenceService.
        addresses: of executor, scheduler and tokenizer.
    """

    client: httpx.AsyncClient
    engine: Any
    inference: Any
    addresses: Mapping[str, str]

    async def complete(self, headers: Mapping[str, str] | None = None, **body: Any) -> dict[str, Any]:
        """The answer to a text completion: greedy and not ended by a token, unless the body says otherwise."""
        response = await self.client.post("/v1/completions", json=greedy_body(**body), headers=headers)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, headers: Mapping[str, str] | None = None, **body: Any) -> AsyncGenerator[dict[str, Any]]:
        """The events of a streamed text completion, an error event included; without its end mark."""
        body = greedy_body(stream=True, **body)
        async with self.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    async def metrics(self) -> dict[str, float]:
        """All samples of the gateway's page, which here is that of all stages, by name with labels."""
        page = (await self.client.get("/metrics")).text
        rows = (line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in rows}


def greedy_body(**body: Any) -> dict[str, Any]:
    """A text completion whose token ids are told, and whose length is known."""
    return {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}


def total(metrics: Mapping[str, float], name: str) -> float:
    """A metric's value, summed over its labels."""
    return sum(value for full_name, value in metrics.items() if full_name.partition("{")[0] == name)


def num_cached_tokens(answer: Mapping[str, Any]) -> int:
    """Prompt tokens that an answer's request found in the prefix cache."""
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@asynccontextmanager
async def running_stages(
    folder: Path,
    *,
    executor: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    gateway: Mapping[str, Any] | None = None,
    max_positions: int = MAX_POSITION_EMBEDDINGS,
    **scheduler: Any,
) -> AsyncIterator[Stages]:
    """Stages that are ready.

    Args:
        folder: for sockets and the model.
        executor: settings of the executor.
        tokenizer: settings of the tokenizer.
        gateway: settings of the gateway.
        max_positions: the model's context.
        scheduler: settings of the scheduler.
    """
    model = str(write_tiny_model(folder / "tiny-llama", "llama", max_positions=max_positions))
    at = {name: f"unix:{folder}/{name}" for name in ("executor", "scheduler", "tokenizer")}
    process = ProcessSettings()
    of_executor = {"model": model, "dtype": "float32", "num_threads": 1, **(executor or {})}
    of_tokenizer = {"model": model, "listen": at["tokenizer"], **(tokenizer or {})}
    of_gateway = {"listen": "127.0.0.1:0", "tokenizer": (at["tokenizer"],), **(gateway or {})}
    http = GatewayStage(GatewayConfig(process, **of_gateway))
    stages: list[Stage] = [
        ExecutorStage(ExecutorConfig(process, listen=at["executor"], **of_executor)),
        SchedulerStage(SchedulerSettings(process, listen=at["scheduler"], executor=at["executor"], **scheduler)),
        TokenizerStage(TokenizerConfig(process, scheduler=at["scheduler"], **of_tokenizer)),
        http,
    ]
    for stage in stages:
        await stage.start()
    engine = make_channel(at["scheduler"])
    inference = make_channel(at["tokenizer"], max_message_bytes=PUBLIC_MESSAGE_BYTES)
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http.port}", timeout=60, limits=limits) as client:
            await _wait_until_ready(client)
            yield Stages(
                client,
                engine_pb2_grpc.EngineServiceStub(engine),
                inference_pb2_grpc.InferenceServiceStub(inference),
                at,
            )
    finally:
        await engine.close(None)
        await inference.close(None)
        for stage in reversed(stages):
            await stage.stop()


@asynccontextmanager
async def all_stages(folder: Path, **scheduler: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Stages that are ready; gives a client of the gateway.

    Args:
        folder: for sockets and the model.
        scheduler: settings of the scheduler.
    """
    async with running_stages(folder, **scheduler) as stages:
        yield stages.client


class StagesOfModule:
    """Stages that stay up for several tests, each of which runs a coroutine on their loop. Between tests all stands."""

    def __init__(self, runner: asyncio.Runner, stages: Stages) -> None:
        self._runner = runner
        self._stages = stages

    def run(self, test: Callable[[Stages], Coroutine[Any, Any, T]], limit_s: float = 60.0) -> T:
        """Run a test. Raises: TimeoutError after `limit_s` seconds."""
        return self._runner.run(asyncio.wait_for(test(self._stages), limit_s))


@contextmanager
def stages_of_module(folder: Path, **settings: Any) -> Iterator[StagesOfModule]:
    """Stages for several tests; `settings` as of `running_stages`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        context = running_stages(folder, **settings)
        stages = runner.run(asyncio.wait_for(context.__aenter__(), 60))
        try:
            yield StagesOfModule(runner, stages)
        finally:
            runner.run(asyncio.wait_for(context.__aexit__(None, None, None), 60))


async def _wait_until_ready(client: httpx.AsyncClient) -> None:
    for _ in range(400):
        if (await client.get("/ready")).status_code == 200:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the stack is not ready")
