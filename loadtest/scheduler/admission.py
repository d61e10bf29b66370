"""Admission under overload, and short requests behind a long prompt, through the scheduler stage over gRPC.

overload    requests come at ten times the rate that the engine can serve (open loop); timed is how long a refusal
            takes, from the driver's submit to the answer in its session
long        a prompt of 8,192 tokens is being computed in chunks of the token budget; a short request (128 tokens) comes
            at a random moment. Its time to first token, less that of the same request alone, in units of one chunk's
            step: 2 is the promise
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass

import uvloop

from loadtest.bench.session import Call, Session, Work
from loadtest.bench.stack import StackSettings, running_stack
from loadtest.bench.steps import MODELLED_COST, StepCost
from loadtest.bench.table import to_table
from loadtest.report import percentile
from loadtest.scheduler.cost import make_prompt

_TICK_S = 0.005


@dataclass(frozen=True)
class AdmissionSettings:
    """How to measure.

    Args:
        overload: offered over what can be served.
        num_short: short requests behind long prompts, and as many alone.
    """

    overload_s: float = 8.0
    overload: float = 10.0
    max_num_seqs: int = 16
    max_num_waiting: int = 64
    prompt_tokens: int = 64
    output_tokens: int = 32
    step_ms: float = 5.0
    num_short: int = 40
    short_tokens: int = 128
    long_tokens: int = 8192
    max_num_batched_tokens: int = 512
    cost: StepCost = MODELLED_COST

    @property
    def capacity_per_s(self) -> float:
        """Requests that the engine serves per second at most: a step gives each running one a token."""
        return self.max_num_seqs / (self.output_tokens * self.step_ms / 1000)


def measure_admission(settings: AdmissionSettings) -> dict[str, object]:
    """Figures of both parts; the head of the package says what the keys mean."""
    return {"overload": uvloop.run(_overload(settings)), "long_prompt": uvloop.run(_behind_long(settings))}


async def _overload(settings: AdmissionSettings) -> dict[str, object]:
    flags = ["--max-num-seqs", str(settings.max_num_seqs), "--max-num-waiting", str(settings.max_num_waiting)]
    async with (
        running_stack(StackSettings(StepCost(settings.step_ms), flags)) as stack,
        Session.open(stack.scheduler) as session,
    ):
        calls = await _offer(session, settings)
        took_s = settings.overload_s
        num_served = sum(call.ended_s is not None and not call.refusal for call in calls)
        await session.cancel_all()
    refused = [call.ended_s - call.submitted_s for call in calls if call.refusal and call.ended_s is not None]
    began = [call.ttft_s for call in calls if call.first_token_s is not None]
    return {
        "capacity_per_s": settings.capacity_per_s,
        "offered_per_s": len(calls) / took_s,
        "served_per_s": num_served / took_s,
        "num_refused": len(refused),
        "refusal_ms_p50": 1e3 * percentile(refused, 50) if refused else None,
        "refusal_ms_p99": 1e3 * percentile(refused, 99) if refused else None,
        "ttft_ms_p50": 1e3 * percentile(began, 50) if began else None,
    }


async def _offer(session: Session, settings: AdmissionSettings) -> list[Call]:
    """Submit at a fixed rate, a few at each tick, without waiting for anything."""
    calls: list[Call] = []
    rate = settings.overload * settings.capacity_per_s
    started_s = time.monotonic()
    while (passed_s := time.monotonic() - started_s) < settings.overload_s:
        while len(calls) < rate * passed_s:
            prompt = make_prompt(len(calls), settings.prompt_tokens)
            calls.append(session.submit(Work(prompt, settings.output_tokens)))
        await asyncio.sleep(_TICK_S)
    return calls


async def _behind_long(settings: AdmissionSettings) -> dict[str, object]:
    flags = ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    numbers, chance = itertools.count(), random.Random(0)
    chunk_s = settings.cost.seconds(1, settings.max_num_batched_tokens)
    num_chunks = settings.long_tokens // settings.max_num_batched_tokens
    alone: list[float] = []
    behind: list[float] = []
    async with (
        running_stack(StackSettings(settings.cost, flags)) as stack,
        Session.open(stack.scheduler) as session,
    ):

        async def short() -> float:
            call = session.submit(Work(make_prompt(next(numbers), settings.short_tokens), 1, name="short"))
            await session.wait_for([call])
            return call.ttft_s

        for _ in range(5):
            await short()  # the first requests of a process pay for what it imports and allocates
        for _ in range(settings.num_short):
            alone.append(await short())
        for _ in range(settings.num_short):
            long = session.submit(Work(make_prompt(next(numbers), settings.long_tokens), 1, name="long"))
            await asyncio.sleep(chunk_s * chance.uniform(1, num_chunks / 2))
            behind.append(await short())
            assert long.ended_s is None, "the long prompt ended before the short request began"
            await session.wait_for([long])
    extra = [ttft_s - percentile(alone, 50) for ttft_s in behind]
    return {
        "chunk_ms": 1e3 * chunk_s,
        "ttft_alone_ms_p50": 1e3 * percentile(alone, 50),
        "ttft_behind_ms_p50": 1e3 * percentile(behind, 50),
        "ttft_behind_ms_max": 1e3 * max(behind),
        "extra_chunks_p50": percentile(extra, 50) / chunk_s,
        "extra_chunks_p95": percentile(extra, 95) / chunk_s,
        "extra_chunks_max": max(extra) / chunk_s,
    }


def admission_tables(figures: dict[str, object]) -> str:
    """The figures for people."""
    return "\n\n".join(_table(title, figures[part], columns) for part, title, columns in _TABLES)


def _table(title: str, figures: object, columns: dict[str, str]) -> str:
    assert isinstance(figures, dict)
    return to_table([title, *columns.values()], [["", *(figures[name] for name in columns)]])


_TABLES = (
    (
        "overload",
        "overload",
        {
            "offered_per_s": "offered /s",
            "served_per_s": "served /s",
            "num_refused": "refused",
            "refusal_ms_p50": "refusal ms p50",
            "refusal_ms_p99": "p99",
            "ttft_ms_p50": "first token ms p50",
        },
    ),
    (
        "long_prompt",
        "128 tokens behind 8,192",
        {
            "chunk_ms": "chunk ms",
            "ttft_alone_ms_p50": "alone ms p50",
            "ttft_behind_ms_p50": "behind ms p50",
            "ttft_behind_ms_max": "max",
            "extra_chunks_p50": "extra chunks p50",
            "extra_chunks_p95": "p95",
            "extra_chunks_max": "max",
        },
    ),
)
