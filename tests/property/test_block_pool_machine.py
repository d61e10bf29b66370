"""The block pool against a model of plain lists and counts.

The model keeps what the pool promises: which blocks are held and how often, the stack of free blocks, the cached ones
in the order of their release.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.property.profiles import LONG
from tokenloom.scheduler.core.block_pool import NULL_BLOCK, BlockPool

NAMES = st.integers(0, 11).map(lambda i: bytes([i]) * 32)


pytestmark = pytest.mark.timeout(1800)  # shrinking a failure takes minutes


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables of random requests over one pool."""

    @initialize(num_blocks=st.integers(2, 9))
    def build(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.free = list(range(num_blocks - 1, 0, -1))
        self.cached: list[int] = []
        self.name_of: dict[int, bytes] = {}

    def block_with(self, name: bytes) -> int | None:
        return next((block_id for block_id, known in self.name_of.items() if known == name), None)

    def num_tables_with(self, block_id: int) -> int:
        return sum(block_id in table for table in self.tables)

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        expected: list[int] | None = None
        if count <= len(self.free) + len(self.cached):
            expected = []
            for _ in range(count):
                if self.free:
                    expected.append(self.free.pop())
                else:
                    expected.append(self.cached.pop(0))
                    del self.name_of[expected[-1]]
            self.tables.append(expected)
        assert self.pool.allocate(count) == expected

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=NAMES)
    def register(self, data: st.DataObject, name: bytes) -> None:
        blocks = [block_id for table in self.tables for block_id in table]
        if not blocks:
            return
        block_id = data.draw(st.sampled_from(blocks))
        self.pool.register(block_id, name)
        if block_id not in self.name_of and self.block_with(name) is None:
            self.name_of[block_id] = name

    @rule(names=st.lists(NAMES, unique=True, max_size=4))
    def acquire_what_is_found(self, names: list[bytes]) -> None:
        found = [block_id for name in names if (block_id := self.pool.find(name)) is not None]
        num_free = self.pool.num_free_blocks
        num_cached = self.pool.count_cached(found)
        self.pool.acquire(found)
        assert self.pool.num_free_blocks == num_free - num_cached
        self.cached = [block_id for block_id in self.cached if block_id not in found]
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block_id in reversed(table):
            if not self.num_tables_with(block_id):
                (self.cached if block_id in self.name_of else self.free).append(block_id)

    @rule()
    def flush(self) -> None:
        assert self.pool.flush() == len(self.cached)
        for block_id in self.cached:
            del self.name_of[block_id]
        self.free += reversed(self.cached)
        self.cached = []

    @invariant()
    def held_and_free_make_the_pool(self) -> None:
        held = {block_id for table in self.tables for block_id in table}
        assert NULL_BLOCK not in held
        assert self.pool.num_held_blocks == len(held)
        assert self.pool.num_free_blocks == len(self.free) + len(self.cached)
        assert self.pool.num_held_blocks + self.pool.num_free_blocks == self.pool.num_blocks - 1
        assert self.pool.num_cached_blocks == len(self.cached)

    @invariant()
    def tables_are_counted_and_share_named_blocks_only(self) -> None:
        for block_id in range(self.pool.num_blocks):
            num_tables = self.num_tables_with(block_id)
            assert self.pool.ref_count(block_id) == num_tables
            assert num_tables < 2 or block_id in self.name_of

    @invariant()
    def names_find_their_blocks(self) -> None:
        for i in range(12):
            name = bytes([i]) * 32
            assert self.pool.find(name) == self.block_with(name)


def test_pool_does_what_plain_lists_and_counts_say() -> None:
    run_state_machine_as_test(BlockPoolMachine)


@pytest.mark.slow
def test_pool_does_what_plain_lists_and_counts_say_for_long() -> None:
    run_state_machine_as_test(BlockPoolMachine, settings=LONG)
