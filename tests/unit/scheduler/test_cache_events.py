"""Events of the block pool: the net change of what can be found."""

from tokenloom.scheduler.core.block_hash import chain_hashes, root_hash
from tokenloom.scheduler.core.block_pool import BlockPool, CacheEvents
from tokenloom.scheduler.core.kv_cache import KVCache
from tokenloom.scheduler.core.request import Request

A, B, ROOT = b"a" * 32, b"b" * 32, b"r" * 32


def pool_with(*names: tuple[bytes, bytes]) -> BlockPool:
    """A pool of two blocks that watches, in which these blocks are cached."""
    pool = BlockPool(3)
    pool.start_events()
    for name, parent in names:
        block_ids = pool.allocate(1)
        assert block_ids is not None
        pool.register(block_ids[0], name, parent)
        pool.release(block_ids)
    return pool


def test_stored_and_evicted_names_are_told_once() -> None:
    pool = pool_with((A, ROOT), (B, A))
    assert pool.take_events() == CacheEvents(False, [], [(A, ROOT), (B, A)])
    assert pool.take_events() is None
    assert pool.allocate(1) is not None
    assert pool.take_events() == CacheEvents(False, [A], [])
    assert pool.snapshot() == {B: A}


def test_what_comes_and_goes_between_two_looks_is_no_event() -> None:
    pool = pool_with((A, ROOT))
    pool.flush()
    assert pool.take_events() is None


def test_what_goes_and_comes_back_between_two_looks_is_no_event() -> None:
    pool = pool_with((A, ROOT))
    pool.take_events()
    pool.flush()
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.register(block_ids[0], A, ROOT)
    assert pool.take_events() is None
    assert pool.snapshot() == {A: ROOT}


def test_second_block_of_one_content_is_no_event() -> None:
    pool = pool_with((A, ROOT))
    pool.take_events()
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.register(block_ids[0], A, ROOT)
    assert pool.take_events() is None


def test_nothing_is_remembered_unless_somebody_watches() -> None:
    pool = pool_with((A, ROOT))
    pool.stop_events()
    pool.flush()
    assert pool.take_events() is None
    pool.start_events()
    assert pool.take_events() is None


def test_parents_are_the_blocks_before_and_the_root_of_the_salt() -> None:
    kv = KVCache(num_blocks=16, block_size=2)
    request = Request("a", [1, 2, 3, 4, 5], 1, cache_salt="s")
    kv.open_table(request, [])
    assert kv.allocate_slots(request, 5) is not None
    request.num_confirmed_tokens = 2
    kv.name_full_blocks(request)
    request.num_confirmed_tokens = 5
    kv.name_full_blocks(request)
    first, second = chain_hashes(root_hash("s"), [1, 2, 3, 4], 2)
    assert kv.pool.snapshot() == {first: root_hash("s"), second: first}
