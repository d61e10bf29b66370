"""Tenants: who is served next, who holds how much, who sends too much.

Order by virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, algorithm 2): a
tenant's counter rises by the charge of each token computed for it, divided by its weight, and the tenant with the
lowest counter is served next. A tenant that comes back to the queue is lifted to the lowest counter in it, or, if it is
empty, to that of the tenant that left it last: nobody saves up credit by being idle. Nor does it start below the
virtual time, which rises with all service by its charge over the weight of all tenants alive, as in generalised
processor sharing: otherwise a stream of new tenants, each lifted to the one before, would hold the lowest counter down
for ever, and a tenant that is ahead would starve.

Shares are about the present, counters about the past: while others wait, a tenant holds no more rows and blocks than
its weight's part of them.

    served tokens x charge / weight -> counter          who is next
    rows, blocks held / share       -> over-share       who gives way
    tokens per minute               -> token bucket     who is refused
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

_MAX_IDLE_TENANTS = 4096
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What a tenant may have.

    Args:
        weight: its share while others wait, relative to theirs; above 0.
        max_num_running: most requests that run at once; None: no limit.
        max_num_waiting: most requests that wait; None: no limit of its own.
        max_tokens_per_minute: prompt and output tokens per minute; None: no limit.
    """

    weight: float = 1.0
    max_num_running: int | None = None
    max_num_waiting: int | None = None
    max_tokens_per_minute: int | None = None


