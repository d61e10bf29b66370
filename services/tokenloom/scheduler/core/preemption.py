"""Who gives way.

For the next block of a running request: the request of the lowest class; within it of the tenant furthest over its
share, and then the newest.

For a waiting request that finds no room:
- running requests of lower classes;
- while its own tenant would stay within its share: requests of the same class whose tenant holds more than its share
  and was served no less, the newest first.
Nobody is sent away unless that makes room for sure. A request that gave way `MAX_GAVE_WAY` times gives way for no
tenant's share any more: only class and age count for it then, so recomputing ends, whatever arrives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenloom.scheduler.core.block_pool import BlockPool
from tokenloom.scheduler.core.plan import Preemption, PreemptReason
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.tenants import Tenant, Tenants

MAX_GAVE_WAY = 2


@dataclass(slots=True)
class Shortage:
    """What a waiting request lacks.

    Args:
        num_rows: rows, 0 or 1.
        num_blocks: free blocks; 0 or less if there are enough.
        found: blocks of its cached prefix; those of a victim would not become free for it.
    """

    num_rows: int
    num_blocks: int
    found: list[int]


class Preemptor:
    """Chooses victims; changes nothing.

    Args:
        is_fair: False knows no tenants' shares.
        max_num_seqs: rows to share.
    """

    def __init__(self, tenants: Tenants, pool: BlockPool, max_num_seqs: int, is_fair: bool) -> None:
        self._tenants = tenants
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._is_fair = is_fair

    def victim_for_block(self, running: Iterable[Request]) -> Request:
        """The running request that gives its blocks to the others; there must be one."""
        return max(running, key=self._rank)

    def victims_for(
        self, request: Request, needed_blocks: int, shortage: Shortage, candidates: Iterable[Request]
    ) -> list[Preemption] | None:
        """Requests whose preemption makes room for a waiting one; None if nothing that may be done does.

        Args:
            needed_blocks: blocks that the request would hold.
            candidates: running requests that may be sent away.
        """
        is_entitled = self.is_within_share(request.account, needed_blocks)
        may_give_way = [
            Preemption(other, reason)
            for other in candidates
            if (reason := self._reason(request, other, is_entitled)) is not None
        ]
        may_give_way.sort(key=lambda preemption: self._rank(preemption.request), reverse=True)
        return self._first_that_suffice(may_give_way, shortage)

    def _first_that_suffice(self, may_give_way: list[Preemption], shortage: Shortage) -> list[Preemption] | None:
        victims: list[Preemption] = []
        num_rows, num_blocks = shortage.num_rows, shortage.num_blocks
        found = set(shortage.found)
        taken: dict[Tenant, tuple[int, int]] = {}
        for preemption in may_give_way:
            if num_rows <= 0 and num_blocks <= 0:
                break
            other = preemption.request
            rows, blocks = taken.get(other.account, (0, 0))
            if preemption.reason is PreemptReason.SHARE and not self._is_over_share(other.account, rows, blocks):
                continue
            taken[other.account] = (rows + 1, blocks + len(other.block_ids))
            victims.append(preemption)
            num_rows -= 1
            num_blocks -= sum(1 for b in other.block_ids if self._pool.ref_count(b) == 1 and b not in found)
        return victims if num_rows <= 0 and num_blocks <= 0 else None

    def _reason(self, request: Request, other: Request, is_entitled: bool) -> PreemptReason | None:
        """Why `other` may be sent away for `request`; None: it may not."""
        if other.current_class > request.current_class:
            return PreemptReason.PRIORITY
        if (
            is_entitled
            and other.current_class == request.current_class
            and other.account is not request.account
            and other.account.counter >= request.account.counter
            and other.num_gave_way < MAX_GAVE_WAY
            and self._is_over_share(other.account, 0, 0)
        ):
            return PreemptReason.SHARE
        return None

    def is_within_share(self, tenant: Tenant, needed_blocks: int) -> bool:
        """The tenant may have one more request with so many blocks."""
        return (
            self._is_fair
            and tenant.num_running + 1 <= self._tenants.share(tenant, self._max_num_seqs)
            and tenant.num_held_blocks + needed_blocks <= self._tenants.share(tenant, self._num_blocks)
        )

    def _is_over_share(self, tenant: Tenant, rows_less: int, blocks_less: int) -> bool:
        return tenant.num_running - rows_less > self._tenants.share(
            tenant, self._max_num_seqs
        ) or tenant.num_held_blocks - blocks_less > self._tenants.share(tenant, self._num_blocks)

    def _rank(self, request: Request) -> tuple[int, float, int]:
        """The largest gives way first."""
        over_share = 0.0
        if self._is_fair and request.num_gave_way < MAX_GAVE_WAY:
            over_share = self._tenants.over_share(request.account, self._max_num_seqs, self._num_blocks)
        return (request.current_class, over_share, request.arrival)

    @property
    def _num_blocks(self) -> int:
        return self._pool.num_blocks - 1
