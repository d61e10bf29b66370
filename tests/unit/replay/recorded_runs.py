"""Runs of the real core on a fake executor, without sockets or time, that are recorded and replayed."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from io import BytesIO
from typing import Any, cast

from tests.fake_executor import FakeExecutor
from tokenloom.api.v1 import common_pb2, executor_pb2
from tokenloom.common.errors import Unavailable
from tokenloom.common.executor_client import ExecutorClient
from tokenloom.common.recording import MAGIC, RecordingReader, framed
from tokenloom.replay.replayer import Replayer, ReplayOptions, Summary
from tokenloom.scheduler import convert
from tokenloom.scheduler.convert import RowPayload
from tokenloom.scheduler.core.plan import SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request
from tokenloom.scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenloom.scheduler.recorder import Recorder, RecorderLimits

BLOCK_SIZE = 4


class RecordedRun:
    """A scheduler that is driven step by step.

    Args:
        depth: plans in flight.
        max_steps: of the ring.
    """

    def __init__(
        self, *, depth: int, max_steps: int, num_blocks: int = 24, max_num_seqs: int = 8, max_bytes: int = 1 << 30
    ) -> None:
        self.executor = FakeExecutor(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.executor.num_blocks = num_blocks
        config = SchedulerConfig(block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs, max_num_batched_tokens=24)
        self.core = Scheduler(config, num_blocks)
        self.depth = depth
        self.num_blocks = num_blocks
        self.recorder = Recorder(RecorderLimits(max_steps, max_bytes), lambda: self.core.running)
        self.recorder.begin_epoch(self.executor.capabilities, num_blocks)
        self._sent: deque[executor_pb2.ExecuteRequest] = deque()
        self._last_step_id: int | None = None

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, **fields: Any) -> Request:
        sampling = fields.pop("sampling", common_pb2.SamplingParams(temperature=0.0))
        request = Request(
            request_id,
            prompt,
            max_tokens,
            reads_prefix_cache=not sampling.HasField("num_prompt_logprobs"),
            payload=RowPayload(sampling, common_pb2.StopConditions()),
            **fields,
        )
        self.core.add_request(request)
        return request

    def plan(self) -> bool:
        """Make and send a plan, if one may be in flight and rows can run."""
        if len(self._sent) >= self.depth:
            return False
        plan = self.core.schedule() or self.core.release_rows()
        if plan is not None:
            self._send(plan)
        return plan is not None

    def _send(self, plan: SchedulerOutput) -> None:
        request = convert.execute_request_of(plan, executor_pb2.Epoch(), None)
        self.recorder.plan(plan, request)
        self._sent.append(request)

    def result(self) -> bool:
        """Run the oldest plan in flight and apply its result, if there is one."""
        if not self._sent:
            return False
        response = self.executor.run(self._sent.popleft(), self._last_step_id)
        self._last_step_id = response.step_id
        self.recorder.result(response)
        self.core.update(convert.model_output_of(response))
        assert not self.executor.violations
        return True

    def step(self) -> bool:
        """Fill the queue of plans, then take one result; False if nothing is left to do."""
        while self.plan():
            pass
        return self.result()

    def recording(self) -> bytes:
        """The ring as a file."""
        return MAGIC + b"".join(framed(entry) for entry in self.recorder.chunks())


class InProcess:
    """In place of the connection to an executor: a fake one, asked directly."""

    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor
        self._results: deque[executor_pb2.ExecuteResponse] = deque()
        self._last_step_id: int | None = None

    async def capabilities(self) -> executor_pb2.GetCapabilitiesResponse:
        return self._executor.capabilities

    async def initialize(self, num_blocks: int) -> executor_pb2.Epoch:
        request = executor_pb2.InitializeRequest(num_blocks=num_blocks)
        self._results.clear()
        self._last_step_id = None
        return (await self._executor.Initialize(request, None)).epoch

    async def send(self, plan: executor_pb2.ExecuteRequest) -> None:
        self._executor.plans.append(plan)
        self._results.append(self._executor.run(plan, self._last_step_id))
        self._last_step_id = plan.step_id

    async def receive(self) -> executor_pb2.ExecuteResponse:
        if not self._results:
            raise Unavailable("the executor ended the stream")
        return self._results.popleft()

    def stream(self) -> InProcess:
        return self

    def cancel(self) -> None:
        pass


def replayed(recording: bytes, executor: FakeExecutor) -> Summary:
    """Replay a file's bytes on an executor; logprobs are compared, too."""
    client = cast(ExecutorClient, InProcess(executor))
    return asyncio.run(Replayer(client, ReplayOptions(0.0)).run(RecordingReader(BytesIO(recording), "ring")))


def expect_replay(run: RecordedRun) -> Summary:
    """Replay the ring of now; it must be equal in all, and break no rule."""
    executor = FakeExecutor(num_blocks=run.num_blocks, block_size=BLOCK_SIZE)
    summary = replayed(run.recording(), executor)
    assert not executor.violations, executor.violations
    assert summary.is_equal, summary.as_text()
    assert summary.num_unanswered_steps <= run.depth
    return summary


def random_sampling(chance: random.Random) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams(temperature=0.0)
    if chance.random() < 0.4:
        sampling = common_pb2.SamplingParams(temperature=1.0, seed=chance.randrange(1000), num_logprobs=2)
    if chance.random() < 0.2:
        sampling.num_prompt_logprobs = 1
    return sampling


def act(run: RecordedRun, chance: random.Random, number: int) -> None:
    """Something that happens between steps: requests of a few prefixes come, end, lose their cache."""
    if run.core.num_requests < 14 and chance.random() < 0.5:
        prefix = [chance.randrange(3) + 10] * chance.choice([0, 4, 8, 12, 17])
        prompt = [*prefix, *(chance.randrange(2, 6) for _ in range(chance.randrange(1, 5)))]
        run.submit(
            f"r-{number}",
            prompt,
            chance.randrange(1, 24),
            sampling=random_sampling(chance),
            priority_class=chance.randrange(3),
            stop_token_ids=frozenset(chance.sample(range(1000), 40)),
        )
    if chance.random() < 0.08 and run.core.running:
        run.core.finish(chance.choice(run.core.running).request_id, FinishReason.ABORTED)
    if chance.random() < 0.01:
        run.core.kv.pool.flush()