@dataclass(slots=True)
class TokenBucket:
    """Tokens that a tenant may still use: filled up at a steady rate to one minute's worth.

    Output tokens are taken as they come, so the level may fall below zero: later requests pay for it.

    Args:
        per_minute: capacity, and what flows in per minute.
        level: tokens that are there; may be negative.
        updated_s: when `level` was right, on the caller's clock.
    """

    per_minute: int
    level: float
    updated_s: float

    def wait_s(self, num_tokens: int, now_s: float) -> float:
        """Seconds until `num_tokens` may be taken; 0: now. More than a full bucket may be taken from a full one."""
        self._fill(now_s)
        missing = min(num_tokens, self.per_minute) - self.level
        return max(0.0, missing) * _MINUTE_S / self.per_minute

    def take(self, num_tokens: int) -> None:
        """Use tokens (negative: give them back)."""
        self.level -= num_tokens

    def _fill(self, now_s: float) -> None:
        """Bring the level up to date; a lower capacity cuts it."""
        passed_s = max(0.0, now_s - self.updated_s)
        self.level = min(float(self.per_minute), self.level + passed_s * self.per_minute / _MINUTE_S)
        self.updated_s = max(self.updated_s, now_s)


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant and what it has now.

    Args:
        counter: virtual tokens served.
        num_running, num_waiting: requests.
        num_waiting_tokens: of the requests that wait.
        num_held_blocks: block table entries of its running requests; a shared block counts in each table.
        num_served_tokens: tokens charged so far, not weighted.
        bucket: None: no limit of tokens per minute.
    """

    name: str
    policy: TenantPolicy = field(default_factory=TenantPolicy)
    counter: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_held_blocks: int = 0
    num_served_tokens: int = 0
    bucket: TokenBucket | None = None

    @property
    def is_alive(self) -> bool:
        """It has requests."""
        return self.num_running + self.num_waiting > 0

    @property
    def is_at_limit(self) -> bool:
        """It may run no more requests at once."""
        return self.is_at_limit_with(0)

    def is_at_limit_with(self, num_more: int) -> bool:
        """It may run no more requests at once when so many more run."""
        limit = self.policy.max_num_running
        return limit is not None and self.num_running + num_more >= limit


class Tenants:
    """All tenants seen; idle ones that nobody defined are forgotten when they become too many."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tenant] = {}
        self._defined: set[str] = set()
        self._alive: dict[Tenant, None] = {}
        self._total_weight = 0.0
        self._virtual_time = 0.0
        self._left_last: Tenant | None = None

    def define(self, name: str, policy: TenantPolicy) -> None:
        """Set what a tenant may have, from now on."""
        tenant = self.get(name)
        self._defined.add(name)
        if policy.max_tokens_per_minute is None:
            tenant.bucket = None
        elif tenant.bucket is not None:
            tenant.bucket.per_minute = policy.max_tokens_per_minute
        tenant.policy = policy
        self._total_weight = sum(other.policy.weight for other in self._alive)

    def get(self, name: str) -> Tenant:
        """The tenant of this name; a new one has the default policy."""
        tenant = self.by_name.get(name)
        if tenant is None:
            if len(self.by_name) - len(self._defined) >= _MAX_IDLE_TENANTS + len(self._alive):
                self._forget_idle()
            tenant = self.by_name[name] = Tenant(name)
        return tenant

    def bucket_of(self, tenant: Tenant, now_s: float) -> TokenBucket | None:
        """The tenant's token bucket, a full one at first; None: no limit."""
        per_minute = tenant.policy.max_tokens_per_minute
        if tenant.bucket is None and per_minute is not None:
            tenant.bucket = TokenBucket(per_minute, float(per_minute), now_s)
        return tenant.bucket

    @property
    def num_alive(self) -> int:
        """Tenants with requests."""
        return len(self._alive)

    @property
    def alive(self) -> Iterable[Tenant]:
        """Tenants with requests."""
        return self._alive

    def join(self, tenant: Tenant) -> None:
        """A request of the tenant is about to wait for the first time: no credit for the time without one."""
        if tenant.num_waiting:
            return
        counters = [other.counter for other in self._alive if other.num_waiting]
        last = self._left_last.counter if self._left_last is not None else 0.0
        tenant.counter = max(tenant.counter, min(counters, default=last), self._virtual_time)

    def serve(self, tenant: Tenant, num_tokens: int, charge: float) -> None:
        """Tokens were computed for a tenant for the first time, at `charge` virtual tokens each."""
        charged = num_tokens * charge
        tenant.num_served_tokens += num_tokens
        tenant.counter += charged / tenant.policy.weight
        self._virtual_time += charged / (self._total_weight or tenant.policy.weight)

    def note_alive(self, tenant: Tenant) -> None:
        """To be called after a tenant's numbers of requests rose."""
        if tenant not in self._alive:
            self._alive[tenant] = None
            self._total_weight += tenant.policy.weight

    def note_left_queue(self, tenant: Tenant) -> None:
        """To be called after a tenant's number of waiting requests fell."""
        if not tenant.num_waiting:
            self._left_last = tenant

    def note_ended(self, tenant: Tenant) -> None:
        """To be called after a request of the tenant ended."""
        if not tenant.is_alive and tenant in self._alive:
            del self._alive[tenant]
            self._total_weight = sum(other.policy.weight for other in self._alive)

    def share(self, tenant: Tenant, total: int, newcomer: Tenant | None = None) -> float:
        """The tenant's part of `total`, among the tenants with requests and `newcomer`; at least 1."""
        weight = self._total_weight
        if newcomer is not None and newcomer not in self._alive:
            weight += newcomer.policy.weight
        return max(1.0, total * tenant.policy.weight / weight) if weight else float(total)

    def over_share(self, tenant: Tenant, num_rows: int, num_blocks: int) -> float:
        """How many times its share of rows or blocks the tenant holds; 0.0 if it holds no more than that."""
        if len(self._alive) < 2:
            return 0.0
        rows = tenant.num_running / self.share(tenant, num_rows)
        blocks = tenant.num_held_blocks / self.share(tenant, num_blocks)
        ratio = max(rows, blocks)
        return ratio if ratio > 1.0 else 0.0

    def _forget_idle(self) -> None:
        idle = (tenant for tenant in self.by_name.values() if not tenant.is_alive and tenant.name not in self._defined)
        for tenant in list(itertools.islice(idle, _MAX_IDLE_TENANTS // 2)):
            del self.by_name[tenant.name]
