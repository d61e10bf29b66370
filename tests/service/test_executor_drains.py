"""An executor that is told to stop: it says so, ends what it has, and takes no other scheduler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.service.executor_stack import END_OF_STREAM, LIMIT_S, Client, ask, new_row
from tests.tiny_models import write_tiny_model
from tokenloom.api.v1 import executor_pb2
from tokenloom.common.config import ProcessSettings
from tokenloom.executor import plan_stream
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.runner import Runner
from tokenloom.executor.stage import ExecutorStage

Test = Callable[[ExecutorStage, Client], Awaitable[None]]


@pytest.fixture
def with_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    """Runs a test's body against a stage and a client of it."""
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    listen, model = f"unix:{tmp_path}/executor.sock", str(write_tiny_model(tmp_path / "model", "llama"))
    config = ExecutorConfig(
        ProcessSettings(), listen=listen, model=model, dtype="float32", kv_cache_bytes=1 << 20, num_threads=1
    )

    async def main(test: Test) -> None:
        stage, client = ExecutorStage(config), Client(listen)
        await stage.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                await test(stage, client)
        finally:
            await client.channel.close()
            await stage.stop()

    return lambda test: asyncio.run(main(test))


async def begin(client: Client, heartbeat_ms: int = 60_000) -> Any:
    """A new epoch's stream."""
    request = executor_pb2.InitializeRequest(num_blocks=50, heartbeat_ms=heartbeat_ms)
    client.epoch = (await client.stub.Initialize(request, timeout=LIMIT_S)).epoch
    call = client.stream()
    if heartbeat_ms:
        assert not (await call.read()).heartbeat.draining
    return call


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    code: grpc.StatusCode = caught.value.code()
    return code


def test_the_scheduler_is_told_at_once_and_may_go_on_until_it_goes(with_stage: Callable[[Test], None]) -> None:
    async def test(stage: ExecutorStage, client: Client) -> None:
        call = await begin(client)
        await ask(call, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        draining = asyncio.create_task(stage.drain(LIMIT_S))
        assert (await call.read()).heartbeat.draining
        assert await client.serving() == 2, "no longer ready"
        assert (await ask(call, client.plan(2, [(1, 1, 3, [])]))).step_id == 2
        for refused in (
            client.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(), timeout=LIMIT_S),
            client.stub.Initialize(executor_pb2.InitializeRequest(num_blocks=50), timeout=LIMIT_S),
            client.stream().read(),
        ):
            assert await code_of(refused) is grpc.StatusCode.UNAVAILABLE
        assert (await ask(call, client.plan(3, [(1, 1, 4, [])]))).step_id == 3
        call.cancel()
        await draining

    with_stage(test)


def test_one_that_no_plan_ever_reached_tells_it_too_and_ends_when_its_stream_does(
    with_stage: Callable[[Test], None],
) -> None:
    async def test(stage: ExecutorStage, client: Client) -> None:
        call = await begin(client)
        draining = asyncio.create_task(stage.drain(LIMIT_S))
        assert (await call.read()).heartbeat.draining
        call.cancel()
        async with asyncio.timeout(plan_stream.IDLE_S / 2):
            await draining

    with_stage(test)


def test_a_scheduler_that_asked_for_no_heartbeats_has_a_second_without_plans_to_go(
    with_stage: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_stream, "IDLE_S", 0.2)

    async def test(stage: ExecutorStage, client: Client) -> None:
        call = await begin(client, heartbeat_ms=0)
        await ask(call, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        draining = asyncio.create_task(stage.drain(LIMIT_S))
        for step_id in range(2, 6):
            await asyncio.sleep(0.1)
            await ask(call, client.plan(step_id, [(1, 1, step_id + 1, [])]))
            assert not draining.done()
        await draining

    with_stage(test)


def test_a_step_longer_than_the_grace_period_is_answered_but_no_later_one_is_run(
    with_stage: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_stream, "IDLE_S", 0.0)
    has_begun, go_on = threading.Event(), threading.Event()
    execute = Runner.execute

    def slow_execute(self: Runner, plan: Any) -> Any:
        has_begun.set()
        go_on.wait(LIMIT_S)
        return execute(self, plan)

    monkeypatch.setattr(Runner, "execute", slow_execute)

    async def test(stage: ExecutorStage, client: Client) -> None:
        call = await begin(client)
        await call.write(client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        await asyncio.to_thread(has_begun.wait, LIMIT_S)
        draining = asyncio.create_task(stage.drain(0.2))
        assert (await call.read()).heartbeat.draining
        await asyncio.sleep(0.1)
        assert not draining.done(), "a step that runs is no idleness"
        await draining
        stopping = asyncio.create_task(stage.stop())
        await asyncio.sleep(0)
        await call.write(client.plan(2, [(1, 1, 3, [])]))
        go_on.set()
        assert (await call.read()).step_id == 1
        assert await call.read() is END_OF_STREAM
        assert await call.code() is grpc.StatusCode.OK
        await stopping

    with_stage(test)
