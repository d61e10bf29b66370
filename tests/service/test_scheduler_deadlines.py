"""Requests whose time is up: in the queue, while decoding, with results and without, resubmitted and taken over."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.fakes import FakeExecutor, continuation
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, submit
from tokenloom.api.v1 import engine_pb2

DEADLINE = engine_pb2.ENGINE_FINISH_REASON_DEADLINE


def ends_of(tokenizer: Tokenizer, handle: int) -> int:
    """How many terminal events a request had."""
    return sum(
        sum(finished.handle == handle for finished in frame.finished)
        + sum(rejected.handle == handle for rejected in frame.rejected)
        for frame in tokenizer.frames
    )


def plans_with(executor: FakeExecutor, request_id: str) -> int:
    """How many plans had a row of the request."""
    row_ids = {row.row_id for plan in executor.plans for row in plan.new_rows if row.request_id == request_id}
    return sum(bool(row_ids & set(plan.row_ids)) for plan in executor.plans)


def test_a_request_with_no_time_left_never_reaches_a_step(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        async with scheduler_on(tmp_path, executor):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], remaining_time_ms=0), submit(2, [6])])
            await tokenizer.read_until_ended(1, 2)
            assert tokenizer.finished[1].reason == DEADLINE
            assert tokenizer.tokens == {2: continuation([6], 8)}
            assert plans_with(executor, "request-1") == 0
            await tokenizer.close()

    run(test())


def test_requests_that_expire_in_the_queue_are_told_once_each_and_in_time(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.01)
        async with scheduler_on(tmp_path, executor, max_num_seqs=1):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 100)])
            await tokenizer.read()
            handles = range(2, 12)
            began_s = time.monotonic()
            await tokenizer.send(submits=[submit(i, [i], remaining_time_ms=40 * i) for i in handles])
            for handle in handles:
                await tokenizer.read_until_ended(handle)
                late_s = time.monotonic() - began_s - 0.04 * handle
                assert -0.005 < late_s < 0.5, f"request {handle} was told {late_s:.3f} s after its time"
            await tokenizer.send(cancels=[engine_pb2.Cancel(handle=1)])
            await tokenizer.read_until_ended(1)
            for handle in handles:
                assert tokenizer.finished[handle].reason == DEADLINE
                assert ends_of(tokenizer, handle) == 1
                assert plans_with(executor, f"request-{handle}") == 0
            await tokenizer.close()

    run(test())


def test_a_request_that_expires_while_decoding_frees_its_memory_within_two_steps(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.02)
        async with scheduler_on(tmp_path, executor) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5] * 20, 200, remaining_time_ms=250)])
            await tokenizer.read_until_ended(1)
            num_plans = len(executor.plans)
            assert stage.engine.core is not None
            assert stage.engine.core.kv.pool.num_held_blocks == 0, "free when its reader is told"
            while executor.num_rows:
                await asyncio.sleep(0.005)
            assert len(executor.plans) <= num_plans + 2
            assert tokenizer.finished[1].reason == DEADLINE
            assert tokenizer.finished[1].num_generated_tokens == len(tokenizer.tokens[1]) > 0
            assert tokenizer.tokens[1] == continuation([5] * 20, len(tokenizer.tokens[1]))
            assert ends_of(tokenizer, 1) == 1
            await tokenizer.close()

    run(test())


def test_one_that_ends_before_its_deadline_is_not_told_again_when_it_comes(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor()):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 3, remaining_time_ms=200)])
            await tokenizer.read_until_ended(1)
            await asyncio.sleep(0.3)
            await tokenizer.send(submits=[submit(2, [6], 3)])
            await tokenizer.read_until_ended(2)
            assert ends_of(tokenizer, 1) == 1
            assert tokenizer.finished[1].reason == engine_pb2.ENGINE_FINISH_REASON_LENGTH
            await tokenizer.close()

    run(test())


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_resubmission_gets_no_time_beyond_what_remains(tmp_path: Path, is_alive: bool) -> None:
    """Alive: another session takes it over and it keeps its deadline. Not alive: what the sender says remains."""

    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.01)):
            first, second = Tokenizer(tmp_path), Tokenizer(tmp_path)
            await first.open()
            await second.open()
            began_s = time.monotonic()
            if is_alive:
                await first.send(submits=[submit(1, [5], 240, remaining_time_ms=300)])
                while len(first.tokens.get(1, [])) < 2:
                    await first.read()
            told = continuation([5], 2)
            second.tokens = {7: told[:]}
            remaining_ms = 60_000 if is_alive else 250
            await second.send(
                submits=[
                    submit(
                        7,
                        [5],
                        240,
                        request_id="request-1",
                        resume_token_ids=told,
                        remaining_time_ms=remaining_ms,
                        age_ms=50_000,
                    )
                ]
            )
            await second.read_until_ended(7)
            took_s = time.monotonic() - began_s
            assert second.finished[7].reason == DEADLINE
            assert 0.2 < took_s < 1.5, took_s
            assert second.tokens[7] == continuation([5], len(second.tokens[7]))
            await first.close()
            await second.close()

    run(test())
