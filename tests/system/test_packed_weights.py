"""The embedded model as users get it, its weights packed: the same to the last bit in any company and after a death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.system.stack import Stack, running_stack
from tests.unit.executor.native.kernel_lab import isas, why_no_kernels

PROMPT = "The moon is the only natural satellite of the Earth. It"
NUM_TOKENS = 48
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 11, "logprobs": 3}


@pytest.fixture(scope="module")
def packed_stack() -> Iterator[Stack]:
    if (reason := why_no_kernels()) is not None:
        pytest.skip(reason)
    if isas()[0] == "portable":
        pytest.skip("torch serves on CPUs without AVX2")
    with running_stack("--log-level=info") as stack:
        yield stack


async def complete(client: openai.AsyncOpenAI, prompt: str = PROMPT, **options: Any) -> tuple[str, list[Any]]:
    """Text and logprobs of a completion that no token ends."""
    answer = await client.completions.create(
        model="SmolLM2-135M-Instruct",
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True},
        **{**SEEDED, **options},
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    return choice.text, [choice.logprobs.token_logprobs, choice.logprobs.top_logprobs]


def test_our_own_kernels_serve_it(packed_stack: Stack) -> None:
    assert "q4_1+q8_0" in packed_stack.output
    answer = packed_stack.client().chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=20,
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."


def test_logprobs_are_the_same_alone_in_a_batch_and_after_the_executors_death(packed_stack: Stack) -> None:
    async def run() -> None:
        client = packed_stack.async_client()
        alone = await complete(client)
        others = [complete(client, f"{i} {PROMPT} {PROMPT * (i % 3)}", seed=i) for i in range(12)]
        found = await asyncio.gather(complete(client), *others)
        assert found[0] == alone
        dying = asyncio.gather(complete(client, PROMPT + " "), *(complete(client, seed=i) for i in range(6)))
        undisturbed = [await complete(client, PROMPT + " "), *[await complete(client, seed=i) for i in range(6)]]
        assert await dying == undisturbed
        again = asyncio.gather(*(complete(client, seed=i) for i in range(6)))
        await asyncio.sleep(0.2)
        os.kill(packed_stack.stage_pids()["executor"], signal.SIGKILL)
        assert await again == undisturbed[1:]
        await client.close()

    asyncio.run(run())
