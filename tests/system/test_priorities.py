"""Priority classes: the urgent do not wait for the others, and the others do not wait for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from tests.system.in_process import Stages, running_stages
from tests.system.step_log import watch_steps
from tokenloom.api.v1 import engine_pb2

MAX_NUM_SEQS = 2
NUM_CLASSES = 4
LOWEST = NUM_CLASSES - 1
AGEING_S = 0.5
NUM_LOW = 120


def run(test: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(test, 60))


def prompt_of(number: int) -> list[int]:
    return [5 + number, 40, 41] * 5


def test_an_urgent_request_takes_the_place_of_a_lower_one_which_loses_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_stages(tmp_path, max_num_seqs=MAX_NUM_SEQS, ageing_s=0.0) as stages:
            async with watch_steps(stages) as log:
                low = [
                    asyncio.create_task(stages.complete(prompt=prompt_of(i), max_tokens=NUM_LOW, priority=LOWEST))
                    for i in range(MAX_NUM_SEQS + 1)
                ]
                while not log.steps or log.steps[-1].load.num_waiting < 1:
                    await log.next_step()
                last = log.last_step_id
                urgent = await stages.complete(prompt=prompt_of(9), max_tokens=4, priority=0)
                while not (rows := log.rows_of(urgent["id"])):
                    await log.next_step()
                assert rows[0].step_id - last <= 25, "not behind all of what the others say"
                answers = [await task for task in low]
                await log.catch_up(stages)
            reasons = [reason for step in log.steps for reason in step.preempt_reasons]
            assert reasons == [engine_pb2.PREEMPT_REASON_PRIORITY]
            for number, answer in enumerate(answers):
                alone = await stages.complete(prompt=prompt_of(number), max_tokens=NUM_LOW)
                assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]

    run(test())


def test_the_lowest_class_is_served_under_endless_urgent_arrivals(tmp_path: Path) -> None:
    """Within twice the time in which it ages through all classes."""

    async def keep_asking(stages: Stages, number: int) -> None:
        while True:
            await stages.complete(prompt=prompt_of(10 + number), max_tokens=30, priority=0)

    async def test() -> None:
        limits: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "num_priority_classes": NUM_CLASSES}
        async with running_stages(tmp_path, ageing_s=AGEING_S, **limits) as stages, watch_steps(stages) as log:
            endless = [asyncio.create_task(keep_asking(stages, number)) for number in range(4 * MAX_NUM_SEQS)]
            while not log.steps or log.steps[-1].load.num_waiting < 2 * MAX_NUM_SEQS:
                await log.next_step()
            began = time.monotonic()
            answer = await stages.complete(prompt=prompt_of(0), max_tokens=8, priority=LOWEST)
            took_s = time.monotonic() - began
            assert not any(task.done() for task in endless)
            for task in endless:
                task.cancel()
            await asyncio.gather(*endless, return_exceptions=True)
        assert len(answer["choices"][0]["token_ids"]) == 8
        assert AGEING_S * (LOWEST - 1) < took_s < 2 * AGEING_S * NUM_CLASSES, "it waited, but not for ever"

    run(test())
