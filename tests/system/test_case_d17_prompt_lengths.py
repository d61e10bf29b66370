"""Case D17: prompts of every length around block boundaries, cold and cached, in chunks around the block size."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.system.in_process import Stages, num_cached_tokens, running_stages
from tests.system.step_log import watch_steps

BLOCK_SIZE = 8
NUM_OUTPUT = 4
NEAR = 1e-3


def prompt_of(num_tokens: int) -> list[int]:
    """No two lengths have a first block in common."""
    return [5 + num_tokens, *((7 * i * i + num_tokens) % 500 + 3 for i in range(num_tokens - 1))]


async def ask(stages: Stages, prompt: list[int], **body: Any) -> dict[str, Any]:
    return await stages.complete(prompt=prompt, max_tokens=NUM_OUTPUT, logprobs=1, **body)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    mine, theirs = one["choices"][0], other["choices"][0]
    assert mine["token_ids"] == theirs["token_ids"]
    assert mine["logprobs"]["token_logprobs"] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=NEAR)
    assert len(mine["token_ids"]) == len(mine["logprobs"]["token_logprobs"]) == NUM_OUTPUT


@pytest.mark.parametrize("chunk", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_a_prompt_of_any_length_gives_the_same_cold_and_cached(
    chunk: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        executor = {"block_size": BLOCK_SIZE}
        async with running_stages(tmp_path, executor=executor, max_num_batched_tokens=chunk, max_num_seqs=4) as stages:
            caplog.clear()
            async with watch_steps(stages) as log:
                answers = {n: [await ask(stages, prompt_of(n)) for _ in range(3)] for n in range(1, 4 * BLOCK_SIZE + 2)}
                await log.catch_up(stages)
                rows_of = {answer["id"]: log.rows_of(answer["id"]) for of in answers.values() for answer in of}
            longest = prompt_of(4 * BLOCK_SIZE + 1)
            for num_tokens in range(1, 2 * BLOCK_SIZE + 2):  # behind a prefix that is cached, a suffix of any length
                prompt = longest + prompt_of(num_tokens)
                cold = await ask(stages, prompt, cache_salt=f"cold-{num_tokens}")
                warm = await ask(stages, prompt)
                assert num_cached_tokens(cold) == 0
                assert num_cached_tokens(warm) == 4 * BLOCK_SIZE
                assert_same(cold, warm)
        for num_tokens, of in answers.items():
            num_full = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert [num_cached_tokens(answer) for answer in of] == [0, num_full, num_full]
            for answer in of:
                assert_same(of[0], answer)
                rows = rows_of[answer["id"]]
                assert rows[0].start == num_cached_tokens(answer) < num_tokens, "at least one token is computed"
                assert [row.start for row in rows[1:]] == [row.end for row in rows[:-1]]
                assert rows[-1].end == num_tokens + NUM_OUTPUT - 1
                assert all(1 <= row.end - row.start <= chunk for row in rows)

    caplog.set_level(logging.WARNING)
    uvloop.run(asyncio.wait_for(test(), 100))
    ours = [record for record in caplog.records if record.name != "asyncio"]  # grpc may log of other loops
    assert not ours, caplog.text
