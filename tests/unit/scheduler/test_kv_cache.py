"""Block tables: found and added blocks, announcements of what is being computed, and what waiting costs."""

from __future__ import annotations

import pytest

from tests.shadow_engine import ShadowEngine, coin, generate_alone
from tokenloom.scheduler.core.block_pool import BlockPool
from tokenloom.scheduler.core.kv_cache import KVCache
from tokenloom.scheduler.core.request import FinishReason, Request
from tokenloom.scheduler.core.scheduler import Scheduler, SchedulerConfig


class Lookups:
    """Counts how often the pool is asked for a name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        find = BlockPool.find

        def counting_find(pool: BlockPool, block_hash: bytes) -> int | None:
            self.count += 1
            return find(pool, block_hash)

        monkeypatch.setattr(BlockPool, "find", counting_find)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Lookups:
    return Lookups(monkeypatch)


def test_first_plan_names_each_block_once() -> None:
    scheduler = Scheduler(SchedulerConfig(block_size=2), num_blocks=16)
    request = Request("a", [1, 2, 3, 4, 5], max_output_tokens=4)
    scheduler.add_request(request)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.rows[0].new_block_ids == request.block_ids == [1, 2, 3]


def test_opening_a_table_leaves_the_list_of_found_blocks_alone() -> None:
    kv = KVCache(num_blocks=8, block_size=2)
    found: list[int] = []
    request = Request("a", [1, 2, 3], max_output_tokens=1)
    kv.open_table(request, found)
    assert kv.allocate_slots(request, 3) == [1, 2]
    assert found == []
    assert request.block_ids == [1, 2]


def test_short_pool_adds_no_block_to_a_table() -> None:
    kv = KVCache(num_blocks=3, block_size=2)
    request = Request("a", [1, 2, 3, 4, 5], max_output_tokens=1)
    kv.open_table(request, [])
    assert kv.allocate_slots(request, 5) is None
    assert request.block_ids == []
    assert kv.pool.num_free_blocks == 2


def test_last_token_of_a_cached_prompt_is_left_to_compute() -> None:
    kv = KVCache(num_blocks=8, block_size=2)
    first = Request("first", [1, 2, 3, 4], 1)
    kv.open_table(first, [])
    kv.allocate_slots(first, 4)
    first.num_confirmed_tokens = 4
    kv.name_full_blocks(first)
    assert kv.find_prefix(Request("same", [1, 2, 3, 4], 1)) == [1]
    assert kv.find_prefix(Request("longer", [1, 2, 3, 4, 5], 1)) == [1, 2]


def test_announcement_is_withdrawn_only_by_the_request_that_made_it() -> None:
    kv = KVCache(num_blocks=16, block_size=2)
    first = Request("first", [1, 2, 3, 4, 5], 1)
    second = Request("second", [1, 2, 3, 4, 5], 1, reads_prefix_cache=False)
    waits = Request("waits", [1, 2, 3, 4, 5], 1)
    kv.open_table(first, [])
    kv.open_table(second, [])
    kv.close_table(second)
    assert kv.find_prefix(waits) is None
    kv.close_table(first)
    assert kv.find_prefix(waits) == []


def test_waiting_for_a_prefix_looks_at_its_blocks_once_however_long_it_takes(lookups: Lookups) -> None:
    config = SchedulerConfig(block_size=2, max_num_batched_tokens=8)
    engine = ShadowEngine(config, num_blocks=256, next_token=coin)
    engine.add(Request("computes", [1] * 100, 1))
    for i in range(10):
        engine.add(Request(f"waits-{i}", [1] * 100 + [i], 1))
    engine.step()
    assert lookups.count <= 1 + 10
    lookups.count = 0
    for _ in range(10):
        engine.step()
    assert lookups.count == 0
    engine.run_until_idle()
    assert engine.told["waits-9"] == generate_alone([1] * 100 + [9], 1, next_token=coin)


def test_a_step_looks_at_few_of_many_waiting_requests(lookups: Lookups) -> None:
    config = SchedulerConfig(block_size=2, max_num_seqs=4, max_num_waiting=5000)
    engine = ShadowEngine(config, num_blocks=256, next_token=coin)
    for i in range(5000):
        engine.add(Request(str(i), [1, 1, 1, i % 100], 1))
    engine.plan()
    assert lookups.count <= 1 + 512


def test_cached_tokens_that_are_told_are_tokens_of_the_prompt() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=2), num_blocks=16)
    engine.add(Request("first", [1, 2, 3, 4], 8))
    engine.run_until_idle()
    resumed = Request("resumed", [1, 2, 3, 4], 8, output_token_ids=[5, 6, 7, 8, 9])
    engine.add(resumed)
    plan = engine.plan()
    assert plan is not None
    assert plan.rows[0].num_computed_tokens == 8
    assert resumed.num_cached_tokens == 4
    engine.finish("resumed", FinishReason.ABORTED)
