"""Block tables of requests: what they hold, what they find in the prefix cache, what they are computing.

Rules kept here (numbers as in the README's list of rules for plans in flight):

3. A block is named only from `num_confirmed_tokens`, so when the results of all steps that wrote it were applied.
4. A request whose next block is being computed by a running one waits for it (`find_prefix`): many cold requests
   with one prefix compute it once. It does not wait for one of a lower class, which may get no budget for long, but
   computes the prefix itself, and others wait for it then. The choices of an n > 1 call are such requests: they share
   the full blocks of their prompt and recompute the partial one, so there is no copy-on-write.

At least one token is always computed, also when the whole prompt is cached: logits come from computing.
"""

from __future__ import annotations

import itertools

from tokenloom.scheduler.core.block_hash import chain_hashes, root_hash
from tokenloom.scheduler.core.block_pool import BlockPool
from tokenloom.scheduler.core.request import Request


class KVCache:
    """Block tables over one `BlockPool`.

    Args:
        num_blocks: the null block included.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._computing: dict[bytes, Request] = {}

    @property
    def max_tokens(self) -> int:
        """Tokens whose KV fits when one request has all blocks."""
        return (self.pool.num_blocks - 1) * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def hash_prompt(self, request: Request) -> None:
        """Hash the request's full blocks, so that no step has to."""
        self._hashes(request)

    def find_prefix(self, request: Request) -> list[int] | None:
        """Blocks that hold the longest cached prefix of the request; leaves at least one token. Takes none of them.

        Returns: block ids in table order, or None if a running request computes the block behind them (rule 4). While
            it does, asking again costs nothing, however long the prefix is.
        """
        found: list[int] = []
        if not request.reads_prefix_cache:
            return found
        if request.awaited_hash is not None and self._is_computed_for(request, request.awaited_hash):
            return None
        hashes = self._hashes(request)
        num_usable = (request.num_tokens - 1) // self.block_size
        for i in range(num_usable):
            block_id = self.pool.find(hashes[i])
            if block_id is None:
                request.awaited_hash = self._last_computing(request, i, num_usable)
                return found if request.awaited_hash is None else None
            found.append(block_id)
        return found

    def open_table(self, request: Request, found: list[int]) -> None:
        """Begin a block table with found blocks; announces the blocks that the request is going to compute."""
        assert not request.block_ids
        self.pool.acquire(found)
        request.block_ids = list(found)
        request.num_hashed_blocks = len(found)
        for block_hash in self._hashes(request)[len(found) :]:
            if not self._is_computed_for(request, block_hash):
                self._computing[block_hash] = request

    def allocate_slots(self, request: Request, num_tokens: int) -> list[int] | None:
        """Give `request` enough blocks to hold `num_tokens` tokens in all.

        Appends to its block table and takes from the pool. On None nothing has changed.

        Returns: the blocks added, in table order ([] if the last one had room), or None if the pool is short; the
            caller may preempt and try again.
        """
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return []
        added = self.pool.allocate(missing)
        if added is not None:
            request.block_ids.extend(added)
        return added

    def name_full_blocks(self, request: Request) -> None:
        """Make the request's confirmed full blocks findable (rule 3)."""
        num_full = request.num_confirmed_tokens // self.block_size
        if num_full <= request.num_hashed_blocks:
            return
        hashes = self._hashes(request)
        parent = hashes[request.num_hashed_blocks - 1] if request.num_hashed_blocks else root_hash(request.cache_salt)
        for i in range(request.num_hashed_blocks, num_full):
            self.pool.register(request.block_ids[i], hashes[i], parent)
            parent = hashes[i]
            self._stop_computing(hashes[i], request)
        request.num_hashed_blocks = num_full

    def close_table(self, request: Request) -> None:
        """Release the request's blocks and withdraw its announcements."""
        for block_hash in request.block_hashes[request.num_hashed_blocks :]:
            self._stop_computing(block_hash, request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_hashed_blocks = 0

    def _stop_computing(self, block_hash: bytes, request: Request) -> None:
        if self._computing.get(block_hash) is request:
            del self._computing[block_hash]

    def _is_computed_for(self, request: Request, block_hash: bytes) -> bool:
        """A running request computes the block and gets budget for it no later than `request` would."""
        owner = self._computing.get(block_hash)
        return owner is not None and owner.current_class <= request.current_class

    def _last_computing(self, request: Request, start: int, end: int) -> bytes | None:
        """The last of the blocks from `start` on that are being computed without a gap; None if the first is not."""
        last = None
        for block_hash in itertools.islice(request.block_hashes, start, end):
            if not self._is_computed_for(request, block_hash):
                break
            last = block_hash
        return last

    def _hashes(self, request: Request) -> list[bytes]:
        """Names of the request's full blocks; what is known is not hashed again."""
        known = request.block_hashes
        if request.num_tokens // self.block_size > len(known):
            parent = known[-1] if known else root_hash(request.cache_salt)
            known += chain_hashes(parent, request.token_ids[len(known) * self.block_size :], self.block_size)
        return known
