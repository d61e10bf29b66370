"""A tokenizer's place, taken by the driver: one session to the scheduler over gRPC, in which it counts and times.

    async with Session.open(address) as session:
        call = session.submit(Work(prompt_token_ids, max_tokens=64))
        await session.wait_for([call])

`on_end` makes a closed loop of it: it is told of each call that ended or was refused, and may submit again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tokenloom.api.v1 import common_pb2, engine_pb2, engine_pb2_grpc
from tokenloom.common.channel import make_channel

READY_LIMIT_S = 30.0
WAIT_LIMIT_S = 60.0
_RETRY_S = 0.05


@dataclass(frozen=True)
class Work:
    """What to submit.

    Args:
        stop_token_id: ends it in the engine; None: only `max_tokens` does.
        finish_at: tokens after which the driver says Finish, as a tokenizer does that found a stop string.
    """

    prompt_token_ids: list[int]
    max_tokens: int
    tenant: str = ""
    name: str = ""
    stop_token_id: int | None = None
    finish_at: int | None = None


@dataclass(slots=True, eq=False)
class Call:
    """A request and what became of it; times are seconds on CLOCK_MONOTONIC.

    Args:
        num_tokens: that it was told, those that Finish does not keep included.
        num_after_end: tokens told after Finished; must stay 0.
        finish_said_s: when the driver said Finish.
        refusal: why it was not taken; empty if it was.
    """

    work: Work
    request_id: str
    submitted_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_said_s: float | None = None
    ended_s: float | None = None
    num_tokens: int = 0
    num_after_end: int = 0
    refusal: str = ""

    @property
    def ttft_s(self) -> float:
        """From submitting to the first token."""
        assert self.first_token_s is not None
        return self.first_token_s - self.submitted_s


class SessionLost(Exception):
    """The scheduler ended the session."""


class Session:
    """See the head of this file. Calls of a session are kept until it is closed."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._handles = itertools.count(1)
        self._alive: dict[int, Call] = {}
        self._ended: dict[int, Call] = {}
        self._submits: list[engine_pb2.Submit] = []
        self._finishes: list[engine_pb2.Finish] = []
        self._cancels: list[engine_pb2.Cancel] = []
        self._has_outgoing = asyncio.Event()
        self._has_news = asyncio.Event()
        self.on_end: Callable[[Call], object] = lambda call: None
        self.num_tokens = 0
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    @classmethod
    @asynccontextmanager
    async def open(cls, address: str, tenants: Iterable[engine_pb2.TenantPolicy] = ()) -> AsyncIterator[Session]:
        """Connect as soon as the engine is ready; gives up after READY_LIMIT_S. Raises: SessionLost."""
        channel: Any = make_channel(address)
        stub: Any = engine_pb2_grpc.EngineServiceStub(channel)
        hello = engine_pb2.EngineServiceSessionRequest(
            hello=engine_pb2.Hello(schema_revision=1, client_id="loadtest"), tenants=list(tenants)
        )
        try:
            session = cls(await _greeted(stub, hello))
            try:
                yield session
            finally:
                await session._close()
        finally:
            await channel.close()

    def submit(self, work: Work) -> Call:
        """Send a request with the next frame."""
        handle = next(self._handles)
        call = Call(work, f"{work.name or 'request'}-{handle}", time.monotonic())
        self._alive[handle] = call
        stop = common_pb2.StopConditions(max_tokens=work.max_tokens, ignore_eos=True)
        if work.stop_token_id is not None:
            stop.stop_token_ids.append(work.stop_token_id)
        self._submits.append(
            engine_pb2.Submit(
                handle=handle,
                request_id=call.request_id,
                prompt_token_ids=work.prompt_token_ids,
                tenant=work.tenant,
                stop=stop,
            )
        )
        self._has_outgoing.set()
        return call

    async def cancel_all(self) -> None:
        """End every living request; returns when all have ended. Raises: SessionLost."""
        self._cancels += [engine_pb2.Cancel(handle=handle, reason="loadtest") for handle in self._alive]
        self._has_outgoing.set()
        await self.wait_for(list(self._alive.values()))

    async def wait_for(self, calls: Iterable[Call], limit_s: float = WAIT_LIMIT_S) -> None:
        """Return when all of them ended.

        Raises: SessionLost, also if they have not ended after `limit_s` seconds: an engine that runs nothing.
        """
        waiting = [call for call in calls if call.ended_s is None]
        try:
            async with asyncio.timeout(limit_s):
                while waiting:
                    await self._news()
                    waiting = [call for call in waiting if call.ended_s is None]
        except TimeoutError:
            raise SessionLost(f"{len(waiting)} requests have not ended within {limit_s:.0f} s") from None

    async def _news(self) -> None:
        self._has_news.clear()
        self._check()
        await self._has_news.wait()
        self._check()

    def _check(self) -> None:
        for task in self._tasks:
            if task.done():
                raise SessionLost("the scheduler ended the session") from task.exception()

    async def _write(self) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            frame = engine_pb2.EngineServiceSessionRequest(
                submits=self._submits, finishes=self._finishes, cancels=self._cancels
            )
            self._submits, self._finishes, self._cancels = [], [], []
            await self._call.write(frame)

    async def _read(self) -> None:
        try:
            while isinstance(frame := await self._call.read(), engine_pb2.EngineServiceSessionResponse):
                self._take(frame, time.monotonic())
                self._has_news.set()
        finally:
            self._has_news.set()

    def _take(self, frame: engine_pb2.EngineServiceSessionResponse, now_s: float) -> None:
        outputs = frame.outputs
        self.num_tokens += len(outputs.token_ids)
        for handle, count in zip(outputs.handles, outputs.num_tokens, strict=True):
            self._take_tokens(handle, count, now_s)
        for finished in frame.finished:
            self._end(finished.handle, now_s, finished.error.message)
        for rejected in frame.rejected:
            self._end(rejected.handle, now_s, rejected.error.message or "refused")

    def _take_tokens(self, handle: int, count: int, now_s: float) -> None:
        call = self._alive.get(handle)
        if call is None:
            self._ended[handle].num_after_end += count
            return
        if call.first_token_s is None:
            call.first_token_s = now_s
        call.last_token_s = now_s
        call.num_tokens += count
        finish_at = call.work.finish_at
        if finish_at is not None and call.finish_said_s is None and call.num_tokens >= finish_at:
            call.finish_said_s = now_s
            reason = engine_pb2.ENGINE_FINISH_REASON_STOP_STRING
            self._finishes.append(engine_pb2.Finish(handle=handle, num_tokens_kept=finish_at, reason=reason))
            self._has_outgoing.set()

    def _end(self, handle: int, now_s: float, refusal: str) -> None:
        call = self._alive.pop(handle)
        self._ended[handle] = call
        call.ended_s, call.refusal = now_s, refusal
        self.on_end(call)

    async def _close(self) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _greeted(stub: Any, hello: engine_pb2.EngineServiceSessionRequest) -> Any:
    """A session that was welcomed; an engine that is not ready yet is asked again."""
    deadline_s = time.monotonic() + READY_LIMIT_S
    while True:
        call = stub.Session()
        try:
            await call.write(hello)
            first = await call.read()
            if isinstance(first, engine_pb2.EngineServiceSessionResponse):
                return call
        except Exception as error:
            if time.monotonic() > deadline_s:
                raise SessionLost(f"the scheduler did not welcome the session within {READY_LIMIT_S:.0f} s") from error
        await asyncio.sleep(_RETRY_S)
