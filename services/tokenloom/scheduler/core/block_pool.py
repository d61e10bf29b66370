"""KV memory in blocks of fixed size: who holds which, which are free, which still hold a known prefix.

A block is in exactly one of three places:

    held        ref_count >= 1; in that many block tables (more than one only under the same hash)
    free        ref_count 0, content unknown; a stack, so that the block freed last is the next one out
    cached      ref_count 0, content known by its hash; evicted least recently used when the free ones run out

Block 0, the null block, is the trash for padding and never given out: num_held + num_free_blocks = num_blocks - 1.

Blocks freed while a plan is made may be handed out in the same plan: executors run plans strictly in order, so every
earlier write to them comes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """What changed in the names of blocks since the last look: the net difference, in this order.

    Args:
        is_cleared: everything told before is void.
        removed: hashes that no longer are found.
        stored: hashes that now are, each with its parent.
    """

    is_cleared: bool
    removed: list[bytes]
    stored: list[tuple[bytes, bytes]]


class _EventLog:
    """Names gained and lost, each at most once: a name that went and came back within a look is no event."""

    def __init__(self) -> None:
        self._removed: dict[bytes, None] = {}
        self._stored: dict[bytes, bytes] = {}

    def store(self, block_hash: bytes, parent: bytes) -> None:
        if self._removed.pop(block_hash, self) is self:
            self._stored[block_hash] = parent

    def remove(self, block_hash: bytes) -> None:
        if self._stored.pop(block_hash, None) is None:
            self._removed[block_hash] = None

    def take(self) -> CacheEvents | None:
        if not self._removed and not self._stored:
            return None
        events = CacheEvents(False, list(self._removed), list(self._stored.items()))
        self._removed, self._stored = {}, {}
        return events


class BlockPool:
    """The blocks of one executor.

    Args:
        num_blocks: the null block included; at least 2.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._parent_of: dict[bytes, bytes] = {}
        self._events: _EventLog | None = None
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        # In order of release, least recently used first; a plain dict would scan its deleted entries at each eviction.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_held_blocks(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - 1 - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content is known."""
        return len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """Block tables that the block is in."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks with ref_count 1, evicting cached ones if need be. On None nothing has changed."""
        if count > self.num_free_blocks:
            return None
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(taken) < count:
            taken.append(self._evict())
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds the content of this name, or None. Changes nothing."""
        return self._block_of.get(block_hash)

    def count_cached(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks are free now: acquiring them lowers `num_free_blocks` by so many."""
        return sum(1 for block_id in block_ids if not self._ref_counts[block_id])

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Put found blocks into one more block table."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take blocks out of a block table. The table's tail becomes older than its head, so it is evicted first."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, "a block was released more often than acquired"
            if self._ref_counts[block_id]:
                continue
            if self._hash_of[block_id] is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = None

    def register(self, block_id: int, block_hash: bytes, parent: bytes = b"") -> None:
        """Name a held block's content. If another block has that name already, this one stays without.

        Args:
            parent: the hash of the block before, or the root; for readers of events.
        """
        assert self._ref_counts[block_id] > 0, "only a held block's content is known"
        if self._hash_of[block_id] is None and block_hash not in self._block_of:
            self._hash_of[block_id] = block_hash
            self._block_of[block_hash] = block_id
            self._parent_of[block_hash] = parent
            if self._events is not None:
                self._events.store(block_hash, parent)

    def flush(self) -> int:
        """Forget the content of all cached blocks; returns how many there were. Held ones keep their names."""
        flushed = list(self._cached)
        for block_id in flushed:
            self._forget(block_id)
        self._cached.clear()
        self._free.extend(reversed(flushed))
        return len(flushed)

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        del self._block_of[block_hash]
        del self._parent_of[block_hash]
        self._hash_of[block_id] = None
        if self._events is not None:
            self._events.remove(block_hash)

    # --- events -------------------------------------------------------------------------------------------------

    def start_events(self) -> None:
        """Remember from now on which names are gained and lost."""
        self._events = _EventLog()

    def stop_events(self) -> None:
        """Remember no more."""
        self._events = None

    def take_events(self) -> CacheEvents | None:
        """What changed since the last call or the start; None if nothing did or nothing is remembered."""
        return self._events.take() if self._events is not None else None

    def snapshot(self) -> dict[bytes, bytes]:
        """All names there are, each with its parent; a copy."""
        return dict(self._parent_of)
