"""The scheduler's start: the heap is frozen once, when what the engine holds for good is there."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeExecutor
from tests.service.scheduler_stack import run, serve_executor
from tokenloom.common.config import ProcessSettings
from tokenloom.common.stage import Stage, freeze_heap
from tokenloom.scheduler import __main__ as program
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.stage import SchedulerStage


def test_a_stage_is_set_up_once_and_only_when_the_engine_core_is_there(tmp_path: Path) -> None:
    async def test() -> None:
        settings = SchedulerSettings(
            ProcessSettings(), listen=f"unix:{tmp_path}/scheduler.sock", executor=f"unix:{tmp_path}/executor.sock"
        )
        had_core: list[bool] = []
        stage = SchedulerStage(settings, on_set_up=lambda: had_core.append(stage.engine.core is not None))
        await stage.start()
        await asyncio.sleep(0.1)
        assert not had_core, "there is no executor yet"
        for _ in range(2):
            server = await serve_executor(tmp_path, FakeExecutor())
            while not stage.engine.is_ready:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            await server.stop(0)
            while stage.engine.is_ready:
                await asyncio.sleep(0.01)
        assert had_core == [True]
        await stage.stop()

    run(test())


def test_the_program_freezes_the_heap_when_its_stage_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[SchedulerStage] = []

    def run_stage(name: str, process: ProcessSettings, build: Callable[[], Stage]) -> int:
        async def make() -> None:
            stage: Any = build()
            built.append(stage)

        run(make())
        return 0

    monkeypatch.setattr(program, "run_stage", run_stage)
    assert program.main([]) == 0
    before = gc.get_freeze_count()
    built[0]._on_set_up()
    try:
        assert gc.get_freeze_count() > before + 1000
    finally:
        gc.unfreeze()


def test_a_frozen_object_is_still_freed_when_nobody_holds_it() -> None:
    class Held:
        num_alive = 0

        def __init__(self) -> None:
            Held.num_alive += 1

        def __del__(self) -> None:
            Held.num_alive -= 1

    held = [Held() for _ in range(10)]
    freeze_heap()
    try:
        held.clear()
        assert Held.num_alive == 0
    finally:
        gc.unfreeze()
