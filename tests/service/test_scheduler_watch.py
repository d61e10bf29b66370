"""WatchSteps and WatchCacheEvents over a real port."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeExecutor
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, serve_executor, submit
from tokenloom.api.v1 import engine_pb2
from tokenloom.common.config import ProcessSettings
from tokenloom.scheduler import cache_watchers
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.core.block_hash import HASH_SCHEME, chain_hashes, root_hash
from tokenloom.scheduler.engine import Engine
from tokenloom.scheduler.stage import SchedulerStage


class StepWatcher:
    """Reads every plan as it is made."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.call = tokenizer.stub.WatchSteps(engine_pb2.WatchStepsRequest())
        self.steps: list[engine_pb2.WatchStepsResponse] = []
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.call.initial_metadata()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for step in self.call:
            self.steps.append(step)

    async def stop(self) -> None:
        """Stop when no plan has come for a while."""
        num_seen = -1
        while num_seen != len(self.steps):
            num_seen = len(self.steps)
            await asyncio.sleep(0.05)
        assert self._reader is not None
        self._reader.cancel()
        self.call.cancel()


def test_columns_of_a_step_say_who_ran_for_whom_in_which_class_and_what_was_sampled(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.002), max_num_batched_tokens=64, ageing_s=0.0):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            watcher = StepWatcher(tokenizer)
            await watcher.start()
            before_us = time.monotonic_ns() // 1000
            await tokenizer.send(
                submits=[
                    submit(1, [1] * 100, 4, tenant="a", priority_class=1),
                    submit(2, [2] * 3, 4, tenant="b", priority_class=99),
                ]
            )
            await tokenizer.read_until_ended(1, 2)
            await watcher.stop()
            rows: dict[str, list[tuple[str, int, int, int, bool]]] = {}
            for step in watcher.steps:
                columns = zip(
                    step.request_ids,
                    step.tenants,
                    step.priority_classes,
                    step.num_computed_tokens,
                    step.num_scheduled_tokens,
                    step.samples,
                    strict=True,
                )
                for request_id, *row in columns:
                    rows.setdefault(request_id, []).append(tuple(row))
            for request_id, tenant, priority_class, num_prompt in (
                ("request-1", "a", 1, 100),
                ("request-2", "b", 3, 3),
            ):
                assert {row[:2] for row in rows[request_id]} == {(tenant, priority_class)}
                for _, _, num_computed, num_scheduled, samples in rows[request_id]:
                    assert samples == (num_computed + num_scheduled >= num_prompt)
            assert not all(row[4] for row in rows["request-1"]), "a chunk in the middle of a prompt samples nothing"
            made_at_us = [step.made_at_us for step in watcher.steps]
            assert made_at_us == sorted(made_at_us)
            assert before_us < made_at_us[0] <= made_at_us[-1] < time.monotonic_ns() // 1000
            assert [step.step_id for step in watcher.steps] == [
                watcher.steps[0].step_id + i for i in range(len(watcher.steps))
            ]
            assert watcher.steps[0].load.max_num_seqs == 64
            await tokenizer.close()

    run(test())


def test_each_preempted_request_has_its_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(num_blocks=12, step_s=0.001)) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            watcher = StepWatcher(tokenizer)
            await watcher.start()
            await tokenizer.send(submits=[submit(i, [i] * 4, 20) for i in range(1, 7)])
            await tokenizer.read_until_ended(*range(1, 7))
            await watcher.stop()
            assert stage.engine.core is not None
            told = [reason for step in watcher.steps for reason in step.preempt_reasons]
            assert len(told) == stage.engine.core.stats.num_preemptions > 0
            assert set(told) == {engine_pb2.PREEMPT_REASON_BLOCKS}
            for step in watcher.steps:
                assert len(step.preempted_request_ids) == len(step.preempt_reasons)
            await tokenizer.close()

    run(test())


class Router:
    """Holds what it is told the prefix cache holds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.call = tokenizer.stub.WatchCacheEvents(engine_pb2.WatchCacheEventsRequest())
        self.parents: dict[bytes, bytes] = {}
        self.messages: list[engine_pb2.WatchCacheEventsResponse] = []

    async def read(self) -> engine_pb2.WatchCacheEventsResponse:
        message: engine_pb2.WatchCacheEventsResponse = await self.call.read()
        assert message.sequence == len(self.messages)
        self.messages.append(message)
        if message.cleared:
            self.parents.clear()
            assert message.hash_scheme == HASH_SCHEME
            assert message.block_size == 4
            assert message.engine_epoch
        for block_hash in message.removed_hashes:
            self.parents.pop(block_hash, None)
        self.parents |= dict(zip(message.stored_hashes, message.parent_hashes, strict=True))
        return message

    async def read_until(self, engine: Engine) -> None:
        """Read until what is held is what the pool holds; the test's limit ends it otherwise."""
        while self.parents != held_by(engine):
            await self.read()


