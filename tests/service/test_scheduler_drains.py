"""The scheduler stage when it stops: what it does not get done is left to the next one, and nobody is told an end."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from tests.fakes import FakeExecutor, continuation
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, submit


def test_what_is_left_at_the_end_of_a_drain_is_told_no_end_so_that_its_tokenizer_keeps_it(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.002)
        tokenizer, tokens = Tokenizer(tmp_path), {}
        async with scheduler_on(tmp_path, executor, max_num_seqs=1) as stage:
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 60), submit(2, [6], 3)])
            while len(tokenizer.tokens.get(1, ())) < 5:
                await tokenizer.read()
            await stage.drain(0.01)
            stopping = asyncio.create_task(stage.stop())
            while (frame := await tokenizer.call.read()) and hasattr(frame, "finished"):
                assert not frame.finished
                assert not frame.rejected
                tokenizer.tokens[1] += frame.outputs.token_ids
            await stopping
            tokens = tokenizer.tokens
            assert not tokenizer.finished
        await tokenizer.close()
        assert tokens[1] == continuation([5], len(tokens[1]))
        assert 2 not in tokens

    run(test())


@pytest.mark.parametrize("is_patient", [True, False])
def test_an_executor_that_drains_ends_what_runs_and_the_next_one_takes_what_waits(
    tmp_path: Path, is_patient: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.002)
        async with scheduler_on(tmp_path, executor, heartbeat_s=0.05) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 40 if is_patient else 200)])
            while len(tokenizer.tokens.get(1, ())) < 5:
                await tokenizer.read()
            executor.is_draining = True
            while not (load := (await tokenizer.read_frame()).load).waits_for_executor:
                pass
            await tokenizer.send(submits=[submit(2, [6], 10)])
            if is_patient:
                await tokenizer.read_until_ended(1)
            else:  # its time is over
                assert executor.owner is not None
                executor.owner.put_nowait(None)
            while stage.engine.is_executor_up:
                await asyncio.sleep(0.01)
            assert load.num_waiting == 0, "what waits came later"
            assert 2 not in tokenizer.cached
            assert executor.num_epochs == 1
            executor.is_draining = False
            await tokenizer.read_until_ended(1, 2)
            assert tokenizer.tokens == {1: continuation([5], 40 if is_patient else 200), 2: continuation([6], 10)}
            assert stage.engine.core is not None
            assert not stage.engine.core.suspects
            await tokenizer.close()
            executor.restart_counting()

    with caplog.at_level(logging.WARNING):
        run(test())
    assert not [record for record in caplog.records if record.name.startswith("tokenloom")]
