"""Every stream between stages has its signs of life: when nothing else is sent, and also while a stage computes."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeExecutor
from tests.service.executor_stack import LIMIT_S, Client, new_row, run_with_executor
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, submit
from tests.service.tokenizer_stack import Gateway, complete_request, tokenizer_on, until
from tests.service.tokenizer_stack import run as run_tokenizer
from tests.tiny_models import write_tiny_model
from tokenloom.api.v1 import engine_pb2, executor_pb2
from tokenloom.executor.runner import Runner


async def begin(client: Client, heartbeat_ms: int) -> Any:
    request = executor_pb2.InitializeRequest(num_blocks=50, heartbeat_ms=heartbeat_ms)
    client.epoch = (await client.stub.Initialize(request, timeout=LIMIT_S)).epoch
    return client.stream()


def test_an_executor_beats_while_its_model_computes_and_tells_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    folder = write_tiny_model(tmp_path / "model", "llama")
    go_on = threading.Event()
    execute = Runner.execute

    def slow_execute(self: Runner, plan: Any) -> Any:
        go_on.wait(LIMIT_S)
        return execute(self, plan)

    monkeypatch.setattr(Runner, "execute", slow_execute)

    async def test(client: Client) -> None:
        call = await begin(client, 50)
        first = await call.read()
        assert first.HasField("heartbeat"), "the first one comes at once"
        await call.write(client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        for _ in range(3):  # while the model's thread is held
            assert (await call.read()).heartbeat == first.heartbeat
        go_on.set()
        while (response := await call.read()).HasField("heartbeat"):
            pass
        assert response.step_id == 1
        assert (await call.read()).heartbeat.progress > first.heartbeat.progress + 1, "each layer counts"

    run_with_executor(test, folder, tmp_path)


def test_an_executor_that_was_not_asked_sends_results_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    folder = write_tiny_model(tmp_path / "model", "llama")

    async def test(client: Client) -> None:
        call = await begin(client, 0)
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0.2)
        assert not reading.done()
        await call.write(client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        assert (await reading).step_id == 1

    run_with_executor(test, folder, tmp_path)


def test_a_scheduler_beats_on_silent_sessions(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(), heartbeat_s=0.1):
            tokenizer = Tokenizer(tmp_path)
            assert (await tokenizer.open()).heartbeat_ms == 100
            while (await tokenizer.read_frame()) != engine_pb2.EngineServiceSessionResponse():
                pass
            began_s = time.monotonic()
            for _ in range(3):
                assert await tokenizer.read_frame() == engine_pb2.EngineServiceSessionResponse()
            assert time.monotonic() - began_s > 0.2, "no more than was promised"
            await tokenizer.send(submits=[submit(1, [5, 6, 7], 4)])
            await tokenizer.read_until_ended(1)
            assert len(tokenizer.tokens[1]) == 4
            await tokenizer.close()

    run(test())


def test_a_tokenizer_tells_gateways_its_load_once_per_heartbeat_also_while_busy(tmp_path: Path) -> None:
    async def test() -> None:
        async with tokenizer_on(tmp_path, heartbeat_s=0.1) as stack:
            gateway = Gateway(stack)
            assert (await gateway.open()).heartbeat_ms == 100
            gateway.read()
            await until(lambda: len(gateway.loads) >= 3)
            assert {load.num_choices for load in gateway.loads} == {0}
            stack.engine.may_step.clear()
            await gateway.start(complete_request([5, 6], num_choices=3))
            await until(lambda: gateway.loads[-1].num_choices == 3)
            stack.engine.may_step.set()
            await until(lambda: bool(gateway.completed) and gateway.loads[-1].num_choices == 0)

    run_tokenizer(test())


def test_a_tokenizer_tells_gateways_of_a_new_load_soon_and_of_an_old_one_no_more_than_it_must(tmp_path: Path) -> None:
    async def test() -> None:
        async with tokenizer_on(tmp_path, heartbeat_s=60.0) as stack:
            busy, idle = Gateway(stack), Gateway(stack)
            for gateway in (busy, idle):
                await gateway.open()
                gateway.read()
            stack.engine.may_step.clear()
            await busy.start(complete_request([5, 6], num_choices=3))
            await until(lambda: idle.loads[-1:] and idle.loads[-1].num_choices == 3)
            num_told = len(idle.loads)
            await asyncio.sleep(1.2)
            assert len(idle.loads) == num_told

    run_tokenizer(test())
