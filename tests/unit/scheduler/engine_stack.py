"""The engine in one process: plans are kept, and a result is made for each when the test says so."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from opentelemetry.trace import INVALID_SPAN

from tests.fakes import next_token
from tokenloom.api.v1 import common_pb2, engine_pb2
from tokenloom.common.config import ProcessSettings
from tokenloom.scheduler import convert
from tokenloom.scheduler.capabilities import Capabilities
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.core.plan import ModelOutput, RowOutput, SchedulerOutput
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.scheduler import Scheduler
from tokenloom.scheduler.engine import Engine
from tokenloom.scheduler.frames import FinishedRow, Frame
from tokenloom.scheduler.sessions import Stream, TokenizerSession

LIMIT_S = 20.0
_CAPABILITIES = Capabilities(
    boot_id="boot",
    model_id="fake",
    tokenizer_fingerprint="fake",
    vocab_size=1000,
    max_model_len=512,
    block_size=4,
    max_num_blocks=64,
    max_num_seqs=64,
    max_num_batched_tokens=256,
    max_plans_in_flight=3,
    max_num_logprobs=20,
    batch_invariant=True,
    eos_token_ids=(1,),
    default_sampling=common_pb2.SamplingParams(),
    description="fake",
)


def fake_capabilities(**changes: Any) -> Capabilities:
    return replace(_CAPABILITIES, **changes)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT_S))


class EngineStack:
    """An engine, the plans it sent, and one session's news.

    Args:
        can: the executor's capabilities; None: there is no executor yet.
    """

    def __init__(self, can: Capabilities | None = _CAPABILITIES, **settings: Any) -> None:
        self.plans: deque[SchedulerOutput] = deque()
        self.has_left = False
        self.engine = Engine(SchedulerSettings(ProcessSettings(), **settings), self)
        self.session = self.open_session()
        self.frames: list[Frame] = []
        if can is not None:
            self.engine.on_executor_ready(can)

    @property
    def core(self) -> Scheduler:
        assert self.engine.core is not None
        return self.engine.core

    def open_session(self) -> TokenizerSession:
        session = TokenizerSession("test")
        self.engine.open_session(session)
        return session

    def send(self, plan: SchedulerOutput, trace_context: Any = None) -> None:
        """Take a plan; the engine's PlanSink."""
        self.plans.append(plan)

    def leave(self) -> None:
        """The engine needs its executor no more."""
        self.has_left = True

    def submit(self, handle: int, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Request:
        submit = engine_pb2.Submit(
            handle=handle,
            request_id=fields.pop("request_id", f"request-{handle}"),
            prompt_token_ids=prompt,
            stop=common_pb2.StopConditions(max_tokens=max_tokens),
            **fields,
        )
        now = time.monotonic()
        request = convert.request_of(submit, _CAPABILITIES, now)
        stream = Stream(
            request, self.session, handle, submit.group_id, now, INVALID_SPAN, is_resumable=submit.resumable
        )
        self.engine.submit(self.session, stream, is_resubmission=submit.HasField("age_ms"))
        return request

    async def step(self) -> SchedulerOutput | None:
        """Let the engine make its plans and answer the oldest one; None if there is none."""
        await asyncio.sleep(0)
        if not self.plans:
            return None
        plan = self.plans.popleft()
        sampled = {row.row_id: RowOutput([self._next_token(row.request)]) for row in plan.rows if row.samples}
        self.engine.on_result(ModelOutput(plan.step_id, sampled))
        return plan

    async def step_until_idle(self) -> None:
        while await self.step() is not None:
            pass

    @staticmethod
    def _next_token(request: Request) -> int:
        return next_token(request.token_ids, _CAPABILITIES.vocab_size)

    async def hear(self) -> Frame:
        """The session's news since the last call."""
        await asyncio.sleep(0)
        async with asyncio.timeout(LIMIT_S):
            frame = await self.session.outbox.take()
        assert frame is not None
        self.frames.append(frame)
        return frame

    @property
    def finished(self) -> dict[int, list[FinishedRow]]:
        """The ends that were told, by handle."""
        ends: dict[int, list[FinishedRow]] = {}
        for frame in self.frames:
            for row in frame.finished:
                ends.setdefault(row.handle, []).append(row)
        return ends
