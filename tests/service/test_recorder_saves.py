"""The ring is saved when the engine fails for a reason that nobody foresaw."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes import FakeExecutor
from tests.service.recording_stack import NUM_BLOCKS, entries_of, replay_on
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, submit


def test_steps_before_a_failure_while_plans_are_made_are_saved_and_replayed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        executor = FakeExecutor(num_blocks=NUM_BLOCKS)
        async with scheduler_on(tmp_path, executor, record_dir=f"{tmp_path}/saved") as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [2, 3, 4])])
            await tokenizer.read_until_ended(1)
            core = stage.engine.core
            assert core is not None
            while core.plans_in_flight:  # the last one says which rows ended
                await asyncio.sleep(0.002)

            def fail_once(now_s: float = 0.0, *, admits_new: bool = True) -> None:
                del core.schedule
                raise ZeroDivisionError("nobody foresaw this")

            core.schedule = fail_once  # type: ignore[method-assign]
            await tokenizer.send(submits=[submit(2, [5, 6, 7])])
            await tokenizer.read_until_ended(2)
            executor.restart_counting()
            await tokenizer.close()
        (saved,) = (tmp_path / "saved").iterdir()
        assert saved.name.endswith("-error.tlrec")
        prompts = [
            list(row.prompt_token_ids)
            for entry in entries_of(saved)
            if entry.HasField("plan")
            for row in entry.plan.new_rows
        ]
        assert prompts == [[2, 3, 4]]
        summary = await replay_on(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS), f"saved/{saved.name}")
        assert summary.is_equal, summary.as_text()
        assert summary.num_steps >= 8

    run(asyncio.wait_for(test(), 15.0))
    assert "unexpected error while making plans" in caplog.text
