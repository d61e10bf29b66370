"""An executor without a model, as a process of its own: its steps take the time they are told to, and it keeps a diary.

    python -m loadtest.bench.executor --listen unix:executor.sock --step-ms 2 --record steps.json

A row's n-th generated token (from 0) is FIRST_TOKEN_ID + n, modulo the vocabulary: whoever submits a request knows its
tokens beforehand, and a stop token ends it where he likes. Steps of more than 0 ms run in a thread, as a model would;
steps of 0 ms run where the plan arrived, so that the hop is all that is measured. The diary, written when the process
ends, is

    {"steps": [[step_id, start_s, end_s, num_rows, num_tokens, num_carried], ...],
     "requests": {request_id: [step_id of its first sample (0: none), number of samples, number of rows], ...}}

A request has more than one row if it was preempted.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.bench.steps import StepCost, StepRecord
from tokenloom.api.v1 import executor_pb2, executor_pb2_grpc
from tokenloom.common.config import ProcessSettings, non_negative_seconds, parse, positive_int, setting
from tokenloom.common.errors import FailedPrecondition
from tokenloom.common.grpc_server import GrpcServer
from tokenloom.common.stage import run_main, run_stage

SERVICE = "tokenloom.api.v1.ExecutorService"
FIRST_TOKEN_ID = 100
VOCAB_SIZE = 50_000
_SPIN_S = 1e-4  # a sleep ends this much early, and the rest is spun: time.sleep overshoots by 0.05 to 0.1 ms


def output_token(index: int) -> int:
    """The token that the executor samples as a request's `index`-th."""
    return FIRST_TOKEN_ID + index % (VOCAB_SIZE - FIRST_TOKEN_ID)


@dataclass(frozen=True)
class BenchExecutorSettings:
    """All settings of the benchmark's executor."""

    process: ProcessSettings
    listen: str = setting("127.0.0.1:50053", "Where the scheduler connects: host:port or unix:PATH.")
    record: str = setting("", "File for the diary; empty: none is written.")
    step_ms: float = setting(2.0, "Duration of a step.", parse=non_negative_seconds)
    row_ms: float = setting(0.0, "Further duration for each row of a step.", parse=non_negative_seconds)
    token_ms: float = setting(0.0, "Further duration for each token of a step.", parse=non_negative_seconds)
    num_blocks: int = setting(100_000, "KV blocks of 16 tokens.", parse=positive_int)
    max_num_batched_tokens: int = setting(8192, "Token budget of a step.", parse=positive_int)


@dataclass(slots=True)
class _Row:
    request_id: str
    num_prompt_tokens: int
    num_tokens: int


