"""What it costs that the stages are programs of their own: time per step and per token, hop by hop.

    local     core, step loop and executor in one process: plans and results are handed over as objects through the same
              interfaces (PlanSink, ExecutorEvents), and the session's frames are taken from its outbox
    execute   the same, but the executor is a process of its own behind the Execute stream
    session   the same, but the reader, too, is a process of its own behind the Session stream: as in production

The executor's steps take 0 ms and nothing is computed in any of them, so all that is seen is our own work and the hops
(messages, gRPC, Unix sockets, wake-ups). Every request decodes in every step. With one plan in flight a step is the
whole way round and nothing overlaps; with two, the usual number, executor and scheduler work at the same time, as far
as there are cores for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvloop
from opentelemetry.trace import INVALID_SPAN

from loadtest.bench.session import Session, Work
from loadtest.bench.stack import StackSettings, running_executor, running_stack
from loadtest.bench.steps import StepCost
from loadtest.bench.table import to_table
from loadtest.bench.waiting import until
from loadtest.report import percentile
from loadtest.scheduler.cost import BENCH_CAPABILITIES, make_prompt, result_of
from tokenloom.api.v1 import common_pb2
from tokenloom.common.config import ProcessSettings
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.convert import RowPayload
from tokenloom.scheduler.core.plan import SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request
from tokenloom.scheduler.engine import Engine
from tokenloom.scheduler.executor_client import ExecutorClient, StallLimits
from tokenloom.scheduler.sessions import Stream, TokenizerSession

ARRANGEMENTS = ("local", "execute", "session")
_PROMPT_TOKENS = 16
_MAX_OUTPUT_TOKENS = 1 << 16
_LIMIT_S = 30.0


@dataclass(frozen=True)
class SplitSettings:
    """How to measure.

    Args:
        num_slices: a figure is the median of so many slices of `slice_s` seconds, so that a busy moment does no harm.
    """

    sizes: tuple[int, ...] = (1, 16, 64, 256)
    depths: tuple[int, ...] = (1, 2)
    warmup_s: float = 0.3
    slice_s: float = 0.2
    num_slices: int = 7


@dataclass(frozen=True)
class _Driver:
    """One arrangement, running.

    Args:
        start: begins to generate for so many requests.
        stop: ends them all and returns when they have ended.
        count_tokens: tokens that the reader got.
        cpu_s: CPU time of the scheduler's process.
    """

    start: Callable[[int], None]
    stop: Callable[[], Awaitable[None]]
    count_tokens: Callable[[], int]
    cpu_s: Callable[[], float]


def measure_split(settings: SplitSettings) -> list[dict[str, object]]:
    """Figures by arrangement, number of rows and depth; the head of the package says what the keys mean."""
    figures: list[dict[str, object]] = []
    for arrangement, depth in itertools.product(ARRANGEMENTS, settings.depths):
        figures += uvloop.run(_measure(settings, arrangement, depth))
    return figures


async def _measure(settings: SplitSettings, arrangement: str, depth: int) -> list[dict[str, object]]:
    figures = []
    async with _DRIVERS[arrangement](max(settings.sizes), depth) as driver:
        gc.collect()
        gc.freeze()
        for num_rows in settings.sizes:
            driver.start(num_rows)
            await until(lambda: driver.count_tokens() > 0, _LIMIT_S)
            await asyncio.sleep(settings.warmup_s)
            slices = [await _slice(driver, settings.slice_s) for _ in range(settings.num_slices)]
            async with asyncio.timeout(_LIMIT_S):
                await driver.stop()
            us_per_token = 1e6 * percentile([took_s for took_s, _ in slices], 50)
            figures.append(
                {
                    "arrangement": arrangement,
                    "num_rows": num_rows,
                    "plans_in_flight": depth,
                    "us_per_step": us_per_token * num_rows,
                    "us_per_token": us_per_token,
                    "scheduler_cpu_us_per_step": 1e6 * num_rows * percentile([cpu_s for _, cpu_s in slices], 50),
                }
            )
        gc.unfreeze()
    return figures


async def _slice(driver: _Driver, duration_s: float) -> tuple[float, float]:
    """Seconds, and CPU seconds of the scheduler, per token."""
    tokens, cpu_s, started_s = driver.count_tokens(), driver.cpu_s(), time.perf_counter()
    await asyncio.sleep(duration_s)
    num_tokens = max(1, driver.count_tokens() - tokens)
    return (time.perf_counter() - started_s) / num_tokens, (driver.cpu_s() - cpu_s) / num_tokens


# --- reader in this process -------------------------------------------------------------------------------------


class LocalExecutor:
    """A PlanSink whose steps take no time and whose results come in the next turn of the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine: Engine | None = None

    def send(self, plan: SchedulerOutput, trace_context: Any = None) -> None:
        """Answer a plan soon."""
        self._loop.call_soon(self._run, plan)

    def leave(self) -> None:
        """Nothing to do."""

    def _run(self, plan: SchedulerOutput) -> None:
        assert self.engine is not None
        self.engine.on_result(result_of(plan))


