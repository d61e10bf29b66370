"""A router that applies what it is told holds exactly the hashes of the pool once it has read all."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from tokenloom.scheduler import cache_watchers
from tokenloom.scheduler.cache_watchers import CachePart, CacheReader, CacheWatchers
from tokenloom.scheduler.core.block_pool import BlockPool

ROOT = b"root"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


class Router:
    """A reader that does what engine.proto says."""

    def __init__(self, reader: CacheReader) -> None:
        self.reader = reader
        self.parents: dict[bytes, bytes] = {}
        self.parts: list[CachePart] = []

    async def read(self) -> bool:
        """Read one part; False if there is none now."""
        reading = asyncio.ensure_future(self.reader.take())
        for _ in range(3):
            await asyncio.sleep(0)
        if not reading.done():
            reading.cancel()
            return False
        part = reading.result()
        assert self.parts or part.is_cleared, "the first message clears"
        self.parts.append(part)
        if part.is_cleared:
            self.parents.clear()
        for block_hash in part.removed:
            self.parents.pop(block_hash, None)
        self.parents |= dict(part.stored)
        return True

    async def read_all(self) -> None:
        while await self.read():
            pass


class Churn:
    """Requests that come and go over a small pool, from a seed."""

    def __init__(self, pool: BlockPool, seed: int) -> None:
        self.pool = pool
        self._random = random.Random(seed)
        self._tables: list[list[int]] = []

    def step(self) -> None:
        action = self._random.random()
        if action < 0.03:
            self.pool.flush()
        elif action < 0.5 and (table := self.pool.allocate(self._random.randint(1, 4))) is not None:
            self._tables.append(table)
            parent = ROOT
            for block_id in table:  # prefixes collide often
                block_hash = parent + bytes([self._random.randint(0, 2)])
                if self._random.random() < 0.9:
                    self.pool.register(block_id, block_hash, parent)
                parent = block_hash
        elif self._tables:
            self.pool.release(self._tables.pop(self._random.randrange(len(self._tables))))


def named_pool(num_names: int) -> BlockPool:
    pool = BlockPool(num_names + 1)
    for block_id in pool.allocate(num_names) or ():
        pool.register(block_id, b"%d" % block_id, ROOT)
    return pool


@pytest.mark.parametrize("seed", range(20))
def test_routers_hold_what_the_pool_holds_under_churn_however_slowly_they_read(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_watchers, "MAX_ENTRIES_PER_PART", 3)
    monkeypatch.setattr(cache_watchers, "MAX_PENDING", 24)

    async def test() -> None:
        watchers, dice = CacheWatchers(), random.Random(1000 + seed)
        pool = BlockPool(12)
        watchers.watch(pool)
        churn = Churn(pool, seed)
        for _ in range(30):
            churn.step()
        with watchers.subscribe() as one, watchers.subscribe() as other:
            quick, slow = Router(one), Router(other)
            for i in range(400):
                if i == 200:  # the executor is lost and comes back
                    pool = BlockPool(10)
                    churn = Churn(pool, seed + 500)
                    watchers.watch(pool)
                for _ in range(dice.randint(0, 3)):
                    churn.step()
                watchers.publish()
                await quick.read_all()
                assert quick.parents == dict(pool.snapshot())
                if dice.random() < 0.2:
                    await slow.read()  # one part, perhaps in the middle of a snapshot
                if dice.random() < 0.02:
                    await slow.read_all()
                    assert slow.parents == dict(pool.snapshot())
            await slow.read_all()
            assert slow.parents == dict(pool.snapshot())
            num_snapshots = [sum(part.is_cleared for part in router.parts) for router in (quick, slow)]
            assert num_snapshots[0] == 2, "a reader that keeps up gets deltas"
            assert num_snapshots[1] > 2, "one that falls behind begins anew"
            largest = max(len(part.removed) + len(part.stored) for router in (quick, slow) for part in router.parts)
            assert largest <= 3

    run(test())


def test_a_large_snapshot_comes_in_parts_that_say_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_watchers, "MAX_ENTRIES_PER_PART", 4)

    async def test() -> None:
        watchers = CacheWatchers()
        watchers.watch(named_pool(10))
        with watchers.subscribe() as reader:
            router = Router(reader)
            await router.read_all()
            assert [(part.is_cleared, len(part.stored), part.has_more) for part in router.parts] == [
                (True, 4, True),
                (False, 4, True),
                (False, 2, False),
            ]

    run(test())


def test_what_changes_while_a_snapshot_is_read_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_watchers, "MAX_ENTRIES_PER_PART", 4)

    async def test() -> None:
        watchers, pool = CacheWatchers(), named_pool(10)
        watchers.watch(pool)
        with watchers.subscribe() as reader:
            router = Router(reader)
            await router.read()
            pool.release([1, 10])
            pool.flush()
            watchers.publish()
            await router.read_all()
            assert router.parents == dict(pool.snapshot())
            assert router.parts[-1] == CachePart(False, [b"10", b"1"], [])

    run(test())


def test_a_change_that_the_snapshot_has_and_that_is_undone_behind_it_is_told() -> None:
    async def test() -> None:
        watchers, pool = CacheWatchers(), BlockPool(4)
        watchers.watch(pool)
        with watchers.subscribe() as one, watchers.subscribe() as other:
            early, late = Router(one), Router(other)
            await early.read_all()
            table = pool.allocate(1) or []
            pool.register(table[0], b"name", ROOT)
            await late.read_all()
            assert late.parents == {b"name": ROOT}
            pool.release(table)
            pool.flush()
            watchers.publish()
            await early.read_all()
            await late.read_all()
            assert early.parents == late.parents == {}

    run(test())


def test_an_empty_cache_is_told_at_once_and_a_cache_that_is_not_there_yet_when_it_comes() -> None:
    async def test() -> None:
        watchers = CacheWatchers()
        with watchers.subscribe() as reader:
            router = Router(reader)
            assert not await router.read()
            watchers.watch(BlockPool(4))
            await router.read_all()
            assert router.parts == [CachePart(True, [], [])]

    run(test())


def test_changes_are_remembered_only_while_somebody_watches() -> None:
    async def test() -> None:
        watchers, pool = CacheWatchers(), BlockPool(4)
        watchers.watch(pool)

        names = itertools.count()

        def is_remembered() -> bool:
            table = pool.allocate(1) or []
            pool.register(table[0], b"%d" % next(names), ROOT)
            pool.release(table)
            return pool.take_events() is not None

        assert not is_remembered()
        with watchers.subscribe():
            with watchers.subscribe():
                assert is_remembered()
            assert is_remembered()
        assert not is_remembered()

    run(test())


def test_a_reader_that_does_not_read_holds_a_bounded_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_watchers, "MAX_PENDING", 50)

    async def test() -> None:
        watchers, pool = CacheWatchers(), BlockPool(20)
        watchers.watch(pool)
        with watchers.subscribe() as reader:
            router = Router(reader)
            await router.read_all()
            most = 0
            for number in range(1000):
                table = pool.allocate(1) or []
                pool.register(table[0], b"%d" % number, ROOT)
                pool.release(table)
                watchers.publish()
                most = max(most, len(reader._pending))
            assert 40 < most <= 50
            await router.read_all()
            assert router.parents == dict(pool.snapshot())
            assert router.parts[-1].is_cleared

    run(test())
