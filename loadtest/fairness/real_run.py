"""The scheduler stage under a flood, in real time: processes of their own, gRPC between them.

The executor computes nothing, but its steps take the time that `Workload.cost` gives them; driver, session and
scheduler are real, so all that they cost is in the figures.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import uvloop

from loadtest.bench.session import Call, Session, Work
from loadtest.bench.stack import StackSettings, running_stack
from loadtest.fairness.workload import FLOOD, LIGHT, Observed, Workload


def run_for_real(workload: Workload, solo_s: float) -> dict[str, Observed]:
    """The three runs: `solo` (for `solo_s` seconds), `fair`, `fcfs`."""
    return {
        "solo": uvloop.run(_run(workload, "fair", solo_s, has_flood=False)),
        "fair": uvloop.run(_run(workload, "fair", workload.duration_s, has_flood=True)),
        "fcfs": uvloop.run(_run(workload, "fcfs", workload.duration_s, has_flood=True)),
    }


async def _run(workload: Workload, policy: str, duration_s: float, *, has_flood: bool) -> Observed:
    flags = [
        *("--scheduling-policy", policy, "--max-num-seqs", str(workload.max_num_seqs)),
        *("--max-num-batched-tokens", str(workload.max_num_batched_tokens)),
        *("--plans-in-flight", str(workload.plans_in_flight), "--max-num-waiting", str(10 * workload.flood_burst)),
    ]
    settings = StackSettings(workload.cost, flags, num_blocks=workload.num_blocks)
    async with running_stack(settings) as stack, Session.open(stack.scheduler) as session:
        await _warm_up(session, workload)
        driver = _Driver(session, workload)
        from_s = time.monotonic()
        await driver.run(duration_s, has_flood=has_flood)
        to_s = time.monotonic()
    observed = driver.observed(to_s)
    observed.duration_s = to_s - from_s
    observed.step_s = [s.end_s - s.start_s for s in stack.diary.steps if s.start_s >= from_s and s.end_s <= to_s]
    observed.num_preemptions = sum(count - 1 for count in stack.diary.num_rows.values())
    return observed


async def _warm_up(session: Session, workload: Workload) -> None:
    """The first requests of a process pay for what it imports and allocates."""
    calls = [session.submit(Work(workload.prompt(LIGHT, 39_000 + i), 8, LIGHT)) for i in range(8)]
    await session.wait_for(calls)


class _Driver:
    """Sends what the workload says, until its time is over."""

    def __init__(self, session: Session, workload: Workload) -> None:
        self._session = session
        self._workload = workload
        self._numbers = itertools.count()
        self._calls: list[Call] = []
        self._num_flood = 0
        self._is_over = False

    async def run(self, duration_s: float, *, has_flood: bool) -> None:
        """Send for so many seconds."""
        self._session.on_end = self._on_end
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        if has_flood:
            for _ in range(self._workload.flood_burst):
                self._submit(FLOOD)
        for time_s in self._workload.light_times_s():
            if time_s >= duration_s:
                break
            await asyncio.sleep(max(0.0, started_s + time_s - loop.time()))
            self._submit(LIGHT)
        await asyncio.sleep(max(0.0, started_s + duration_s - loop.time()))
        self._is_over = True

    def observed(self, end_s: float) -> Observed:
        """What the calls saw."""
        result = Observed()
        for call in self._calls:
            has_begun = call.first_token_s is not None
            result.num_tokens += call.num_tokens + (len(call.work.prompt_token_ids) if has_begun else 0)
            if call.work.tenant == LIGHT:
                result.light_ttft_s.append(call.ttft_s if has_begun else end_s - call.submitted_s)
                result.num_light_unserved += not has_begun
        return result

    def _submit(self, tenant: str) -> None:
        workload = self._workload
        prompt = workload.prompt(tenant, next(self._numbers))
        self._calls.append(self._session.submit(Work(prompt, workload.output_tokens(tenant), tenant, name=tenant)))
        self._num_flood += tenant == FLOOD

    def _on_end(self, call: Call) -> None:
        if call.work.tenant != FLOOD or self._is_over:
            return
        self._num_flood -= 1
        while self._num_flood < self._workload.flood_outstanding:
            self._submit(FLOOD)
