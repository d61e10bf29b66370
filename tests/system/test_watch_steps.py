"""WatchSteps tells every plan, and its columns add up to what the requests' readers got."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.in_process import Stages, StagesOfModule, stages_of_module
from tests.system.step_log import watch_steps

MAX_NUM_SEQS = 6
BUDGET = 48
NUM_BLOCKS = 30
PROMPTS = [[30 + i, *range(40, 40 + 9 * i)] for i in range(12)]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagesOfModule]:
    folder = tmp_path_factory.mktemp("stack")
    limits: dict[str, Any] = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": BUDGET,
        "num_blocks": NUM_BLOCKS,
        "ageing_s": 0.0,
    }
    with stages_of_module(folder, **limits) as running:
        yield running


def test_plans_add_up_to_what_was_asked_and_got(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        async with watch_steps(stages) as log:
            asked = [stages.complete(prompt=prompt, max_tokens=30, priority=i % 3) for i, prompt in enumerate(PROMPTS)]
            answers = await asyncio.gather(*asked)
            await log.catch_up(stages)
        steps = log.steps
        assert [step.step_id for step in steps] == list(range(steps[0].step_id, steps[0].step_id + len(steps)))
        assert [step.made_at_us for step in steps] == sorted(step.made_at_us for step in steps)
        num_sampled: Counter[str] = Counter()
        for step in steps:
            lengths = {len(step.num_scheduled_tokens), len(step.num_computed_tokens), len(step.samples)}
            assert lengths | {len(step.tenants), len(step.priority_classes)} == {len(step.request_ids)}
            assert sum(step.num_scheduled_tokens) <= step.max_num_batched_tokens == BUDGET
            assert len(step.request_ids) <= step.load.num_running <= MAX_NUM_SEQS == step.load.max_num_seqs
            assert len(set(step.request_ids)) == len(step.request_ids)
            assert step.load.num_cached_blocks <= step.load.num_free_blocks <= step.load.num_blocks == NUM_BLOCKS - 1
            assert len(step.preempt_reasons) == len(step.preempted_request_ids)
            num_sampled.update(row for row, samples in zip(step.request_ids, step.samples, strict=True) if samples)
        for number, answer in enumerate(answers):
            (request_id,) = {row.request_id for row in log.rows_of(answer["id"])}
            assert num_sampled[request_id] == len(answer["choices"][0]["token_ids"]) == 30
            classes = {
                priority_class
                for step in steps
                for row, priority_class in zip(step.request_ids, step.priority_classes, strict=True)
                if row == request_id
            }
            assert classes == {number % 3}

    stages.run(test)
