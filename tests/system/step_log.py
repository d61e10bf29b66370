"""What an engine planned, read from its WatchSteps by a plain client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from tests.system.in_process import Stages
from tokenloom.api.v1 import engine_pb2

_LIMIT_S = 30.0


@dataclass(frozen=True)
class Row:
    """One request's part in a plan: the tokens from `start` to `end` of its sequence."""

    step_id: int
    request_id: str
    start: int
    end: int


class StepLog:
    """Every plan since the log was opened."""

    def __init__(self) -> None:
        self.steps: list[engine_pb2.WatchStepsResponse] = []
        self._news = asyncio.Event()

    @property
    def last_step_id(self) -> int:
        """Of the newest plan seen; -1 before the first."""
        return self.steps[-1].step_id if self.steps else -1

    @property
    def rows(self) -> list[Row]:
        """Rows of all plans, in order."""
        return [
            Row(step.step_id, request_id, start, start + count)
            for step in self.steps
            for request_id, start, count in zip(
                step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
            )
        ]

    def rows_of(self, request_id: str) -> list[Row]:
        """Rows of a call's choices; the engine names them by the call's id and `:` and their number."""
        return [row for row in self.rows if row.request_id.rpartition(":")[0].endswith(request_id)]

    async def catch_up(self, stages: Stages, headers: Mapping[str, str] | None = None) -> None:
        """Return when every plan made before has been seen: a request of one token marks the place."""
        marker = await stages.complete(headers, prompt=[3], max_tokens=1)
        async with asyncio.timeout(_LIMIT_S):
            while not self.rows_of(marker["id"]):
                await self.next_step()

    async def next_step(self) -> None:
        """Wait for a plan. Raises: TimeoutError."""
        self._news.clear()
        async with asyncio.timeout(_LIMIT_S):
            await self._news.wait()

    async def read(self, call: Any) -> None:
        """Take plans in until the call is cancelled. Raises: AssertionError if one was missed."""
        async for step in call:
            assert step.num_dropped == 0, "the log missed a plan"
            self.steps.append(step)
            self._news.set()


@asynccontextmanager
async def watch_steps(stages: Stages) -> AsyncIterator[StepLog]:
    """A log of the plans made from now on."""
    log = StepLog()
    call = stages.engine.WatchSteps(engine_pb2.WatchStepsRequest())
    await call.initial_metadata()
    reader = asyncio.create_task(log.read(call))
    try:
        yield log
        assert not reader.done(), "the log was cut"
    finally:
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await reader


def num_computed(rows: Iterable[Row], end: int) -> int:
    """How often tokens before position `end` were computed, all rows together."""
    return sum(max(0, min(row.end, end) - row.start) for row in rows)
