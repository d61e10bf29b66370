"""The scheduler stage when it stops: what it does not get done is left to the next one, and nobody is told an end."""

from __future__ import annotations

import asyncio
from pathlib import Path

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
