"""A request that kills the executor fails alone; who is only near it, or near kills from outside, loses nothing."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeExecutor, continuation
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, submit
from tokenloom.api.v1 import engine_pb2, executor_pb2
from tokenloom.common.errors import Unavailable
from tokenloom.common.metrics import REGISTRY
from tokenloom.scheduler.core.suspects import MIN_CRASHES

NUM_TOKENS = 12
Deadly = Callable[[executor_pb2.NewRow, int], bool]


def in_prefill(_new: executor_pb2.NewRow, start: int) -> bool:
    return start == 0


def at_the_fifth_token(new: executor_pb2.NewRow, start: int) -> bool:
    return start >= len(new.prompt_token_ids) + 4 or len(new.generated_token_ids) >= 4


class MortalExecutor(FakeExecutor):
    """Dies, its stream and epoch with it, of some rows and whenever `kill` is called.

    Args:
        deadly: whether a row kills, given what it came with and where its part of the plan begins; by request id.
    """

    def __init__(self, deadly: dict[str, Deadly] | None = None, **fields: Any) -> None:
        super().__init__(num_blocks=600, **fields)
        self.capabilities.max_num_seqs = 64
        self.deadly = deadly or {}
        self.num_deaths = 0
        self.is_killed = False

    def kill(self) -> None:
        """Die with the plan that comes next or runs now."""
        self.is_killed = True

    def run(self, plan: executor_pb2.ExecuteRequest, last_step_id: int | None) -> executor_pb2.ExecuteResponse:
        new_rows = {row.row_id: row for row in plan.new_rows}
        for row_id, start in zip(plan.row_ids, plan.num_computed_tokens, strict=True):
            new = new_rows[row_id] if row_id in new_rows else self.rows[row_id].new
            if new.request_id in self.deadly and self.deadly[new.request_id](new, start):
                self.is_killed = True
        if self.is_killed:
            self.is_killed = False
            self.num_deaths += 1
            raise Unavailable("the executor was killed")
        return super().run(plan, last_step_id)


async def submit_many(tokenizer: Tokenizer, count: int, **fields: Any) -> None:
    await tokenizer.send(submits=[submit(i, prompt_of(i), NUM_TOKENS, **fields) for i in range(1, count + 1)])


def prompt_of(number: int) -> list[int]:
    return [number + 10, 5, 6, 7, 8]


def assert_only_fail(tokenizer: Tokenizer, failing: set[int], count: int) -> None:
    for number in range(1, count + 1):
        finished = tokenizer.finished[number]
        if number in failing:
            assert finished.reason == engine_pb2.ENGINE_FINISH_REASON_ERROR
            assert finished.error.reason == "EXECUTOR_CRASH"
            assert finished.error.code == 13, "internal: HTTP 500, and nobody tries again"
            assert "while it computed this request" in finished.error.message
        else:
            assert finished.reason == engine_pb2.ENGINE_FINISH_REASON_LENGTH, f"request {number} is lost"
            assert tokenizer.tokens[number] == continuation(prompt_of(number), NUM_TOKENS)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("deadly", [in_prefill, at_the_fifth_token], ids=lambda deadly: str(deadly.__name__))
def test_one_of_64_kills_the_executor_and_fails_alone(
    tmp_path: Path, deadly: Deadly, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        executor = MortalExecutor({"request-23": deadly})
        async with scheduler_on(tmp_path, executor, plans_in_flight=depth) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await submit_many(tokenizer, 64)
            await tokenizer.read_until_ended(*range(1, 65))
            assert_only_fail(tokenizer, {23}, 64)
            assert MIN_CRASHES <= executor.num_deaths <= 10
            assert stage.engine.core is not None
            assert len(stage.engine.core.suspects) == 0
            assert stage.engine.core.kv.pool.num_held_blocks == 0
            assert REGISTRY.get_sample_value("tokenloom_requests_quarantined_total") == 1
            assert REGISTRY.get_sample_value("tokenloom_num_suspects") == 0
            await tokenizer.close()
            executor.restart_counting()

    with caplog.at_level(logging.WARNING):
        run(test())
    assert any("request-23 (" in record.getMessage() for record in caplog.records), "suspects are named"
    ours = (record for record in caplog.records if record.name.startswith("tokenloom"))  # grpc may log of other loops
    (end,) = (record for record in ours if record.levelno == logging.ERROR)
    assert end.__dict__["request_id"] == "request-23"


def test_two_of_64_kill_the_executor_and_nobody_else_fails(tmp_path: Path) -> None:
    async def test() -> None:
        executor = MortalExecutor({"request-9": in_prefill, "request-50": at_the_fifth_token})
        async with scheduler_on(tmp_path, executor):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await submit_many(tokenizer, 64)
            await tokenizer.read_until_ended(*range(1, 65))
            assert_only_fail(tokenizer, {9, 50}, 64)
            await tokenizer.close()
            executor.restart_counting()

    run(test())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_five_kills_from_outside_in_ten_seconds_fail_nobody(tmp_path: Path, depth: int) -> None:
    """More densely than that: five in about one second, at random moments, one request alone or many."""

    async def test() -> None:
        chance = random.Random(depth)
        for count in (1, 24):
            executor = MortalExecutor(step_s=0.03)
            folder = tmp_path / str(count)
            folder.mkdir()
            async with scheduler_on(folder, executor, plans_in_flight=depth):
                tokenizer = Tokenizer(folder)
                await tokenizer.open()
                await submit_many(tokenizer, count)
                reading = asyncio.create_task(tokenizer.read_until_ended(*range(1, count + 1)))
                for _ in range(5):
                    await asyncio.sleep(chance.uniform(0.0, 0.2))
                    executor.kill()
                await reading
                assert executor.num_deaths >= 3, "the executor was killed while requests ran"
                assert_only_fail(tokenizer, set(), count)
                await tokenizer.close()
                executor.restart_counting()

    run(test())


def test_five_kills_in_a_row_without_a_step_between_fail_nobody(tmp_path: Path) -> None:
    async def test() -> None:
        executor = MortalExecutor({"request-1": lambda _new, _start: executor.num_deaths < 5})
        async with scheduler_on(tmp_path, executor):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await submit_many(tokenizer, 1)
            await tokenizer.read_until_ended(1)
            assert executor.num_deaths == 5
            assert_only_fail(tokenizer, set(), 1)
            await tokenizer.close()
            executor.restart_counting()

    run(test())


def test_requests_that_come_while_a_deadly_one_is_looked_for_are_served_in_between(tmp_path: Path) -> None:
    async def test() -> None:
        executor = MortalExecutor({"request-3": in_prefill}, step_s=0.005)
        async with scheduler_on(tmp_path, executor):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await submit_many(tokenizer, 8)
            while executor.num_deaths < 2:
                await asyncio.sleep(0.005)
            await tokenizer.send(submits=[submit(9, prompt_of(9), 2)])
            await tokenizer.read_until_ended(9)
            assert 3 not in tokenizer.finished, "the new one did not wait until the deadly one was found"
            assert tokenizer.tokens[9] == continuation(prompt_of(9), 2)
            await tokenizer.read_until_ended(*range(1, 9))
            assert_only_fail(tokenizer, {3}, 8)
            await tokenizer.close()
            executor.restart_counting()

    run(test())
