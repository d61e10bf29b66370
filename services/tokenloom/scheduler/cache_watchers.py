"""Readers of what the prefix cache holds (WatchCacheEvents): a snapshot, then what changes.

    BlockPool --take_events(), once per turn of the loop--> CacheWatchers --> CacheReader.pending, one per reader
                                                                                 | take(): a part of bounded size
                                                                                 v
                                                                              the reader

A reader keeps the net change since its last part: the newest fate of each hash, so a hash that comes and goes costs one
entry. A reader whose entries become more than `max_pending` begins anew with a snapshot, which is then less to read.
The pool remembers changes only while somebody watches.

A snapshot is taken at one moment and sent in parts; what changes meanwhile waits and follows it. A new snapshot, or a
cache that was emptied, makes what is left of the old one void.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from tokenloom.scheduler.core.block_pool import BlockPool, CacheEvents

MAX_ENTRIES_PER_PART = 4096
MAX_PENDING = 32768


@dataclass(frozen=True, slots=True)
class CachePart:
    """A part of what a reader is told; see WatchCacheEventsResponse in engine.proto.

    Args:
        is_cleared: everything told before is void.
        removed: hashes that no longer are there.
        stored: hashes that now are there, each with its parent.
        has_more: a snapshot goes on in the next part.
    """

    is_cleared: bool
    removed: list[bytes]
    stored: list[tuple[bytes, bytes]]
    has_more: bool = False


class CacheReader:
    """What one reader was not told yet.

    Args:
        watchers: whose pool it reads.
    """

    def __init__(self, watchers: CacheWatchers) -> None:
        self._watchers = watchers
        self._pending: dict[bytes, bytes | None] = {}  # hash to its parent; None: it was removed
        self._snapshot: Iterator[tuple[bytes, bytes]] | None = None
        self._needs_snapshot = True
        self._news = asyncio.Event()
        self._news.set()

    def begin_anew(self) -> None:
        """The next part begins a new snapshot."""
        self._pending.clear()
        self._needs_snapshot = True
        self._news.set()

    def note(self, events: CacheEvents) -> None:
        """The pool changed."""
        if self._needs_snapshot:
            return
        if events.is_cleared or len(self._pending) + len(events.removed) + len(events.stored) > MAX_PENDING:
            self.begin_anew()
            return
        self._pending.update(dict.fromkeys(events.removed))
        self._pending.update(events.stored)
        self._news.set()

    async def take(self) -> CachePart:
        """Wait for news; the next part of them."""
        while True:
            await self._news.wait()
            is_first = self._needs_snapshot
            if is_first and not self._begin_snapshot():
                self._news.clear()  # there is no pool yet
            elif self._snapshot is not None:
                return self._next_of_snapshot(is_first)
            elif self._pending:
                return self._next_of_pending()
            else:
                self._news.clear()

    def _begin_snapshot(self) -> bool:
        snapshot = self._watchers.snapshot()
        if snapshot is None:
            return False
        self._snapshot, self._needs_snapshot = iter(snapshot.items()), False
        return True

    def _next_of_snapshot(self, is_first: bool) -> CachePart:
        assert self._snapshot is not None
        stored = list(islice(self._snapshot, MAX_ENTRIES_PER_PART))
        has_more = len(stored) == MAX_ENTRIES_PER_PART
        if not has_more:
            self._snapshot = None
        return CachePart(is_first, [], stored, has_more)

    def _next_of_pending(self) -> CachePart:
        removed: list[bytes] = []
        stored: list[tuple[bytes, bytes]] = []
        for block_hash in list(islice(self._pending, MAX_ENTRIES_PER_PART)):
            parent = self._pending.pop(block_hash)
            if parent is None:
                removed.append(block_hash)
            else:
                stored.append((block_hash, parent))
        return CachePart(False, removed, stored)


class CacheWatchers:
    """Fans changes of the prefix cache out to readers; the step loop never waits for one."""

    def __init__(self) -> None:
        self._readers: set[CacheReader] = set()
        self._pool: BlockPool | None = None

    def watch(self, pool: BlockPool) -> None:
        """There is a pool, or a new one: what readers know is void."""
        self._pool = pool
        if self._readers:
            pool.start_events()
        for reader in self._readers:
            reader.begin_anew()

    def publish(self) -> None:
        """Tell what changed in the pool since the last call; costs nothing without readers."""
        if self._readers and self._pool is not None and (events := self._pool.take_events()) is not None:
            for reader in self._readers:
                reader.note(events)

    def snapshot(self) -> dict[bytes, bytes] | None:
        """All hashes there are, each with its parent; None while there is no pool."""
        if self._pool is None:
            return None
        self.publish()  # the others are told of what the snapshot has already; its reader is not told again
        return self._pool.snapshot()

    @contextmanager
    def subscribe(self) -> Iterator[CacheReader]:
        """A reader of the cache, from its present content on."""
        if not self._readers and self._pool is not None:
            self._pool.start_events()
        reader = CacheReader(self)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            if not self._readers and self._pool is not None:
                self._pool.stop_events()
