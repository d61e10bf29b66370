"""Plans in flight: how long the executor waits between steps, and what is computed in vain.

Three processes: the executor (steps of a fixed time), the scheduler stage as in production, and this driver, whose
session keeps a number of requests running; gRPC over Unix sockets between them. For each depth (plans in flight):

idle    time between the end of one step and the start of the next while a request runs, in percent (warm-up excluded)
waste   rows computed for requests that had ended. A stop token is found by the core: at most depth - 1 rows. A Finish
        comes from the driver, as from a tokenizer that found a stop string: depth - 1 rows and those of the steps that
        ended while the news went to the driver and Finish came back, the step with the last token included
long    the longest wait between two steps, in the measured time, and while prompts of 32,768 tokens arrive: what one of
        them may hold the step loop up beyond the plans that are out already
late    tokens that the driver was told after the end of a request or behind its stop token; must be 0
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from loadtest.bench.executor import output_token
from loadtest.bench.session import Call, Session, Work
from loadtest.bench.stack import Diary, Stack, StackSettings, running_stack
from loadtest.bench.steps import StepCost, idleness, num_steps_ended
from loadtest.bench.table import to_table
from loadtest.report import percentile
from loadtest.scheduler.cost import LONG_PROMPT_TOKENS, make_prompt

_SPARE = 8  # requests that wait, so that a place is taken in the step after it became free


@dataclass(frozen=True)
class OverlapSettings:
    """How to measure.

    Args:
        num_running: requests that run all the time.
        measure_s: seconds measured, after `warmup_s`.
        num_stops: requests that end by a stop token, and as many that end by Finish, behind the measured time.
        num_long: prompts of 32,768 tokens that come every `long_every_s` behind those.
    """

    step_ms: float = 2.0
    num_running: int = 64
    depths: tuple[int, ...] = (1, 2, 3)
    warmup_s: float = 1.5
    measure_s: float = 8.0
    num_stops: int = 48
    num_long: int = 16
    long_every_s: float = 0.1
    prompt_tokens: int = 32
    output_tokens: int = 256
    stop_at: int = 20


@dataclass
class _Run:
    """What the driver saw of one depth."""

    from_s: float = 0.0
    to_s: float = 0.0
    long_from_s: float = 0.0
    long_to_s: float = 0.0
    by_core: list[Call] = field(default_factory=list)
    by_finish: list[Call] = field(default_factory=list)
    trips_s: list[float] = field(default_factory=list)
    num_late_tokens: int = 0


def measure_overlap(settings: OverlapSettings) -> list[dict[str, object]]:
    """Figures by depth; the head of the package says what the keys mean."""
    import uvloop

    return [uvloop.run(_measure(settings, depth)) for depth in settings.depths]


async def _measure(settings: OverlapSettings, depth: int) -> dict[str, object]:
    flags = ["--plans-in-flight", str(depth), "--max-num-seqs", str(settings.num_running)]
    stack_settings = StackSettings(StepCost(settings.step_ms), flags)
    async with running_stack(stack_settings) as stack:
        run = await _drive(settings, stack)
    return _figures(settings, depth, run, stack.diary)


async def _drive(settings: OverlapSettings, stack: Stack) -> _Run:
    run, numbers = _Run(), itertools.count()
    async with Session.open(stack.scheduler) as session:
        calls: list[Call] = []

        def submit(**changes: object) -> Call:
            call = session.submit(_work(settings, next(numbers), **changes))
            calls.append(call)
            return call

        session.on_end = lambda call: submit() if call.work.name == "load" else None
        for _ in range(settings.num_running + _SPARE):
            submit()
        await asyncio.sleep(settings.warmup_s)
        run.from_s = time.monotonic()
        await asyncio.sleep(settings.measure_s)
        run.to_s = time.monotonic()
        for delay_s in _delays(settings):
            run.by_core.append(submit(name="stop", stop_token_id=output_token(settings.stop_at - 1)))
            run.by_finish.append(submit(name="finish", finish_at=settings.stop_at))
            refused = session.submit(Work([], max_tokens=1, name="refused"))
            await asyncio.sleep(delay_s)
            await session.wait_for([refused])
            assert refused.ended_s is not None
            run.trips_s.append(refused.ended_s - refused.submitted_s)
        await session.wait_for([*run.by_core, *run.by_finish])
        await _send_long_prompts(settings, session, run)
        await asyncio.sleep(20 * settings.step_ms / 1000)  # late tokens would come in this time
        run.num_late_tokens = sum(call.num_after_end for call in calls)
        run.num_late_tokens += sum(call.num_tokens - settings.stop_at for call in run.by_core)
    return run


async def _send_long_prompts(settings: OverlapSettings, session: Session, run: _Run) -> None:
    run.long_from_s = time.monotonic()
    calls = []
    for i in range(settings.num_long):
        prompt = make_prompt(45_000 + i, LONG_PROMPT_TOKENS)
        calls.append(session.submit(Work(prompt, max_tokens=1, name="long")))
        await asyncio.sleep(settings.long_every_s)
    await session.wait_for(calls)
    run.long_to_s = time.monotonic()


def _delays(settings: OverlapSettings) -> Iterator[float]:
    """Times between the requests that end early: they shall meet steps at every phase."""
    for i in range(settings.num_stops):
        yield settings.step_ms / 1000 * (4 + (i * 0.37) % 1)


def _work(settings: OverlapSettings, number: int, **changes: object) -> Work:
    """Request `number`: its prompt is like no other; the first ones are shorter, so that ends do not fall together."""
    start = 1000 + number % 40_000
    prompt = [start, *range(2, settings.prompt_tokens + 1)]
    spread = settings.num_running + _SPARE
    max_tokens = settings.output_tokens * (number + 1) // spread if number < spread else settings.output_tokens
    fields: dict[str, object] = {"name": "load", **changes}
    return Work(prompt, max(1, max_tokens), **fields)  # type: ignore[arg-type]


def _figures(settings: OverlapSettings, depth: int, run: _Run, diary: Diary) -> dict[str, object]:
    idle = idleness(diary.steps, run.from_s, run.to_s)
    beside_long = idleness(diary.steps, run.long_from_s, run.long_to_s)
    rows = [s.num_rows for s in diary.steps if run.from_s <= s.start_s and s.end_s <= run.to_s]
    by_core = [diary.num_samples[call.request_id] - settings.stop_at for call in run.by_core]
    by_finish = [diary.num_samples[call.request_id] - settings.stop_at for call in run.by_finish]
    bounds = [_bound(settings, depth, call, diary) for call in run.by_finish]
    return {
        "plans_in_flight": depth,
        "executor_idle_pct": idle.idle_pct,
        "num_steps": idle.num_steps,
        "rows_per_step_mean": sum(rows) / max(1, len(rows)),
        "step_ms_p50": None if idle.step_ms is None else idle.step_ms[0],
        "gap_us_p50": None if idle.gap_us is None else idle.gap_us[0],
        "gap_us_p99": None if idle.gap_us is None else idle.gap_us[1],
        "gap_us_max": None if idle.gap_us is None else idle.gap_us[2],
        "gap_us_max_beside_long_prompts": None if beside_long.gap_us is None else beside_long.gap_us[2],
        "wasted_rows_stop_token_max": max(by_core),
        "wasted_rows_stop_token_bound": depth - 1,
        "wasted_rows_finish_mean": sum(by_finish) / len(by_finish),
        "wasted_rows_finish_max": max(by_finish),
        "wasted_rows_finish_over_bound": sum(w > b for w, b in zip(by_finish, bounds, strict=True)),
        "session_round_trip_steps_mean": sum(bounds) / len(bounds) - (depth - 1),
        "session_round_trip_ms_p50": 1e3 * percentile(run.trips_s, 50),
        "session_round_trip_ms_p99": 1e3 * percentile(run.trips_s, 99),
        "tokens_after_end": run.num_late_tokens,
    }


def _bound(settings: OverlapSettings, depth: int, call: Call, diary: Diary) -> int:
    """Most rows that a Finish may waste: depth - 1, and the steps from the one with its last token to its end."""
    assert call.ended_s is not None
    last_step_id = diary.first_step_ids[call.request_id] + settings.stop_at - 1
    end_s = next(step.end_s for step in diary.steps if step.step_id == last_step_id)
    return depth - 1 + 1 + num_steps_ended(diary.steps, end_s, call.ended_s)


def overlap_table(figures: list[dict[str, object]]) -> str:
    """The figures for people."""
    columns = {
        "plans_in_flight": "plans in flight",
        "executor_idle_pct": "idle %",
        "step_ms_p50": "step ms",
        "rows_per_step_mean": "rows",
        "gap_us_p50": "gap us p50",
        "gap_us_p99": "p99",
        "gap_us_max": "max",
        "gap_us_max_beside_long_prompts": "max, 32k prompts",
        "wasted_rows_stop_token_max": "waste: stop token, max",
        "wasted_rows_finish_mean": "Finish, mean",
        "wasted_rows_finish_max": "max",
        "session_round_trip_steps_mean": "trip in steps",
        "session_round_trip_ms_p50": "trip ms p50",
        "tokens_after_end": "late tokens",
    }
    return to_table(list(columns.values()), [[row[name] for name in columns] for row in figures])
