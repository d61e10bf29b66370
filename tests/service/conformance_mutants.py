"""Fake executors that each break one rule of the protocol: the controls of the conformance checks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.fake_executor import FakeRow, PlannedRow, next_token
from tests.fakes import FakeExecutor
from tokenloom.api.v1 import common_pb2, executor_pb2
from tokenloom.common.errors import FailedPrecondition

Plan = executor_pb2.ExecuteRequest
Response = executor_pb2.ExecuteResponse


class Fake(FakeExecutor):
    """What all mutants are made of: enough blocks for every check, and steps that take long enough to queue plans."""

    def __init__(self) -> None:
        super().__init__(num_blocks=128, step_s=0.002)


def overlooking(words: str) -> Callable[[], Fake]:
    """An executor that runs plans with this fault."""

    class Overlooking(Fake):
        def fault_of(self, plan: Plan) -> str:
            fault = super().fault_of(plan)
            return "" if words in fault else fault

    return Overlooking


def finding(is_fault: Callable[[Fake, Plan], bool]) -> Callable[[], Fake]:
    """An executor that refuses plans of which this is so."""

    class Finding(Fake):
        def fault_of(self, plan: Plan) -> str:
            return "it is refused" if is_fault(self, plan) else super().fault_of(plan)

    return Finding


class OnePlanAtATime(Fake):
    def __init__(self) -> None:
        super().__init__()
        self.capabilities.max_plans_in_flight = 1


class CountsTwice(Fake):
    async def Initialize(self, request: Any, context: Any) -> executor_pb2.InitializeResponse:
        self.counter += 1
        return await super().Initialize(request, context)


class TakesAnyNumberOfBlocks(Fake):
    async def Initialize(self, request: Any, context: Any) -> executor_pb2.InitializeResponse:
        request.num_blocks = min(max(request.num_blocks, 2), self.capabilities.max_num_blocks)
        return await super().Initialize(request, context)


class KnowsNoEpochs(Fake):
    def check_epoch(self, plan: Plan, stream: asyncio.Queue[Any]) -> None:
        plan.epoch.CopyFrom(self.epoch())
        super().check_epoch(plan, stream)


class LeavesOldStreamsOpen(Fake):
    def void_stream(self) -> None:
        self.owner = None


class KeepsEpochsWithoutStream(Fake):
    def end_epoch(self) -> None:
        self.owner = None


class LetsStreamsMeet(Fake):
    def check_epoch(self, plan: Plan, stream: asyncio.Queue[Any]) -> None:
        self.owner = None
        super().check_epoch(plan, stream)


class SendsNoHeartbeats(Fake):
    may_beat = False


class DropsPlansAtHalfClose(Fake):
    async def _read(self, plans: AsyncIterator[Plan], arrived: asyncio.Queue[Any]) -> None:
        async for plan in plans:
            arrived.put_nowait(plan)
        arrived.put_nowait(FailedPrecondition("the scheduler went away"))


class TakesTheNewestPlanFirst(Fake):
    def __init__(self) -> None:
        super().__init__()
        self.hold_back = 1

    def take(self, waiting: deque[Plan]) -> Plan:
        return waiting.pop()


class ForgetsNoRow(Fake):
    def forget(self, row_id: int) -> None:
        pass


class NoiseOfTheBatch(Fake):
    def seed_of(self, row: FakeRow) -> int:
        return super().seed_of(row) + len(self.rows)


class NoSeeds(Fake):
    def seed_of(self, row: FakeRow) -> int:
        return 0


class NoFilters(Fake):
    def draw(self, row: FakeRow, seen: list[int], most_likely: int) -> int:
        if self.is_greedy(row.new.sampling):
            return most_likely
        return next_token([*seen, self.seed_of(row), len(seen)], self.capabilities.vocab_size)


class NoDefaults(Fake):
    def is_greedy(self, sampling: common_pb2.SamplingParams) -> bool:
        return sampling.HasField("temperature") and sampling.temperature < 1e-5


class NoBias(Fake):
    def bias_of(self, row: FakeRow) -> dict[int, float]:
        return {}


class NoMask(Fake):
    def masked(self, row: FakeRow) -> set[int]:
        return set()


class LogprobsWithoutTheTokenItself(Fake):
    def logprob_entries(self, token_id: int, first: int, num: int | None) -> list[tuple[int, float]]:
        return super().logprob_entries(token_id, first, num)[1:]


class PromptLogprobsOneTooEarly(Fake):
    def add_prompt_logprobs(self, row: FakeRow, start: int, end: int, response: Response) -> None:
        super().add_prompt_logprobs(row, start, end, response)
        for run in response.prompt_logprobs:
            run.first_position -= 1


class TokensOfTheEpoch(Fake):
    def pick(self, row: FakeRow, first: int) -> int:
        return super().pick(row, first) + self.counter % 2


class FeedsBackAnOldToken(Fake):
    """Right with one plan at a time; with another plan behind it a row computes the token before."""

    is_ahead = False

    def take(self, waiting: deque[Plan]) -> Plan:
        self.is_ahead = len(waiting) > 1
        return super().take(waiting)

    def write(self, row: FakeRow, start: int, end: int) -> None:
        super().write(row, start, end)
        if self.is_ahead and row.has_sampled:
            size = self.capabilities.block_size
            self.kv[row.blocks[(end - 1) // size]][(end - 1) % size] = row.ids[end - 2]


class LosesTheFirstTokenOfAChunk(Fake):
    def write(self, row: FakeRow, start: int, end: int) -> None:
        super().write(row, start + (start > 0 and not row.has_sampled), end)


class TokensOfTheBatch(Fake):
    num_rows_of_plan = 0

    def run(self, plan: Plan, last_step_id: int | None) -> Response:
        self.num_rows_of_plan = len(plan.row_ids)
        return super().run(plan, last_step_id)

    def pick(self, row: FakeRow, first: int) -> int:
        return super().pick(row, first) + (self.num_rows_of_plan > 1)


class StartsAnewBehindGeneratedTokens(Fake):
    def read(self, row: FakeRow, end: int) -> list[int]:
        seen = super().read(row, end)
        return seen[: row.num_prompt] if row.new.generated_token_ids and not row.has_sampled else seen


class ReadsNoBlockOfOthers(Fake):
    def advance(self, planned: PlannedRow) -> FakeRow:
        if self.rows[planned.row_id].num_computed is None and planned.start:
            for block in planned.new_blocks:
                self.kv.pop(block, None)
        return super().advance(planned)


class FreesBlocksBehindThePlan(Fake):
    def run(self, plan: Plan, last_step_id: int | None) -> Response:
        blocks = [block for row_id in plan.finished_row_ids for block in self.rows[row_id].blocks]
        response = super().run(plan, last_step_id)
        for block in blocks:
            self.kv.pop(block, None)
        return response


class SamplesAtEachStep(Fake):
    def samples(self, row: FakeRow, planned: PlannedRow) -> bool:
        return True


def _has_unknown_fields(executor: Fake, plan: Plan) -> bool:
    known = Plan()
    known.CopyFrom(plan)
    known.DiscardUnknownFields()  # type: ignore[attr-defined,unused-ignore]
    return known.ByteSize() != plan.ByteSize()


def _has_bad_row(executor: Fake, plan: Plan) -> bool:
    return any(executor.fault_of_row(new) is not None for new in plan.new_rows)


MUTANTS: dict[str, Callable[[], Fake]] = {
    "capabilities": OnePlanAtATime,
    "initialize-begins-epoch": CountsTwice,
    "initialize-bounds": TakesAnyNumberOfBlocks,
    "stale-epoch": KnowsNoEpochs,
    "initialize-ends-stream": LeavesOldStreamsOpen,
    "epoch-ends-with-stream": KeepsEpochsWithoutStream,
    "one-stream-per-epoch": LetsStreamsMeet,
    "heartbeats": SendsNoHeartbeats,
    "half-close": DropsPlansAtHalfClose,
    "results-in-order": TakesTheNewestPlanFirst,
    "finish-only": finding(lambda _, plan: not plan.row_ids),
    "finished-rows-forgotten": ForgetsNoRow,
    "row-error": finding(_has_bad_row),
    "too-many-tokens": overlooking("tokens; at most"),
    "too-many-rows": overlooking("rows; at most"),
    "unknown-row": overlooking("is unknown"),
    "known-row": overlooking("new and known"),
    "row-twice": overlooking("is in it twice"),
    "idle-row": overlooking("computes nothing"),
    "null-block": overlooking("has blocks"),
    "outside-block": overlooking("has blocks"),
    "too-few-blocks": overlooking("has room"),
    "beyond-ids": overlooking("nobody knows"),
    "uneven-columns": overlooking("columns do not fit"),
    "stray-block": overlooking("columns do not fit"),
    "unknown-fields": finding(_has_unknown_fields),
    "trace-context": finding(lambda _, plan: bool(plan.trace.traceparent)),
    "greedy": TokensOfTheEpoch,
    "feeds-back": FeedsBackAnOldToken,
    "chunked-prefill": LosesTheFirstTokenOfAChunk,
    "batching": TokensOfTheBatch,
    "replay": StartsAnewBehindGeneratedTokens,
    "prefix-sharing": ReadsNoBlockOfOthers,
    "block-reuse": FreesBlocksBehindThePlan,
    "samples-at-end": SamplesAtEachStep,
    "seeds": NoiseOfTheBatch,
    "seeds-differ": NoSeeds,
    "only-most-likely": NoFilters,
    "default-sampling": NoDefaults,
    "logit-bias": NoBias,
    "min-tokens": NoMask,
    "logprobs": LogprobsWithoutTheTokenItself,
    "prompt-logprobs": PromptLogprobsOneTooEarly,
}
"""By the name of the check that must see it."""
