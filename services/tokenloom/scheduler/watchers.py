"""Readers of the plans (WatchSteps). A reader that falls behind misses plans; the step loop never waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenloom.scheduler.core.plan import PreemptReason, SchedulerOutput
from tokenloom.scheduler.load import LoadState

_QUEUED_STEPS = 256


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A plan as readers see it; columns by row, and by preempted request. See WatchStepsResponse in engine.proto."""

    step_id: int
    made_at_s: float
    max_num_batched_tokens: int
    request_ids: list[str]
    tenants: list[str]
    priority_classes: list[int]
    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]
    samples: list[bool]
    preempted_request_ids: list[str]
    preempt_reasons: list[PreemptReason]
    load: LoadState


def _record_of(plan: SchedulerOutput, max_num_batched_tokens: int, load: LoadState, now_s: float) -> StepRecord:
    requests = [row.request for row in plan.rows]
    return StepRecord(
        step_id=plan.step_id,
        made_at_s=now_s,
        max_num_batched_tokens=max_num_batched_tokens,
        request_ids=[request.request_id for request in requests],
        tenants=[request.tenant for request in requests],
        priority_classes=[request.current_class for request in requests],
        num_scheduled_tokens=[row.num_scheduled_tokens for row in plan.rows],
        num_computed_tokens=[row.num_computed_tokens for row in plan.rows],
        samples=[row.samples for row in plan.rows],
        preempted_request_ids=[preemption.request.request_id for preemption in plan.preempted],
        preempt_reasons=[preemption.reason for preemption in plan.preempted],
        load=load,
    )


class StepWatchers:
    """Fans plans out to bounded queues."""

    def __init__(self) -> None:
        self._queues: dict[asyncio.Queue[StepRecord], int] = {}

    @property
    def has_readers(self) -> bool:
        """Somebody watches."""
        return bool(self._queues)

    def publish(self, plan: SchedulerOutput, max_num_batched_tokens: int, load: LoadState, now_s: float) -> None:
        """Show a plan to all readers.

        Args:
            max_num_batched_tokens: the token budget.
            load: the state behind the plan.
            now_s: when the plan was made, on the engine's clock.
        """
        record = _record_of(plan, max_num_batched_tokens, load, now_s)
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
