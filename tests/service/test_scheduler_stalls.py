"""An executor that hangs is lost to the scheduler within its limits; requests wait for it, but not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeExecutor, continuation
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, serve_executor, submit
from tokenloom.api.v1 import common_pb2, engine_pb2, executor_pb2
from tokenloom.scheduler.stage import SchedulerStage

STALL_S = 0.4


class HangingExecutor(FakeExecutor):
    """Hangs in different ways while `may_run` is cleared.

    Args:
        beats: heartbeats come all the same: its model hangs, not its event loop.
        moves: they tell progress: it is only slow.
    """

    def __init__(self, *, beats: bool = False, moves: bool = False, knows_heartbeats: bool = True) -> None:
        super().__init__()
        self.beats = beats
        self.moves = moves
        self.knows_heartbeats = knows_heartbeats
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.num_refused = 0

    @property
    def may_beat(self) -> bool:  # type: ignore[override]
        return self.knows_heartbeats and (self.may_run.is_set() or self.beats)

    def heartbeat(self) -> executor_pb2.ExecuteResponse:
        self.progress += self.moves
        return super().heartbeat()

    async def GetCapabilities(self, request: Any, context: Any) -> executor_pb2.GetCapabilitiesResponse:
        if not self.may_run.is_set():
            self.num_refused += 1
            await self.may_run.wait()
        return await super().GetCapabilities(request, context)

    async def _results(self, request_iterator: Any) -> AsyncIterator[executor_pb2.ExecuteResponse]:  # type: ignore[override]
        async with contextlib.aclosing(super()._results(request_iterator)) as results:
            async for result in results:
                await self.may_run.wait()
                yield result


async def until_ready(stage: SchedulerStage, is_ready: bool, limit_s: float = 10.0) -> float:
    """Wait for the engine's readiness; returns how long that took."""
    began_s = time.monotonic()
    async with asyncio.timeout(limit_s):
        while stage.engine.is_ready != is_ready:
            await asyncio.sleep(0.01)
    return time.monotonic() - began_s


async def load_that(tokenizer: Tokenizer, *, waits: bool) -> engine_pb2.Load:
    """Read until a load says so."""
    while not ((frame := await tokenizer.read_frame()).HasField("load") and frame.load.waits_for_executor == waits):
        pass
    return frame.load


@pytest.mark.parametrize("has_plans", [True, False])
def test_a_stopped_executor_is_lost_within_the_stall_timeout_and_its_requests_go_on_when_it_is_back(
    tmp_path: Path, has_plans: bool
) -> None:
    async def test() -> None:
        executor = HangingExecutor()
        async with scheduler_on(tmp_path, executor, stall_timeout_s=STALL_S) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            executor.may_run.clear()
            if has_plans:
                await tokenizer.send(submits=[submit(1, [5, 6, 7], 20)])
            took_s = await until_ready(stage, False)
            assert STALL_S * 0.3 <= took_s <= STALL_S + 2.0
            await load_that(tokenizer, waits=True)
            if not has_plans:
                await tokenizer.send(submits=[submit(1, [5, 6, 7], 20)])  # taken: it waits for the executor
            executor.may_run.set()
            await load_that(tokenizer, waits=False)
            await tokenizer.read_until_ended(1)
            assert tokenizer.tokens[1] == continuation([5, 6, 7], 20)
            executor.restart_counting()

    run(test())


def test_a_model_that_hangs_is_lost_although_heartbeats_come(tmp_path: Path) -> None:
    async def test() -> None:
        executor = HangingExecutor(beats=True)
        async with scheduler_on(tmp_path, executor, stall_timeout_s=STALL_S, step_timeout_s=0.5) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            executor.may_run.clear()
            await asyncio.sleep(2 * STALL_S)
            assert stage.engine.is_ready, "without plans nothing has to move"
            await tokenizer.send(submits=[submit(1, [5, 6, 7], 20)])
            await until_ready(stage, False)
            executor.may_run.set()
            await tokenizer.read_until_ended(1)
            assert tokenizer.tokens[1] == continuation([5, 6, 7], 20)
            executor.restart_counting()

    run(test())


def test_a_long_step_that_moves_is_waited_for(tmp_path: Path) -> None:
    async def test() -> None:
        executor = HangingExecutor(beats=True, moves=True)
        async with scheduler_on(tmp_path, executor, stall_timeout_s=STALL_S, step_timeout_s=0.5) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            executor.may_run.clear()
            await tokenizer.send(submits=[submit(1, [5, 6, 7], 20)])
            for _ in range(100):
                assert stage.engine.is_ready
                await asyncio.sleep(0.02)
            executor.may_run.set()
            await tokenizer.read_until_ended(1)

    run(test())


def test_an_executor_that_knows_no_heartbeats_is_judged_by_its_plans_alone(tmp_path: Path) -> None:
    async def test() -> None:
        executor = HangingExecutor(knows_heartbeats=False)
        async with scheduler_on(tmp_path, executor, stall_timeout_s=STALL_S, step_timeout_s=0.8) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await asyncio.sleep(3 * STALL_S)
            assert stage.engine.is_ready
            executor.may_run.clear()
            await tokenizer.send(submits=[submit(1, [5, 6, 7], 20)])
            assert await until_ready(stage, False) >= 0.7
            executor.may_run.set()
            await tokenizer.read_until_ended(1)
            executor.restart_counting()

    run(test())


def test_requests_wait_for_a_lost_executor_so_long_and_new_ones_are_refused_until_it_is_back(tmp_path: Path) -> None:
    async def test() -> None:
        executor = HangingExecutor()
        async with scheduler_on(tmp_path, executor, stall_timeout_s=STALL_S, executor_wait_s=1.0) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            executor.may_run.clear()
            await tokenizer.send(submits=[submit(1, [5, 6, 7], 20)])
            await until_ready(stage, False)
            lost_s = time.monotonic()
            await tokenizer.send(submits=[submit(2, [5, 6, 8], 20)])
            await tokenizer.read_until_ended(1, 2)
            assert time.monotonic() - lost_s >= 0.9, "nothing fails before"
            assert tokenizer.finished[1].reason == engine_pb2.ENGINE_FINISH_REASON_ERROR
            assert is_lost(tokenizer.finished[1].error)
            assert is_lost(tokenizer.rejected[2]), "it never ran"
            await tokenizer.send(submits=[submit(3, [5, 6, 9], 20)])
            await tokenizer.read_until_ended(3)
            assert is_lost(tokenizer.rejected[3])
            assert not stage.engine.registry.streams

            executor.may_run.set()
            await until_ready(stage, True)
            await tokenizer.send(submits=[submit(4, [5, 6, 7], 20)])
            await tokenizer.read_until_ended(4)
            assert tokenizer.tokens[4] == continuation([5, 6, 7], 20)
            executor.restart_counting()

    def is_lost(error: common_pb2.Error) -> bool:
        return (error.reason, error.code) == ("EXECUTOR_LOST", 14)

    run(test())


def test_a_killed_executor_turns_readiness_red_at_once_and_an_open_session_hears_of_it(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        server = await serve_executor(tmp_path, executor)
        async with scheduler_on(tmp_path, executor, executor_server=server) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await server.stop(0)
            assert await until_ready(stage, False) < 2.0
            await asyncio.wait_for(load_that(tokenizer, waits=True), 2.0)
            later = Tokenizer(tmp_path)
            await later.open()
            assert (await later.read_frame()).load.waits_for_executor, "who comes later is told, too"
            again = await serve_executor(tmp_path, executor)
            await load_that(tokenizer, waits=False)
            await again.stop(0)
            executor.restart_counting()

    run(test())
