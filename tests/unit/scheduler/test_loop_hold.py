"""Long prompts do not hold the event loop that makes the plans.

Measured in CPU time of the loop's thread, so that a busy machine does not change the result.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

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

NUM_PROMPTS = 12
NUM_TOKENS = 32_768
VOCAB_SIZE = 50_000
MOST_S = 0.015  # alone each prompt takes 3 ms on a slow core


class PlanWriter:
    """Turns plans into messages, as the executor's client does; nobody answers."""

    def send(self, plan: SchedulerOutput, trace_context: Any = None) -> None:
        convert.execute_request_of(plan, executor_pb2.Epoch(boot_id="x", counter=1), None)


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


async def longest_hold_s(frame: engine_pb2.EngineServiceSessionRequest) -> float:
    """Take the frame in; the longest time between two turns of the loop."""
    settings = SchedulerSettings(ProcessSettings(), max_num_waiting_tokens=10**9)
    engine = Engine(settings, PlanWriter())
    engine.on_executor_ready(
        fake_capabilities(vocab_size=VOCAB_SIZE, max_model_len=2 * NUM_TOKENS, block_size=16, max_num_blocks=40_000)
    )
    servicer = EngineServicer(engine, make_recorder(settings, lambda: ()))

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


def measured_hold_s() -> float:
    frame = a_frame_of_long_prompts()
    freeze_heap()  # as in the program
    try:
        return asyncio.run(asyncio.wait_for(longest_hold_s(frame), LIMIT_S))
    finally:
        gc.unfreeze()


def test_a_frame_of_many_long_prompts_holds_the_loop_no_longer_than_a_single_one_would() -> None:
    assert min(measured_hold_s() for _ in range(3)) < MOST_S


def test_the_measurement_sees_a_loop_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never_pause(turns: Turns) -> None:
        pass

    monkeypatch.setattr(Turns, "pause_if_long", never_pause)
    assert measured_hold_s() > 2 * MOST_S
