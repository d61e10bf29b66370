"""The tokenizer stage when its scheduler drains: what that gives back, or does not get done, waits for the next one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.service.tokenizer_stack import TokenizerStack, complete_request, run, tokenizer_on, until
from tokenloom.common.errors import Unavailable

DRAINING = Unavailable("the engine is about to stop", reason="DRAINING")
LIMIT_S = 0.5


async def let_drain(stack: TokenizerStack) -> None:
    """Let the engine give new requests back, and wait until the stage knows."""
    stack.engine.drain()
    stack.engine.refusal = DRAINING
    await until(lambda: not stack.stage._engine.is_up)


def test_a_new_request_waits_for_the_next_engine_and_is_new_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            await let_drain(stack)
            waiting = asyncio.create_task(stack.complete([5] * 4))
            gone = stack.stub.Complete(complete_request([6] * 4))
            await until(lambda: len(stack.engine.submits) == 2)
            await asyncio.sleep(0.05)
            assert not waiting.done()
            gone.cancel()
            await until(lambda: stack.stage._generation.num_active == 1)
            await stack.kill_engine()
            await stack.revive_engine()
            assert (await waiting).texts[0] == stack.decode(stack.told([5] * 4, 20))
            (submit,) = stack.engine.submits
            assert not submit.HasField("age_ms"), "no engine had it, so the bounds for new requests hold"

    run(scenario())


def test_a_choice_that_an_earlier_engine_had_is_still_a_resubmission_behind_one_that_gave_it_back(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            stack.engine.may_step.clear()
            answer = asyncio.create_task(stack.complete([5] * 4))
            await until(lambda: stack.engine.num_living == 1)
            for refusal in (DRAINING, None):
                await stack.kill_engine()
                await stack.revive_engine()
                stack.engine.refusal = refusal
                await until(lambda: stack.engine.submits)
                assert stack.engine.submits[0].HasField("age_ms")
            assert (await answer).texts[0] == stack.decode(stack.told([5] * 4, 20))

    run(scenario())


def test_the_limit_of_the_wait_counts_from_the_end_of_the_drain(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, takeover_limit_s=LIMIT_S) as stack:
            await let_drain(stack)
            call = stack.stub.Complete(complete_request([5] * 4))
            refusal = asyncio.create_task(stack.refusal(call))
            await asyncio.sleep(LIMIT_S + 0.2)
            assert not refusal.done()
            await stack.kill_engine()
            error = await refusal
            assert isinstance(error, Unavailable)
            assert error.reason == "ENGINE_UNAVAILABLE"

    run(scenario())
