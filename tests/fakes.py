"""Stand-ins for the neighbours of a stage under test, all in one place.

Each is a real gRPC servicer whose answers are a pure function of what it was asked.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from tokenloom.api.v1 import common_pb2, executor_pb2, executor_pb2_grpc
from tokenloom.common.errors import FailedPrecondition

EXECUTOR_SERVICE = "tokenloom.api.v1.ExecutorService"


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """The fake models' choice: depends on every token so far and on their order; never below 2."""
    mixed = 7
    for token_id in token_ids:
        mixed = (mixed * 31 + token_id + 1) % 1_000_003
    return 2 + mixed % (vocab_size - 2)


def continuation(prompt_token_ids: list[int], count: int, vocab_size: int = 1000) -> list[int]:
    """What a fake model generates behind a prompt."""
    token_ids = list(prompt_token_ids)
    for _ in range(count):
        token_ids.append(next_token(token_ids, vocab_size))
    return token_ids[len(prompt_token_ids) :]


class FakeExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """An executor without a model. It checks the protocol's rules as it goes and remembers every plan.

    Args:
        hold_back: a result is sent only when so many later plans have arrived; with the last plans, when no more come,
            only `release()` lets them go.
        step_s: how long a step takes.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        num_blocks: int = 64,
        block_size: int = 4,
        hold_back: int = 0,
        step_s: float = 0.0,
    ) -> None:
        self.capabilities = executor_pb2.GetCapabilitiesResponse(
            schema_revision=1,
            boot_id=uuid.uuid4().hex,
            model_id="fake",
            tokenizer_fingerprint="fake-tokenizer",
            vocab_size=vocab_size,
            max_model_len=512,
            block_size=block_size,
            max_num_blocks=num_blocks,
            max_num_seqs=64,
            max_num_batched_tokens=256,
            max_plans_in_flight=3,
            max_num_logprobs=20,
            batch_invariant=True,
            eos_token_ids=[1],
            description="fake executor",
        )
        self.hold_back = hold_back
        self.step_s = step_s
        self.plans: list[executor_pb2.ExecuteRequest] = []
        self.most_waiting = 0
        self.row_errors: dict[str, common_pb2.Error] = {}
        self.step_errors: deque[common_pb2.Error] = deque()
        self._counter = 0
        self._ids: dict[int, list[int]] = {}
        self._names: dict[int, str] = {}

    async def GetCapabilities(self, request: Any, context: Any) -> executor_pb2.GetCapabilitiesResponse:
        return self.capabilities

    async def Initialize(self, request: Any, context: Any) -> executor_pb2.InitializeResponse:
        self._counter += 1
        self._ids.clear()
        return executor_pb2.InitializeResponse(epoch=self._epoch())

    async def Execute(
        self, request_iterator: AsyncIterator[executor_pb2.ExecuteRequest], context: Any
    ) -> AsyncIterator[executor_pb2.ExecuteResponse]:
        arrived: asyncio.Queue[executor_pb2.ExecuteRequest | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, arrived))
        waiting: deque[executor_pb2.ExecuteRequest] = deque()
        is_open = True
        try:
            while is_open or waiting:
                while is_open and (len(waiting) <= self.hold_back or not arrived.empty()):
                    plan = await arrived.get()
                    if plan is None:
                        is_open = False
                    else:
                        waiting.append(plan)
                        self.most_waiting = max(self.most_waiting, len(waiting))
                if waiting:
                    if self.step_s:
                        await asyncio.sleep(self.step_s)
                    yield self._run(waiting.popleft())
        finally:
            reader.cancel()

    async def _read(self, plans: AsyncIterator[executor_pb2.ExecuteRequest], arrived: asyncio.Queue[Any]) -> None:
        async for plan in plans:
            self.plans.append(plan)
            arrived.put_nowait(plan)
        arrived.put_nowait(None)

    def _epoch(self) -> executor_pb2.Epoch:
        return executor_pb2.Epoch(boot_id=self.capabilities.boot_id, counter=self._counter)

    def _run(self, plan: executor_pb2.ExecuteRequest) -> executor_pb2.ExecuteResponse:
        if plan.epoch != self._epoch():
            raise FailedPrecondition("the plan is of another epoch")
        response = executor_pb2.ExecuteResponse(step_id=plan.step_id)
        for row_id in plan.finished_row_ids:
            del self._ids[row_id]
        for row in plan.new_rows:
            assert row.row_id not in self._ids
            self._ids[row.row_id] = [*row.prompt_token_ids, *row.generated_token_ids]
            self._names[row.row_id] = row.request_id
        if self.step_errors:
            response.step_error.CopyFrom(self.step_errors.popleft())
            return response
        columns = zip(plan.row_ids, plan.num_scheduled_tokens, plan.num_computed_tokens, plan.feeds_back, strict=True)
        for row_id, num_scheduled, num_computed, _ in columns:
            self._run_row(row_id, num_computed + num_scheduled, response)
        return response

    def _run_row(self, row_id: int, end: int, response: executor_pb2.ExecuteResponse) -> None:
        ids = self._ids[row_id]
        assert end <= len(ids), "a plan computes tokens that nobody knows"
        if (error := self.row_errors.get(self._names[row_id])) is not None:
            response.row_errors.add(row_id=row_id, error=error)
        elif end == len(ids):
            token_id = next_token(ids, self.capabilities.vocab_size)
            ids.append(token_id)
            response.row_ids.append(row_id)
            response.num_sampled.append(1)
            response.sampled_token_ids.append(token_id)
            response.num_logprobs_per_token.append(0)