class Rows:
    """What an executor keeps of its rows between plans, without a model; and the diary."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self.steps: list[StepRecord] = []
        self.requests: dict[str, list[int]] = {}

    def begin(self, plan: executor_pb2.ExecuteRequest) -> int:
        """Forget and open rows. Returns: rows of earlier plans that are still alive."""
        for row_id in plan.finished_row_ids:
            self._rows.pop(row_id, None)
        num_carried = len(self._rows)
        for new in plan.new_rows:
            num_prompt = len(new.prompt_token_ids)
            self._rows[new.row_id] = _Row(new.request_id, num_prompt, num_prompt + len(new.generated_token_ids))
            self.requests.setdefault(new.request_id, [0, 0, 0])[2] += 1
        return num_carried

    def run(self, plan: executor_pb2.ExecuteRequest) -> executor_pb2.ExecuteResponse:
        """Sample one token for each row whose ids are all computed with this plan."""
        sampled_rows, token_ids = [], []
        for row_id, num_new, num_computed in zip(
            plan.row_ids, plan.num_scheduled_tokens, plan.num_computed_tokens, strict=True
        ):
            row = self._rows[row_id]
            if num_computed + num_new != row.num_tokens:
                continue
            sampled_rows.append(row_id)
            token_ids.append(output_token(row.num_tokens - row.num_prompt_tokens))
            row.num_tokens += 1
            account = self.requests[row.request_id]
            account[0] = account[0] or plan.step_id
            account[1] += 1
        return executor_pb2.ExecuteResponse(
            step_id=plan.step_id,
            row_ids=sampled_rows,
            num_sampled=[1] * len(sampled_rows),
            sampled_token_ids=token_ids,
        )

    def clear(self) -> None:
        """A new epoch: no row is known."""
        self._rows.clear()


class BenchExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """Serves one scheduler.

    Args:
        cost: duration of a step.
        num_blocks: that it says it has; the null block comes on top.
        max_num_batched_tokens: likewise.
    """

    def __init__(self, cost: StepCost, num_blocks: int = 100_000, max_num_batched_tokens: int = 8192) -> None:
        self._cost = cost
        self._capabilities = executor_pb2.GetCapabilitiesResponse(
            schema_revision=1,
            boot_id=uuid.uuid4().hex,
            model_id="bench",
            tokenizer_fingerprint="bench",
            vocab_size=VOCAB_SIZE,
            max_model_len=1 << 17,
            block_size=16,
            max_num_blocks=num_blocks + 1,
            max_num_seqs=4096,
            max_num_batched_tokens=max_num_batched_tokens,
            max_plans_in_flight=4,
            eos_token_ids=[1],
            description="keeps time, computes nothing",
        )
        self._counter = 0
        self.rows = Rows()

    async def GetCapabilities(self, request: Any, context: Any) -> executor_pb2.GetCapabilitiesResponse:
        """What it claims to be."""
        return self._capabilities

    async def Initialize(self, request: Any, context: Any) -> executor_pb2.InitializeResponse:
        """Begin an epoch."""
        self._counter += 1
        self.rows.clear()
        return executor_pb2.InitializeResponse(epoch=self._epoch())

    async def Execute(
        self, request_iterator: AsyncIterator[executor_pb2.ExecuteRequest], context: Any
    ) -> AsyncIterator[executor_pb2.ExecuteResponse]:
        """Run plans in order."""
        if self._cost == StepCost(0.0):
            async for plan in request_iterator:
                self._check_epoch(plan)
                yield self._step(plan)
            return
        loop = asyncio.get_running_loop()
        results: asyncio.Queue[executor_pb2.ExecuteResponse | None] = asyncio.Queue()
        plans: queue.SimpleQueue[executor_pb2.ExecuteRequest | None] = queue.SimpleQueue()

        def tell(result: executor_pb2.ExecuteResponse | None) -> None:
            loop.call_soon_threadsafe(results.put_nowait, result)

        reader = asyncio.create_task(self._read(request_iterator, plans))
        threading.Thread(target=self._work, args=(plans, tell), name="steps", daemon=True).start()
        try:
            while (result := await results.get()) is not None:
                yield result
            await reader
        finally:
            reader.cancel()
            plans.put(None)

    async def _read(
        self,
        requests: AsyncIterator[executor_pb2.ExecuteRequest],
        plans: queue.SimpleQueue[executor_pb2.ExecuteRequest | None],
    ) -> None:
        try:
            async for plan in requests:
                self._check_epoch(plan)
                plans.put(plan)
        finally:
            plans.put(None)

    def _work(
        self,
        plans: queue.SimpleQueue[executor_pb2.ExecuteRequest | None],
        tell: Callable[[executor_pb2.ExecuteResponse | None], None],
    ) -> None:
        while (plan := plans.get()) is not None:
            tell(self._step(plan))
        tell(None)

    def _step(self, plan: executor_pb2.ExecuteRequest) -> executor_pb2.ExecuteResponse:
        start_s = time.monotonic()
        num_carried = self.rows.begin(plan)
        response = self.rows.run(plan)
        if not plan.row_ids:  # it only says which rows ended
            return response
        num_rows, num_tokens = len(plan.row_ids), sum(plan.num_scheduled_tokens)
        _wait_until(start_s + self._cost.seconds(num_rows, num_tokens))
        record = StepRecord(plan.step_id, start_s, time.monotonic(), num_rows, num_tokens, num_carried)
        self.rows.steps.append(record)
        return response

    def _epoch(self) -> executor_pb2.Epoch:
        return executor_pb2.Epoch(boot_id=self._capabilities.boot_id, counter=self._counter)

    def _check_epoch(self, plan: executor_pb2.ExecuteRequest) -> None:
        if plan.epoch != self._epoch():
            raise FailedPrecondition("the plan is of another epoch")


def _wait_until(time_s: float) -> None:
    left_s = time_s - time.monotonic()
    if left_s > _SPIN_S:
        time.sleep(left_s - _SPIN_S)
    while time.monotonic() < time_s:
        pass


class BenchExecutorStage:
    """Implements `tokenloom.common.stage.Stage`."""

    name = "executor"

    def __init__(self, settings: BenchExecutorSettings) -> None:
        self._record = settings.record
        cost = StepCost(settings.step_ms, settings.row_ms, settings.token_ms)
        self.servicer = BenchExecutor(cost, settings.num_blocks, settings.max_num_batched_tokens)
        add = executor_pb2_grpc.add_ExecutorServiceServicer_to_server
        self._server = GrpcServer(settings.listen, [(add, self.servicer, SERVICE)])

    async def start(self) -> None:
        """Listen, ready at once."""
        await self._server.start()
        await self._server.set_serving(True)

    async def drain(self, grace_s: float) -> None:
        """Nothing to wait for."""

    async def stop(self) -> None:
        """End the stream and write the diary."""
        await self._server.stop(0.0)
        if self._record:
            _write(self._record, diary_of(self.servicer.rows))


def _write(path: str, diary: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(diary))


def diary_of(rows: Rows) -> dict[str, Any]:
    """The diary as JSON values; see the head of this file."""
    steps = [[s.step_id, s.start_s, s.end_s, s.num_rows, s.num_tokens, s.num_carried] for s in rows.steps]
    return {"steps": steps, "requests": rows.requests}


def main(argv: Sequence[str]) -> int:
    """Run the executor; returns the exit code."""
    description = "An executor that keeps time and computes nothing."
    settings = parse(BenchExecutorSettings, "python -m loadtest.bench.executor", description, argv)
    return run_stage("executor", settings.process, lambda: BenchExecutorStage(settings))


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:]), extra="all"))
