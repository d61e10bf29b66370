"""What the core knows between steps."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from operator import attrgetter

from tokenloom.scheduler.core.ageing import Ageing
from tokenloom.scheduler.core.config import SchedulerConfig, SchedulerStats
from tokenloom.scheduler.core.kv_cache import KVCache
from tokenloom.scheduler.core.plan import Preemption
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.suspects import Suspects
from tokenloom.scheduler.core.tenants import Tenants
from tokenloom.scheduler.core.waiting_queue import WaitingQueue

BY_AGE = attrgetter("current_class", "arrival")


@dataclass(slots=True, eq=False)
class CoreState:
    """Requests, blocks and tenants.

    Args:
        running: sorted by `BY_AGE`.
        requests: all that are alive, by id.
        released_row_ids: rows that ended and that the executor was not told of yet.
        preempted: preemptions since the last plan that was sent.
    """

    config: SchedulerConfig
    kv: KVCache
    waiting: WaitingQueue
    ageing: Ageing
    tenants: Tenants = field(default_factory=Tenants)
    suspects: Suspects = field(default_factory=Suspects)
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    running: list[Request] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    released_row_ids: list[int] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    next_row_id: int = 1

    def take_row_id(self) -> int:
        """A row id that was never used."""
        self.next_row_id += 1
        return self.next_row_id - 1

    def leave_running(self, request: Request) -> None:
        """A request stops running: releases its row and blocks."""
        assert request.row_id is not None
        index = bisect.bisect_left(self.running, BY_AGE(request), key=BY_AGE)
        assert self.running[index] is request
        del self.running[index]
        self.released_row_ids.append(request.row_id)
        request.row_id = None
        request.num_computed_tokens = request.num_confirmed_tokens = 0
        request.account.num_running -= 1
        request.account.num_held_blocks -= len(request.block_ids)
        self.kv.close_table(request)
