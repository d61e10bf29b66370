"""The pure core under a flood, on a simulated clock: the same figures on every machine and in every run.

The executor runs plans one after the other, each for the time that `Workload.cost` gives it; the scheduler and the
wires take no time. The core is stepped as the stage steps it: after each result and each arrival, plans are made until
`plans_in_flight` are out.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from loadtest.fairness.workload import FLOOD, LIGHT, Observed, Workload
from tokenloom.scheduler.core.plan import ModelOutput, RequestOutput, RowOutput, SchedulerOutput
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.scheduler import Scheduler, SchedulerConfig, SchedulingPolicy


@dataclass(order=True)
class _Event:
    """A light request arrives (`plan` is None), or a plan has been run."""

    time_s: float
    number: int
    plan: SchedulerOutput | None = field(compare=False, default=None)


class Simulation:
    """One run.

    Args:
        has_flood: False leaves the light tenant alone.
    """

    def __init__(self, workload: Workload, policy: SchedulingPolicy, *, has_flood: bool) -> None:
        self._workload = workload
        self._has_flood = has_flood
        config = SchedulerConfig(
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.max_num_batched_tokens,
            max_num_waiting=10 * workload.flood_burst + 1000,
            policy=policy,
        )
        self._core = Scheduler(config, workload.num_blocks + 1)
        self._numbers = itertools.count()
        self._events: list[_Event] = []
        self._executor_free_s = 0.0
        self._num_flood = 0
        self._submitted_s: dict[str, float] = {}
        self._observed = Observed(duration_s=workload.duration_s)

    def run(self) -> Observed:
        """Simulate `duration_s` seconds."""
        for time_s in self._workload.light_times_s():
            heapq.heappush(self._events, _Event(time_s, next(self._numbers)))
        if self._has_flood:
            for _ in range(self._workload.flood_burst):
                self._submit(FLOOD, 0.0)
        self._make_plans(0.0)
        while self._events and self._events[0].time_s < self._workload.duration_s:
            self._step(heapq.heappop(self._events))
        waited = [self._workload.duration_s - time_s for time_s in self._submitted_s.values()]
        self._observed.light_ttft_s += waited
        self._observed.num_light_unserved = len(waited)
        self._observed.num_preemptions = self._core.stats.num_preemptions
        return self._observed

    def _step(self, event: _Event) -> None:
        if event.plan is None:
            self._submit(LIGHT, event.time_s)
        else:
            for told in self._core.update(_result_of(event.plan)):
                self._take(told, event.time_s)
        self._make_plans(event.time_s)

    def _submit(self, tenant: str, now_s: float) -> None:
        number, workload = next(self._numbers), self._workload
        request = Request(
            f"{tenant}-{number}",
            workload.prompt(tenant, number),
            workload.output_tokens(tenant),
            tenant=tenant,
            submitted_s=now_s,
        )
        self._core.add_request(request, now_s)
        if tenant == LIGHT:
            self._submitted_s[request.request_id] = now_s
        else:
            self._num_flood += 1

    def _take(self, told: RequestOutput, now_s: float) -> None:
        request = told.request
        self._observed.num_tokens += len(told.token_ids)
        if told.token_ids and told.first_token_index == 0:
            self._observed.num_tokens += request.num_prompt_tokens
            if request.tenant == LIGHT:
                self._observed.light_ttft_s.append(now_s - self._submitted_s.pop(request.request_id))
        if told.finish_reason is not None and request.tenant == FLOOD:
            self._num_flood -= 1
            while self._num_flood < self._workload.flood_outstanding:
                self._submit(FLOOD, now_s)

    def _make_plans(self, now_s: float) -> None:
        core = self._core
        while len(core.plans_in_flight) < self._workload.plans_in_flight:
            plan = core.schedule(now_s) or core.release_rows()
            if plan is None:
                return
            took_s = self._workload.cost.seconds(len(plan.rows), plan.num_scheduled_tokens) if plan.rows else 0.0
            if plan.rows:
                self._observed.step_s.append(took_s)
            self._executor_free_s = max(now_s, self._executor_free_s) + took_s
            heapq.heappush(self._events, _Event(self._executor_free_s, next(self._numbers), plan))


def _result_of(plan: SchedulerOutput) -> ModelOutput:
    return ModelOutput(plan.step_id, {row.row_id: RowOutput([7]) for row in plan.rows if row.samples})


def simulate(workload: Workload) -> dict[str, Observed]:
    """The three runs: `solo`, `fair`, `fcfs`."""
    return {
        "solo": Simulation(workload, SchedulingPolicy.FAIR, has_flood=False).run(),
        "fair": Simulation(workload, SchedulingPolicy.FAIR, has_flood=True).run(),
        "fcfs": Simulation(workload, SchedulingPolicy.FCFS, has_flood=True).run(),
    }
