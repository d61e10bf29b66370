"""The pool's promises one by one; all of them in any order are in tests/property."""

import pytest

from tokenloom.scheduler.core.block_pool import NULL_BLOCK, BlockPool


def taken(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.allocate(count)
    assert block_ids is not None
    return block_ids


def name_all(pool: BlockPool, block_ids: list[int]) -> None:
    for block_id in block_ids:
        pool.register(block_id, bytes([block_id]))


def test_null_block_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert taken(pool, 3) == [1, 2, 3]
    assert pool.allocate(1) is None
    assert NULL_BLOCK == 0


def test_short_pool_gives_nothing_and_changes_nothing() -> None:
    pool = BlockPool(4)
    taken(pool, 2)
    assert pool.allocate(2) is None
    assert (pool.num_free_blocks, pool.num_held_blocks) == (1, 2)
    assert taken(pool, 1) == [3]


def test_block_freed_last_is_given_out_first() -> None:
    pool = BlockPool(6)
    first, second = taken(pool, 2), taken(pool, 2)
    pool.release(first)
    pool.release(second)
    assert taken(pool, 4) == second + first


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    named, unnamed = taken(pool, 2), taken(pool, 1)
    name_all(pool, named)
    pool.release(unnamed)
    pool.release(named)
    assert taken(pool, 1) == unnamed


def test_least_recently_used_cached_block_is_evicted_and_forgotten() -> None:
    pool = BlockPool(4)
    block_ids = taken(pool, 3)
    name_all(pool, block_ids)
    for block_id in (2, 1, 3):
        pool.release([block_id])
    pool.acquire([2])
    pool.release([2])
    assert taken(pool, 2) == [1, 3]
    assert pool.find(b"\x01") is None
    assert pool.find(b"\x02") == 2


def test_tail_of_a_table_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    block_ids = taken(pool, 3)
    name_all(pool, block_ids)
    pool.release(block_ids)
    assert taken(pool, 3) == [3, 2, 1]


def test_shared_block_is_free_when_the_last_table_lets_it_go() -> None:
    pool = BlockPool(3)
    block_ids = taken(pool, 1)
    name_all(pool, block_ids)
    pool.acquire(block_ids)
    pool.release(block_ids)
    assert pool.num_held_blocks == 1
    pool.release(block_ids)
    assert (pool.num_held_blocks, pool.num_cached_blocks) == (0, 1)


def test_first_block_with_a_name_keeps_it() -> None:
    pool = BlockPool(4)
    taken(pool, 2)
    pool.register(1, b"same")
    pool.register(2, b"same")
    assert pool.find(b"same") == 1
    pool.release([2])
    assert pool.num_cached_blocks == 0


def test_acquiring_cached_blocks_costs_free_ones_and_held_blocks_do_not() -> None:
    pool = BlockPool(4)
    block_ids = taken(pool, 2)
    name_all(pool, block_ids)
    pool.release([1])
    assert pool.count_cached([1, 2]) == 1
    pool.acquire([1, 2])
    assert (pool.num_free_blocks, pool.ref_count(1), pool.ref_count(2)) == (1, 1, 2)


def test_flush_forgets_cached_blocks_and_leaves_held_ones_their_names() -> None:
    pool = BlockPool(4)
    block_ids = taken(pool, 3)
    name_all(pool, block_ids)
    pool.release([1, 2])
    assert pool.flush() == 2
    assert [pool.find(bytes([block_id])) for block_id in block_ids] == [None, None, 3]
    assert (pool.num_free_blocks, pool.num_cached_blocks) == (2, 0)
    assert taken(pool, 2) == [2, 1], "the least recently used first, as before"


def test_releasing_more_often_than_acquired_is_found_out() -> None:
    pool = BlockPool(3)
    block_ids = taken(pool, 1)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block_ids)
