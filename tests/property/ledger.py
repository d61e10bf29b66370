"""Books that the machines keep beside the core: who is charged what, and what the prefix cache is said to hold."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from tokenloom.scheduler.core.block_pool import BlockPool
from tokenloom.scheduler.core.plan import RequestOutput, SchedulerOutput
from tokenloom.scheduler.core.request import Request


@lru_cache(maxsize=100_000)
def block_names(salt: str, token_ids: tuple[int, ...], block_size: int) -> tuple[tuple[bytes, bytes], ...]:
    """Names of the full blocks of these tokens, each with its parent, by the text of the scheme."""
    salt_bytes = salt.encode()
    root = hashlib.sha256(b"tokenloom/1" + struct.pack("<I", len(salt_bytes)) + salt_bytes + struct.pack("<I", 0))
    parent = root.digest()
    names = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = struct.pack(f"<{block_size}I", *token_ids[start : start + block_size])
        name = hashlib.sha256(parent + block).digest()
        names.append((name, parent))
        parent = name
    return tuple(names)


class ChargeLedger:
    """Tokens that each tenant has to pay for: what was computed for it for the first time, by request and position.

    A prompt token that a request found in the cache is never charged, and none is charged twice, whatever is computed
    again. An output token is charged when its reader is told. What a request brought along from an engine that was lost
    was charged there.
    """

    def __init__(self) -> None:
        self.prompt_tokens: Counter[str] = Counter()
        self.output_tokens: Counter[str] = Counter()
        self.num_computed_tokens = 0
        self._seen: dict[int, set[int]] = {}
        self._kept: list[Request] = []  # so that no id() is used twice

    def join(self, request: Request, *, is_resubmission: bool) -> None:
        """A request was taken."""
        self._kept.append(request)
        self._seen[id(request)] = set(range(request.num_tokens if is_resubmission else 0))

    def planned(self, plan: SchedulerOutput) -> None:
        """A plan was made."""
        for row in plan.rows:
            request, seen = row.request, self._seen[id(row.request)]
            start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
            self.num_computed_tokens += row.num_scheduled_tokens
            if row.is_new:
                seen.update(range(start))
            computed = set(range(start, min(end, request.num_prompt_tokens))) - seen
            self.prompt_tokens[request.tenant] += len(computed)
            seen |= computed

    def told(self, news: Sequence[RequestOutput]) -> None:
        """Readers were told of tokens."""
        for output in news:
            self.output_tokens[output.request.tenant] += len(output.token_ids)

    def num_tokens(self, tenant: str) -> int:
        """Tokens charged so far."""
        return self.prompt_tokens[tenant] + self.output_tokens[tenant]


class CacheMirror:
    """What a router would believe of the prefix cache from its events alone."""

    def __init__(self, pool: BlockPool) -> None:
        pool.start_events()
        self.pool = pool
        self.parents = dict(pool.snapshot())

    def follow(self) -> None:
        """Take what happened and compare with what the pool can find."""
        events = self.pool.take_events()
        if events is not None:
            assert events.removed or events.stored or events.is_cleared, "an event without news"
            if events.is_cleared:
                self.parents.clear()
            for name in events.removed:
                del self.parents[name]
            for name, parent in events.stored:
                assert name not in self.parents, "stored twice"
                self.parents[name] = parent
        assert self.parents == dict(self.pool.snapshot())
        assert all(self.pool.find(name) is not None for name in self.parents)
        assert self.pool.take_events() is None
