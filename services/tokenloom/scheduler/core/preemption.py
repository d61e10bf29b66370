"""Who gives way.

For the next block of a running request: the request of the lowest class; within it of the tenant furthest over its
share, and then the newest.

For a waiting request that finds no room:
- running requests of lower classes;
- while its own tenant would stay within its share: requests of the same class whose tenant holds more than its share,
  the newest first, unless that tenant was served less by more than a step's worth of prompt tokens.
Nobody is sent away unless that makes room for sure. Recomputing ends, whatever arrives: the oldest running request of a
tenant, once it gave way `MAX_GAVE_WAY` times, gives way for no share any more; only class and age count for it then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from tokenloom.scheduler.core.block_pool import BlockPool
from tokenloom.scheduler.core.config import SchedulerConfig
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
        config: its rows are shared, if it is fair.
        pool: its blocks are.
    """

    def __init__(self, config: SchedulerConfig, tenants: Tenants, pool: BlockPool) -> None:
        self._config = config
        self._tenants = tenants
        self._pool = pool

    def victim_for_block(self, running: Sequence[Request], kept: Container[Request]) -> Request:
        """The running request that gives its blocks to the others.

        Args:
            running: all that run, by class and age.
            kept: those of them that may not be sent away; not all.
        """
        spared = self._spared(running)
        return max((request for request in running if request not in kept), key=lambda other: self._rank(other, spared))

    def victims_for(
        self,
        request: Request,
        needed_blocks: int,
        shortage: Shortage,
        running: Sequence[Request],
        kept: Container[Request],
    ) -> list[Preemption] | None:
        """Requests whose preemption makes room for a waiting one; None if nothing that may be done does.

        Args:
            needed_blocks: blocks that the request would hold.
            running: all that run, by class and age.
            kept: those of them that may not be sent away.
        """
        is_entitled = self.is_within_share(request.account, needed_blocks)
        if not running or not (is_entitled or running[-1].current_class > request.current_class):
            return None
        spared = self._spared(running)
        may_give_way = [
            Preemption(other, reason)
            for other in running
            if (reason := self._reason(request, other, is_entitled, spared)) is not None
            and other not in kept
            and not other.needs_no_more_plans
        ]
        may_give_way.sort(key=lambda preemption: self._rank(preemption.request, spared), reverse=True)
        return self._first_that_suffice(may_give_way, shortage)

    def _spared(self, running: Sequence[Request]) -> set[Request]:
        """Requests that give way for no share any more."""
        if not self._config.is_fair or self._tenants.num_alive < 2:
            return set()
        oldest: dict[Tenant, Request] = {}
        for request in running:
            oldest.setdefault(request.account, request)
        return {request for request in oldest.values() if request.num_gave_way >= MAX_GAVE_WAY}

    def _first_that_suffice(self, may_give_way: list[Preemption], shortage: Shortage) -> list[Preemption] | None:
        victims: list[Preemption] = []
        num_rows, num_blocks = shortage.num_rows, shortage.num_blocks
        released = Counter(dict.fromkeys(shortage.found, -self._pool.num_blocks))  # they stay held
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
            released.update(other.block_ids)
            num_blocks -= self._count_freed(other, released)
        if num_rows > 0 or num_blocks > 0:
            return None
        return self._needed_of(victims, released, -num_rows, -num_blocks)

    def _count_freed(self, request: Request, released: Counter[int]) -> int:
        """Blocks of a request that nobody holds any more once so many holders of each released it."""
        return sum(1 for block_id in request.block_ids if released[block_id] == self._pool.ref_count(block_id))

    def _needed_of(
        self, victims: list[Preemption], released: Counter[int], num_rows_spare: int, num_blocks_spare: int
    ) -> list[Preemption]:
        """Spare those that came first and are not needed beside the later ones.

        Args:
            released: how many of the victims release each block.
            num_rows_spare, num_blocks_spare: what they free beyond what is lacking.
        """
        needed = []
        for preemption in victims:
            num_freed = self._count_freed(preemption.request, released)
            if num_rows_spare >= 1 and num_blocks_spare >= num_freed:
                released.subtract(preemption.request.block_ids)
                num_rows_spare, num_blocks_spare = num_rows_spare - 1, num_blocks_spare - num_freed
            else:
                needed.append(preemption)
        return needed

    def _reason(
        self, request: Request, other: Request, is_entitled: bool, spared: set[Request]
    ) -> PreemptReason | None:
        """Why `other` may be sent away for `request`; None: it may not."""
        if other.current_class > request.current_class:
            return PreemptReason.PRIORITY
        if (
            is_entitled
            and other.current_class == request.current_class
            and other.account is not request.account
            and other.account.counter >= request.account.counter - self._config.tolerated_charge
            and other not in spared
            and self._is_over_share(other.account, 0, 0)
        ):
            return PreemptReason.SHARE
        return None

    def is_within_share(self, tenant: Tenant, needed_blocks: int) -> bool:
        """The tenant may have one more request with so many blocks."""
        return (
            self._config.is_fair
            and tenant.num_running + 1 <= self._tenants.share(tenant, self._config.max_num_seqs)
            and tenant.num_held_blocks + needed_blocks <= self._tenants.share(tenant, self._num_blocks)
        )

    def _is_over_share(self, tenant: Tenant, rows_less: int, blocks_less: int) -> bool:
        return tenant.num_running - rows_less > self._tenants.share(
            tenant, self._config.max_num_seqs
        ) or tenant.num_held_blocks - blocks_less > self._tenants.share(tenant, self._num_blocks)

    def _rank(self, request: Request, spared: set[Request]) -> tuple[int, float, int]:
        """The largest gives way first."""
        over_share = 0.0
        if self._config.is_fair and request not in spared:
            over_share = self._tenants.over_share(request.account, self._config.max_num_seqs, self._num_blocks)
        return (request.current_class, over_share, request.arrival)

    @property
    def _num_blocks(self) -> int:
        return self._pool.num_blocks - 1
