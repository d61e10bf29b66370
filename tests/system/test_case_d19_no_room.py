"""Case D19: with a pool smaller than the context, nothing that cannot fit holds up what can."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.in_process import Stages, StagesOfModule, greedy_body, stages_of_module, total
from tests.system.step_log import StepLog, watch_steps
from tests.tiny_models import MAX_POSITION_EMBEDDINGS

BLOCK_SIZE = 16
NUM_BLOCKS = 61
ROOM = (NUM_BLOCKS - 1) * BLOCK_SIZE
BUDGET = 32


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagesOfModule]:
    folder = tmp_path_factory.mktemp("stack")
    with stages_of_module(folder, num_blocks=NUM_BLOCKS, max_num_batched_tokens=BUDGET, max_num_seqs=BUDGET) as running:
        yield running


def prompt_of(num_tokens: int, number: int = 0) -> list[int]:
    return [5 + number, *((7 * i * i + number) % 500 + 3 for i in range(num_tokens - 1))]


def num_steps(log: StepLog, request_ids: list[str]) -> int:
    """Steps from the first to the last one in which any of these requests ran."""
    step_ids = [row.step_id for request_id in request_ids for row in log.rows_of(request_id)]
    return max(step_ids) - min(step_ids) + 1


def test_a_prompt_above_the_pool_is_refused_at_once_and_those_behind_it_run(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        num_tokens = ROOM + 1
        assert num_tokens < MAX_POSITION_EMBEDDINGS - 8, "below the model's own limit"

        def ten_short_ones(first: int) -> list[asyncio.Task[dict[str, Any]]]:
            prompts = [prompt_of(12, first + i) for i in range(10)]
            return [asyncio.create_task(stages.complete(prompt=prompt, max_tokens=8)) for prompt in prompts]

        async with watch_steps(stages) as log:
            solo = await stages.complete(prompt=prompt_of(12, 99), max_tokens=8)
            shorts = ten_short_ones(0)
            body = greedy_body(prompt=prompt_of(num_tokens), max_tokens=8)
            response = await stages.client.post("/v1/completions", json=body)
            shorts += ten_short_ones(10)
            answers = [await short for short in shorts]
            await log.catch_up(stages)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "prompt"
        assert str(num_tokens) in error["message"]
        assert str(ROOM) in error["message"]
        limit = 3 * num_steps(log, [solo["id"]])
        assert all(num_steps(log, [answer["id"]]) <= limit for answer in answers)

    stages.run(test)


@pytest.mark.parametrize("num_free", [1, 40])
def test_output_that_cannot_fit_ends_by_length_without_a_preemption(stages: StagesOfModule, num_free: int) -> None:
    async def test(stages: Stages) -> None:
        before = await stages.metrics()
        async with watch_steps(stages) as log:
            answer = await stages.complete(prompt=prompt_of(ROOM - num_free, 200), max_tokens=1000)
            await log.catch_up(stages)
        after = await stages.metrics()
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length"
        assert len(choice["token_ids"]) == num_free
        rows = log.rows_of(answer["id"])
        assert sum(row.end - row.start for row in rows) <= ROOM, "nothing is computed twice"
        name = "tokenloom_num_preemptions_total"
        assert total(after, name) == total(before, name)

    stages.run(test)


def test_two_whose_outputs_do_not_fit_together_both_end_by_length(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        num_prompt = ROOM * 2 // 3
        async with watch_steps(stages) as log:
            asked = [stages.complete(prompt=prompt_of(num_prompt, 300 + i), max_tokens=1000) for i in range(2)]
            answers = await asyncio.gather(*asked)
            await log.catch_up(stages)
        for answer in answers:
            assert answer["choices"][0]["finish_reason"] == "length"
            assert len(answer["choices"][0]["token_ids"]) == ROOM - num_prompt
            num_computed = sum(row.end - row.start for row in log.rows_of(answer["id"]))
            assert num_computed <= 2 * ROOM, "preempted at most once or twice, not again and again"

    stages.run(test)


def test_short_requests_do_not_wait_for_a_long_prompt(stages: StagesOfModule) -> None:
    """Counted in steps: one of their own and, with two plans in flight, the two that were made before they came."""

    async def test(stages: Stages) -> None:
        num_long = ROOM - 100
        async with watch_steps(stages) as log:
            long = asyncio.create_task(stages.complete(prompt=prompt_of(num_long, 400), max_tokens=2))
            await log.next_step()
            num_waited: list[int] = []
            while not long.done():
                last = log.last_step_id
                short = await stages.complete(prompt=prompt_of(3, len(num_waited)), max_tokens=1)
                while not (rows := log.rows_of(short["id"])):
                    await log.next_step()
                num_waited.append(rows[0].step_id - last)
            answer = await long
            await log.catch_up(stages)
        rows = log.rows_of(answer["id"])
        num_chunks = len([row for row in rows if row.end <= num_long])
        assert num_chunks > 20, "the prompt takes many steps"
        assert len(num_waited) > 5
        assert statistics.median(num_waited) <= 3
        assert len(answer["choices"][0]["token_ids"]) == 2

    stages.run(test)
