"""Readers of the plans (WatchSteps). A reader that falls behind misses plans; the step loop never waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenloom.scheduler.core.plan import SchedulerOutput
from tokenloom.scheduler.core.scheduler import Scheduler

_QUEUED_STEPS = 256


@dataclass(frozen=True, slots=True)
class LoadState:
    """How busy the engine is."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A plan as readers see it; columns by row."""

    step_id: int
    max_num_batched_tokens: int
    request_ids: list[str]
    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]
    preempted_request_ids: list[str]
    load: LoadState


def load_of(core: Scheduler) -> LoadState:
    """The core's state, for people and routers."""
    pool = core.kv.pool
    return LoadState(len(core.running), len(core.waiting), pool.num_free_blocks, pool.num_blocks - 1)


class StepWatchers:
    """Fans plans out to bounded queues."""

    def __init__(self) -> None:
        self._queues: dict[asyncio.Queue[StepRecord], int] = {}

    def publish(self, plan: SchedulerOutput, core: Scheduler) -> None:
        """Show a plan to all readers; costs nothing without any."""
        if not self._queues:
            return
        record = StepRecord(
            step_id=plan.step_id,
            max_num_batched_tokens=core.config.max_num_batched_tokens,
            request_ids=[row.request.request_id for row in plan.rows],
            num_scheduled_tokens=[row.num_scheduled_tokens for row in plan.rows],
            num_computed_tokens=[row.num_computed_tokens for row in plan.rows],
            preempted_request_ids=[request.request_id for request in plan.preempted],
            load=load_of(core),
        )
        for queue in self._queues:
            if queue.full():
                self._queues[queue] += 1
            else:
                queue.put_nowait(record)

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Queue[StepRecord]]:
        """A queue of the plans made from now on."""
        queue: asyncio.Queue[StepRecord] = asyncio.Queue(_QUEUED_STEPS)
        self._queues[queue] = 0
        try:
            yield queue
        finally:
            del self._queues[queue]

    def take_num_dropped(self, queue: asyncio.Queue[StepRecord]) -> int:
        """Plans that did not fit into the queue since the last call."""
        num_dropped, self._queues[queue] = self._queues[queue], 0
        return num_dropped