def held_by(engine: Engine) -> dict[bytes, bytes]:
    assert engine.core is not None
    return dict(engine.core.kv.pool.snapshot())


async def until_still(engine: Engine) -> None:
    """Return when no plan is in flight and nobody runs."""
    assert engine.core is not None
    while engine.registry.streams or engine.core.plans_in_flight:
        await asyncio.sleep(0.005)


def test_a_router_finds_a_prompt_by_the_hashes_it_computes_itself(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor()) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            router = Router(tokenizer)
            first = await router.read()
            assert (first.cleared, list(first.stored_hashes), first.has_more) == (True, [], False)
            prompt = list(range(10, 23))
            await tokenizer.send(submits=[submit(1, prompt, 2, cache_salt="salt")])
            await tokenizer.read_until_ended(1)
            await until_still(stage.engine)
            await router.read_until(stage.engine)
            root = root_hash("salt")
            names = chain_hashes(root, prompt, 4)
            assert router.parents == dict(zip(names, [root, *names], strict=False))
            assert sum(message.cleared for message in router.messages) == 1, "changes come as changes"
            router.call.cancel()
            await tokenizer.close()

    run(test())


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_router_holds_what_the_pool_holds_after_churn_flush_and_the_executors_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    monkeypatch.setattr(cache_watchers, "MAX_ENTRIES_PER_PART", 8)
    monkeypatch.setattr(cache_watchers, "MAX_PENDING", 24)

    async def churn(tokenizer: Tokenizer, first: int) -> None:
        """More prompts than the pool's 30 blocks hold; each shares its beginning with every third one."""
        submits = [submit(first + i, [i % 3] * 8 + [first + i] * (4 + i % 9), 6) for i in range(24)]
        for start in range(0, 24, 6):
            await tokenizer.send(submits=submits[start : start + 6])
            await tokenizer.read_until_ended(*range(first + start, first + start + 6))

    async def test() -> None:
        executor = FakeExecutor(num_blocks=31)
        server = await serve_executor(tmp_path, executor)
        async with scheduler_on(tmp_path, executor, executor_server=server) as stage:
            engine, tokenizer = stage.engine, Tokenizer(tmp_path)
            await tokenizer.open()
            router = Router(tokenizer)

            async def check() -> None:
                await until_still(engine)
                if not is_slow:
                    await router.read_until(engine)

            await churn(tokenizer, 100)
            await check()
            assert len(held_by(engine)) > 20
            await tokenizer.stub.FlushPrefixCache(engine_pb2.FlushPrefixCacheRequest(), timeout=5)
            await check()
            assert not held_by(engine)
            await churn(tokenizer, 200)
            await check()
            await server.stop(0)
            while engine.is_ready:
                await asyncio.sleep(0.01)
            replacement = await serve_executor(tmp_path, FakeExecutor(num_blocks=25))
            while not engine.is_ready:
                await asyncio.sleep(0.01)
            await check()
            assert not held_by(engine), "a new executor has nothing"
            await churn(tokenizer, 300)
            await until_still(engine)
            await router.read_until(engine)
            assert len(router.parents) > 15
            num_snapshots = sum(message.cleared for message in router.messages)
            assert num_snapshots >= 2
            assert max(len(m.stored_hashes) + len(m.removed_hashes) for m in router.messages) <= 8
            router.call.cancel()
            await tokenizer.close()
            await replacement.stop(0)

    run(test())


def test_a_reader_that_comes_before_the_executor_is_told_when_it_is_there(tmp_path: Path) -> None:
    async def test() -> None:
        stage = SchedulerStage(
            SchedulerSettings(
                ProcessSettings(), listen=f"unix:{tmp_path}/scheduler.sock", executor=f"unix:{tmp_path}/executor.sock"
            )
        )
        await stage.start()
        router: Any = Router(Tokenizer(tmp_path))
        reading = asyncio.create_task(router.read())
        await asyncio.sleep(0.1)
        assert not reading.done()
        server = await serve_executor(tmp_path, FakeExecutor())
        message = await reading
        assert message.cleared
        router.call.cancel()
        await stage.stop()
        await server.stop(0)

    run(test())
