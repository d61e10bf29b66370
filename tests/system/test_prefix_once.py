"""A prefix that many requests need at once is computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.in_process import Stages, StagesOfModule, num_cached_tokens, stages_of_module
from tests.system.step_log import Row, StepLog, num_computed, watch_steps

NUM_REQUESTS = 32
NUM_PREFIX = 384
NUM_OUTPUT = 4


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagesOfModule]:
    # The prefix takes several steps, so that the requests behind the first one come while it is in the making.
    with stages_of_module(tmp_path_factory.mktemp("stack"), max_num_batched_tokens=64) as running:
        yield running


def prefix_of(test: int) -> list[int]:
    return [(7 * i * i + test) % 500 + 3 for i in range(NUM_PREFIX)]


async def ask(stages: Stages, prompt: list[int], **body: Any) -> dict[str, Any]:
    return await stages.complete(prompt=prompt, max_tokens=NUM_OUTPUT, **body)


async def log_of(stages: Stages, requests: list[tuple[list[int], dict[str, Any]]]) -> tuple[list[Any], StepLog]:
    """The answers to requests that are sent at once, and what the engine computed for them."""
    async with watch_steps(stages) as log:
        answers = await asyncio.gather(*(ask(stages, prompt, **body) for prompt, body in requests))
        await log.catch_up(stages)
    return list(answers), log


def rows_of(log: StepLog, answers: list[dict[str, Any]]) -> list[Row]:
    return [row for answer in answers for row in log.rows_of(answer["id"])]


def test_32_cold_requests_with_one_prefix_compute_it_once(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        prefix = prefix_of(0)
        requests: list[tuple[list[int], dict[str, Any]]] = [([*prefix, 400, i + 3], {}) for i in range(NUM_REQUESTS)]
        answers, log = await log_of(stages, requests)
        rows = rows_of(log, answers)
        assert len({row.request_id for row in rows}) == NUM_REQUESTS
        assert num_computed(rows, NUM_PREFIX) == NUM_PREFIX
        assert sorted(map(num_cached_tokens, answers)) == [0] + [NUM_PREFIX] * (NUM_REQUESTS - 1)
        assert sum(row.end - row.start for row in rows) == NUM_PREFIX + NUM_REQUESTS * (2 + NUM_OUTPUT - 1)
        for (prompt, _), answer in list(zip(requests, answers, strict=True))[::8]:
            alone = await ask(stages, prompt, cache_salt="alone")
            assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]

    stages.run(test)


@pytest.mark.parametrize("num_more", [0, 1, 6])
def test_32_choices_of_one_request_compute_its_prompt_once(stages: StagesOfModule, num_more: int) -> None:
    """They share the full blocks and recompute the partial one, or the last one if there is no partial one."""

    async def test(stages: Stages) -> None:
        prompt = [*prefix_of(1 + num_more), *range(3, 3 + num_more)]
        answers, log = await log_of(stages, [(prompt, {"n": NUM_REQUESTS, "temperature": 1.0, "seed": 5})])
        rows = rows_of(log, answers)
        assert len({row.request_id for row in rows}) == NUM_REQUESTS
        num_shared = (len(prompt) - 1) // 16 * 16
        assert num_computed(rows, num_shared) == num_shared
        num_own = len(prompt) - num_shared + NUM_OUTPUT - 1
        assert sum(row.end - row.start for row in rows) == num_shared + NUM_REQUESTS * num_own
        choices = answers[0]["choices"]
        assert [choice["index"] for choice in choices] == list(range(NUM_REQUESTS))
        assert len({tuple(choice["token_ids"]) for choice in choices}) > NUM_REQUESTS // 2
        assert answers[0]["usage"]["completion_tokens"] == NUM_REQUESTS * NUM_OUTPUT

    stages.run(test)
