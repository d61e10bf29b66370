"""Long prompts do not hold the event loop that makes the plans.

Measured in CPU time of the loop's thread, so that a busy machine does not change the result.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from opentelemetry.trace import INVALID_SPAN

from tests.unit.scheduler.engine_stack import LIMIT_S, fake_capabilities
from tokenloom.api.v1 import common_pb2, engine_pb2, executor_pb2
from tokenloom.common.config import ProcessSettings
from tokenloom.common.stage import freeze_heap
from tokenloom.scheduler import convert
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.core.plan import SchedulerOutput
from tokenloom.scheduler.engine import Engine
from tokenloom.scheduler.recorder import make_recorder
from tokenloom.scheduler.servicer import EngineServicer, Turns
from tokenloom.scheduler.sessions import Stream, TokenizerSession

NUM_PROMPTS = 12
NUM_TOKENS = 32_768
VOCAB_SIZE = 50_000
MOST_S = 0.015  # alone each prompt takes 3 ms on a slow core; without pauses all together take more than 30


class PlanWriter:
    """Turns plans into messages, as the executor's client does; nobody answers."""

    def __init__(self) -> None:
        self.most_new_rows = 0

    def send(self, plan: SchedulerOutput, trace_context: Any = None) -> None:
        message = convert.execute_request_of(plan, executor_pb2.Epoch(boot_id="x", counter=1), None)
        self.most_new_rows = max(self.most_new_rows, len(message.new_rows))

    def leave(self) -> None:
        raise AssertionError("nothing drains here")


def a_frame_of_long_prompts() -> engine_pb2.EngineServiceSessionRequest:
    submits = [
        engine_pb2.Submit(
            handle=number,
            request_id=str(number),
            prompt_token_ids=[(number + i * 7919) % VOCAB_SIZE for i in range(NUM_TOKENS)],
            stop=common_pb2.StopConditions(max_tokens=4),
        )
        for number in range(NUM_PROMPTS)
    ]
    return engine_pb2.EngineServiceSessionRequest(submits=submits)


FRAME = a_frame_of_long_prompts()


def settings() -> SchedulerSettings:
    return SchedulerSettings(ProcessSettings(), max_num_waiting_tokens=10**9)


def engine_on(writer: PlanWriter) -> Engine:
    engine = Engine(settings(), writer)
    engine.on_executor_ready(
        fake_capabilities(
            vocab_size=VOCAB_SIZE,
            max_model_len=2 * NUM_TOKENS,
            block_size=16,
            max_num_blocks=40_000,
            max_num_batched_tokens=512,
        )
    )
    return engine


async def longest_turn_s(frame: engine_pb2.EngineServiceSessionRequest) -> float:
    """Take the frame in; the longest time between two turns of the loop."""
    engine = engine_on(PlanWriter())
    servicer = EngineServicer(engine, make_recorder(settings(), lambda: ()), 2.0)

    async def frames() -> AsyncIterator[engine_pb2.EngineServiceSessionRequest]:
        yield engine_pb2.EngineServiceSessionRequest(hello=engine_pb2.Hello(schema_revision=1))
        yield frame
        await asyncio.sleep(LIMIT_S)

    async def read() -> None:
        async for _ in servicer.Session(frames(), None):
            pass

    reader = asyncio.create_task(read())
    longest_s, turn_s = 0.0, time.thread_time()
    while len(engine.registry.streams) < NUM_PROMPTS:
        await asyncio.sleep(0)
        now_s = time.thread_time()
        longest_s, turn_s = max(longest_s, now_s - turn_s), now_s
    reader.cancel()
    engine.stop()
    return longest_s


async def first_plans_s(frame: engine_pb2.EngineServiceSessionRequest, has_columns: bool = True) -> float:
    """All prompts of the frame wait; how long making the first plans holds the loop."""
    writer = PlanWriter()
    engine = engine_on(writer)
    session = TokenizerSession("test")
    for submit in frame.submits:
        assert engine.capabilities is not None
        request = convert.request_of(submit, engine.capabilities, time.monotonic())
        if not has_columns:
            request.payload.prompt_column = None
        stream = Stream(request, session, submit.handle, "", time.monotonic(), INVALID_SPAN)
        engine.submit(session, stream, is_resubmission=False)
    began_s = time.thread_time()
    await asyncio.sleep(0)
    took_s = time.thread_time() - began_s
    assert writer.most_new_rows > 3, "many prompts begin in one plan"
    engine.stop()
    return took_s


def measured_s(measurement: Coroutine[Any, Any, float]) -> float:
    """Run a measurement with the heap frozen, as in the program."""
    freeze_heap()
    try:
        return asyncio.run(asyncio.wait_for(measurement, LIMIT_S))
    finally:
        gc.unfreeze()


def test_a_frame_of_many_long_prompts_holds_the_loop_no_longer_than_a_single_one_would() -> None:
    assert min(measured_s(longest_turn_s(FRAME)) for _ in range(3)) < MOST_S


def test_the_measurement_sees_a_loop_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never_pause(turns: Turns) -> None:
        pass

    monkeypatch.setattr(Turns, "pause_if_long", never_pause)
    assert measured_s(longest_turn_s(FRAME)) > 2 * MOST_S


def test_a_plan_in_which_many_long_prompts_begin_copies_them_as_memory() -> None:
    fast_s = min(measured_s(first_plans_s(FRAME)) for _ in range(3))
    slow_s = min(measured_s(first_plans_s(FRAME, has_columns=False)) for _ in range(3))
    assert fast_s < MOST_S
    assert fast_s < slow_s / 1.5, "or the column is of no use"
