"""A run of the real scheduler on the real executor with a tiny model, recorded and replayed on that executor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.service.executor_stack import Client, run_with_executor
from tests.service.recording_stack import save_ring
from tests.service.scheduler_stack import Tokenizer, submit
from tests.tiny_models import write_tiny_model
from tokenloom.api.v1 import common_pb2
from tokenloom.common.config import ProcessSettings
from tokenloom.replay.command import replay
from tokenloom.replay.config import ReplaySettings
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.stage import SchedulerStage


async def record(folder: Path) -> None:
    settings = SchedulerSettings(
        ProcessSettings(),
        listen=f"unix:{folder}/scheduler.sock",
        executor=f"unix:{folder}/executor.sock",
        num_blocks=24,
        record_steps=32,
        record_file=f"{folder}/all.tlrec",
    )
    stage = SchedulerStage(settings)
    await stage.start()
    try:
        while not stage.engine.is_ready:
            await asyncio.sleep(0.01)
        tokenizer = Tokenizer(folder)
        await tokenizer.open()
        shared = list(range(40, 75))
        for wave in range(2):
            handles = [10 * wave + i for i in range(1, 7)]
            params = {i: common_pb2.SamplingParams(temperature=0.8, seed=i) for i in handles}
            await tokenizer.send(submits=[submit(i, [*shared, i], 40, sampling=params[i]) for i in handles])
            await tokenizer.read_until_ended(*handles)
        await tokenizer.send(submits=[submit(99, [*shared, 3], 60, sampling=params[handles[0]])])
        while len(tokenizer.tokens.get(99, [])) < 50:
            await tokenizer.read()
        assert await save_ring(folder) <= 32
        await tokenizer.close()
    finally:
        await stage.stop()


def test_our_executor_gives_the_recorded_tokens_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    folder = write_tiny_model(tmp_path / "model", "llama")

    async def test(client: Client) -> None:
        await record(tmp_path)
        for name, is_cut in (("all.tlrec", False), ("ring.tlrec", True)):
            settings = ReplaySettings(f"{tmp_path}/{name}", executor=f"unix:{tmp_path}/executor.sock", timeout_s=20.0)
            summary = await replay(settings)
            assert summary.is_equal, f"{name}: {summary.as_text()}"
            assert summary.num_tokens > 0
            assert (summary.num_preparation_steps > 0) is is_cut

    run_with_executor(test, folder, tmp_path)
