"""A seed gives the same tokens whatever runs beside the request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import uvloop

from tests.system.in_process import all_stages
from tokenloom.common.metrics import REGISTRY

NUM_REQUESTS = 16
NUM_OUTPUT = 40


def body_of(index: int) -> dict[str, Any]:
    return {
        "prompt": [5 + index, 40, 41 + index] * 4,
        "max_tokens": NUM_OUTPUT,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 50,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 1000 + index,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def token_ids(client: httpx.AsyncClient, index: int) -> list[int]:
    response = await client.post("/v1/completions", json=body_of(index))
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def num_preemptions() -> float:
    return REGISTRY.get_sample_value("tokenloom_num_preemptions_total") or 0.0


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_through_preemption(tmp_path: Path) -> None:
    async def run(folder: Path, at_once: int, **scheduler: Any) -> tuple[list[list[int]], float]:
        gate = asyncio.Semaphore(at_once)
        async with all_stages(folder, **scheduler) as client:

            async def one(index: int) -> list[int]:
                async with gate:
                    return await token_ids(client, index)

            before = num_preemptions()
            found = await asyncio.gather(*(one(index) for index in range(NUM_REQUESTS)))
            return list(found), num_preemptions() - before

    async def test() -> None:
        alone, _ = await run(tmp_path / "a", 1)
        together, _ = await run(tmp_path / "b", NUM_REQUESTS)
        cramped, preempted = await run(tmp_path / "c", NUM_REQUESTS, num_blocks=24)
        assert preempted > 0
        assert len({tuple(ids) for ids in alone}) == NUM_REQUESTS
        assert all(len(ids) == NUM_OUTPUT for ids in alone)
        assert together == alone
        assert cramped == alone

    uvloop.run(asyncio.wait_for(test(), 200))