class LocalReader:
    """A session in the engine's own process: requests go in as objects, frames come out as objects."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._session = TokenizerSession("loadtest")
        self._handles = itertools.count(1)
        self._alive: set[int] = set()
        self.num_tokens = 0

    async def read(self) -> None:
        """Count what comes, until the session is closed."""
        self._engine.open_session(self._session)
        while (frame := await self._session.outbox.take()) is not None:
            self.num_tokens += len(frame.tokens.token_ids)
            for finished in frame.finished:
                self._alive.discard(finished.handle)

    def start(self, num_requests: int) -> None:
        """Begin to generate."""
        self.num_tokens = 0
        for _ in range(num_requests):
            handle = next(self._handles)
            request = Request(
                f"local-{handle}",
                make_prompt(handle, _PROMPT_TOKENS),
                _MAX_OUTPUT_TOKENS,
                payload=RowPayload(common_pb2.SamplingParams(), common_pb2.StopConditions(ignore_eos=True)),
            )
            taken_s = asyncio.get_running_loop().time()
            stream = Stream(request, self._session, handle, group_id="", span=INVALID_SPAN, taken_s=taken_s)
            self._engine.submit(self._session, stream, is_resubmission=False)
            self._alive.add(handle)

    async def stop(self) -> None:
        """End all requests."""
        for handle in list(self._alive):
            self._engine.finish(self._session, handle, FinishReason.ABORTED)
        await until(lambda: not self._alive, _LIMIT_S)

    def close(self) -> None:
        """End the session."""
        self._engine.lose_session(self._session)


def _settings(max_num_rows: int, depth: int, executor: str = "") -> SchedulerSettings:
    return SchedulerSettings(
        ProcessSettings(),
        executor=executor,
        max_num_seqs=max_num_rows,
        max_num_batched_tokens=8192,
        plans_in_flight=depth,
    )


@asynccontextmanager
async def _local(max_num_rows: int, depth: int) -> AsyncIterator[_Driver]:
    executor = LocalExecutor()
    engine = executor.engine = Engine(_settings(max_num_rows, depth), executor)
    engine.on_executor_ready(BENCH_CAPABILITIES)
    async with _reader_of(engine) as driver:
        yield driver


@asynccontextmanager
async def _execute(max_num_rows: int, depth: int) -> AsyncIterator[_Driver]:
    async with running_executor(StackSettings(StepCost(0.0))) as address:
        settings = _settings(max_num_rows, depth, executor=address)
        client = ExecutorClient(address, "", lambda can: can.num_blocks(settings), StallLimits.of(settings))
        engine = Engine(settings, client)
        task = asyncio.create_task(client.run(engine))
        try:
            await until(lambda: engine.is_ready, _LIMIT_S)
            async with _reader_of(engine) as driver:
                yield driver
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def _reader_of(engine: Engine) -> AsyncIterator[_Driver]:
    reader = LocalReader(engine)
    task = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    try:
        yield _Driver(reader.start, reader.stop, lambda: reader.num_tokens, time.process_time)
    finally:
        reader.close()
        engine.stop()
        await task


# --- reader behind a session ------------------------------------------------------------------------------------


@asynccontextmanager
async def _session(max_num_rows: int, depth: int) -> AsyncIterator[_Driver]:
    flags = ["--plans-in-flight", str(depth), "--max-num-seqs", str(max_num_rows), "--max-num-batched-tokens", "8192"]
    numbers = itertools.count(1)
    async with (
        running_stack(StackSettings(StepCost(0.0), flags)) as stack,
        Session.open(stack.scheduler) as session,
    ):

        def start(num_requests: int) -> None:
            session.num_tokens = 0
            for _ in range(num_requests):
                session.submit(Work(make_prompt(next(numbers), _PROMPT_TOKENS), _MAX_OUTPUT_TOKENS))

        yield _Driver(start, session.cancel_all, lambda: session.num_tokens, stack.scheduler_cpu_s)


_DRIVERS = {"local": _local, "execute": _execute, "session": _session}

# --- table ------------------------------------------------------------------------------------------------------


def split_table(figures: list[dict[str, object]]) -> str:
    """The figures for people: a line per number of rows and arrangement, and what each hop adds."""
    by_key = {(row["num_rows"], row["plans_in_flight"], row["arrangement"]): row for row in figures}
    sizes = sorted({int(str(row["num_rows"])) for row in figures})
    depths = sorted({int(str(row["plans_in_flight"])) for row in figures})
    header = ["rows, arrangement", "scheduler CPU us/step"]
    for depth in depths:
        header += [f"{depth} in flight: us/step", "us/token", "hop adds"]
    lines: list[list[object]] = []
    for size, (i, arrangement) in itertools.product(sizes, enumerate(ARRANGEMENTS)):
        line: list[object] = [f"{size:>4} {arrangement}"]
        line.append(by_key[size, depths[-1], arrangement]["scheduler_cpu_us_per_step"])
        for depth in depths:
            row = by_key[size, depth, arrangement]
            before = by_key[size, depth, ARRANGEMENTS[i - 1]] if i else None
            line += [row["us_per_step"], row["us_per_token"], difference(row, before)]
        lines.append(line)
    note = (
        "Measured: steps of 0 ms, all rows decode. local: one process, no gRPC; execute: executor behind a gRPC "
        "stream;\nsession: reader behind a second one, as in production. "
        f"CPU with {depths[-1]} in flight; hop adds us/step."
    )
    return f"{to_table(header, lines)}\n{note}"


def difference(row: dict[str, object], before: dict[str, object] | None) -> float | None:
    """What an arrangement's step takes beyond the one before it, in us; None for the first."""
    if before is None:
        return None
    return float(str(row["us_per_step"])) - float(str(before["us_per_step"]))
