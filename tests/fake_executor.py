"""An executor without a model: the protocol in full, over a pure function instead of logits.

The next token depends on every token so far as the row finds them in its KV blocks, so that a block that was never
written, or by another row, changes the output. Penalties are not modelled.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenloom.api.v1 import common_pb2, executor_pb2, executor_pb2_grpc
from tokenloom.common.errors import FailedPrecondition, InvalidArgument, TokenloomError, Unavailable, to_proto

_UNWRITTEN = -1
_LOG_RATIO = 0.05  # of the probabilities of two tokens that follow each other in rank
_FIRST_LOGPROB = math.log(1.0 - math.exp(-_LOG_RATIO))


def next_token(token_ids: Sequence[int], vocab_size: int) -> int:
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


@dataclass
class FakeRow:
    """A row that the fake executor knows."""

    new: executor_pb2.NewRow
    ids: list[int]
    failure: common_pb2.Error | None = None
    blocks: list[int] = field(default_factory=list)
    num_computed: int | None = None
    has_sampled: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.new.prompt_token_ids)


@dataclass
class PlannedRow:
    """A row's part in a plan."""

    row_id: int
    num_scheduled: int
    start: int
    feeds_back: bool
    new_blocks: list[int]

    @property
    def end(self) -> int:
        return self.start + self.num_scheduled


def planned_rows(plan: executor_pb2.ExecuteRequest) -> Iterator[PlannedRow]:
    at = 0
    columns = zip(
        plan.row_ids,
        plan.num_scheduled_tokens,
        plan.num_computed_tokens,
        plan.feeds_back,
        plan.num_new_blocks,
        strict=True,
    )
    for row_id, num_scheduled, start, feeds_back, num_new_blocks in columns:
        yield PlannedRow(row_id, num_scheduled, start, feeds_back, list(plan.new_block_ids[at : at + num_new_blocks]))
        at += num_new_blocks


class FakeExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """An executor without a model. It keeps the protocol's rules and remembers every plan.

    A plan that breaks a rule is a step error and goes into `violations`: to the scheduler alone it would only look like
    failed requests.

    Args:
        hold_back: a result is sent only when so many later plans have arrived; with the last plans, when no more come,
            only `release()` lets them go.
        step_s: how long a step takes.

    Attributes:
        may_beat: heartbeats are sent, if the scheduler asked for them.
        progress: what they tell; it rises with every plan.
        is_draining: heartbeats say that it is about to stop, and no epoch can begin.
    """

    may_beat = True
    is_draining = False

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
            block_bytes=8 * block_size,
            max_num_seqs=64,
            max_num_batched_tokens=256,
            max_plans_in_flight=3,
            max_num_logprobs=20,
            batch_invariant=True,
            eos_token_ids=[1],
            default_sampling=common_pb2.SamplingParams(temperature=0.0),
            description="fake executor",
        )
        self.hold_back = hold_back
        self.step_s = step_s
        self.plans: list[executor_pb2.ExecuteRequest] = []
        self.violations: list[str] = []
        self.most_waiting = 0
        self.row_errors: dict[str, common_pb2.Error] = {}
        self.step_errors: deque[common_pb2.Error] = deque()
        self.counter = 0
        self.owner: asyncio.Queue[Any] | None = None
        self.is_epoch_over = False
        self.rows: dict[int, FakeRow] = {}
        self.kv: dict[int, list[int]] = {}
        self.num_blocks = 0
        self.heartbeat_s = 0.0
        self.progress = 0
        self._num_epochs_before = 0

    # --- what tests look at -------------------------------------------------------------------------------------

    def restart_counting(self) -> None:
        """The epochs so far were meant."""
        self._num_epochs_before = self.counter - 1

    @property
    def num_epochs(self) -> int:
        return self.counter - self._num_epochs_before

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    # --- epochs and streams -------------------------------------------------------------------------------------

    async def GetCapabilities(self, request: Any, context: Any) -> executor_pb2.GetCapabilitiesResponse:
        if self.is_draining:
            raise Unavailable("the executor is about to stop", reason="DRAINING")
        return self.capabilities

    async def Initialize(
        self, request: executor_pb2.InitializeRequest, context: Any
    ) -> executor_pb2.InitializeResponse:
        most = self.capabilities.max_num_blocks
        if not 2 <= request.num_blocks <= most:
            raise InvalidArgument(f"{request.num_blocks} blocks; from 2 to {most} fit", field="num_blocks")
        self.void_stream()
        self.counter += 1
        self.is_epoch_over = False
        self.heartbeat_s = request.heartbeat_ms / 1000
        self.num_blocks = request.num_blocks
        self.rows.clear()
        self.kv.clear()
        return executor_pb2.InitializeResponse(epoch=self.epoch())

    def epoch(self) -> executor_pb2.Epoch:
        return executor_pb2.Epoch(boot_id=self.capabilities.boot_id, counter=self.counter)

    def void_stream(self) -> None:
        """End the stream of the epoch so far."""
        if self.owner is not None:
            self.owner.put_nowait(FailedPrecondition("a new epoch has begun", reason="STALE_EPOCH"))
            self.owner = None

    def end_epoch(self) -> None:
        """The stream of this epoch ended."""
        self.owner = None
        self.is_epoch_over = True
        self.rows.clear()

    def check_epoch(self, plan: executor_pb2.ExecuteRequest, stream: asyncio.Queue[Any]) -> None:
        if plan.epoch != self.epoch() or self.is_epoch_over:
            raise FailedPrecondition("the plan is of another epoch", reason="STALE_EPOCH")
        if self.owner not in (None, stream):
            raise FailedPrecondition("another stream runs the plans of this epoch", reason="EPOCH_TAKEN")
        self.owner = stream

    async def Execute(
        self, request_iterator: AsyncIterator[executor_pb2.ExecuteRequest], context: Any
    ) -> AsyncIterator[executor_pb2.ExecuteResponse]:
        results = self._results(request_iterator)
        heartbeat_s = self.heartbeat_s or None
        if heartbeat_s and self.may_beat:
            yield self.heartbeat()
        pending: asyncio.Future[Any] | None = None
        has_said_so = self.is_draining
        try:
            while True:
                if heartbeat_s and self.is_draining and not has_said_so:
                    has_said_so = True
                    yield self.heartbeat()
                pending = pending or asyncio.ensure_future(anext(results, None))
                done, _ = await asyncio.wait((pending,), timeout=heartbeat_s)
                if not done and self.may_beat:
                    yield self.heartbeat()
                elif done:
                    if (result := pending.result()) is None:
                        return
                    pending = None
                    yield result
        finally:
            if pending is not None and not pending.done():
                pending.cancel()
                await asyncio.wait((pending,))
            await results.aclose()

    def heartbeat(self) -> executor_pb2.ExecuteResponse:
        heartbeat = executor_pb2.Heartbeat(progress=self.progress, draining=self.is_draining)
        return executor_pb2.ExecuteResponse(heartbeat=heartbeat)

    async def _results(
        self, request_iterator: AsyncIterator[executor_pb2.ExecuteRequest]
    ) -> AsyncGenerator[executor_pb2.ExecuteResponse, None]:
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, arrived))
        waiting: deque[executor_pb2.ExecuteRequest] = deque()
        is_open = True
        last_step_id: int | None = None
        try:
            while is_open or waiting:
                while is_open and (len(waiting) <= self.hold_back or not arrived.empty()):
                    plan = await arrived.get()
                    if isinstance(plan, FailedPrecondition):
                        raise plan
                    if plan is None:
                        is_open = False
                    else:
                        waiting.append(plan)
                        self.most_waiting = max(self.most_waiting, len(waiting))
                if waiting:
                    if self.step_s:
                        await asyncio.sleep(self.step_s)
                    plan = self.take(waiting)
                    self.check_epoch(plan, arrived)
                    self.progress += 1
                    yield self.run(plan, last_step_id)
                    last_step_id = plan.step_id
        finally:
            if self.owner is arrived:
                self.end_epoch()
            reader.cancel()

    def take(self, waiting: deque[executor_pb2.ExecuteRequest]) -> executor_pb2.ExecuteRequest:
        """The plan to run next."""
        return waiting.popleft()

    async def _read(self, plans: AsyncIterator[executor_pb2.ExecuteRequest], arrived: asyncio.Queue[Any]) -> None:
        async for plan in plans:
            self.plans.append(plan)
            arrived.put_nowait(plan)
        arrived.put_nowait(None)

    # --- plans --------------------------------------------------------------------------------------------------

    def run(self, plan: executor_pb2.ExecuteRequest, last_step_id: int | None) -> executor_pb2.ExecuteResponse:
        response = executor_pb2.ExecuteResponse(step_id=plan.step_id)
        for row_id in plan.finished_row_ids:
            self._note(row_id in self.rows, plan, f"row {row_id} is finished and unknown")
            self.forget(row_id)
        fault = self.fault_of(plan)
        if last_step_id is not None and plan.step_id != last_step_id + 1:
            fault = f"it follows plan {last_step_id}"
        if fault:
            self._note(False, plan, fault)
            error = InvalidArgument(f"plan {plan.step_id}: {fault}", reason="MALFORMED_PLAN")
            response.step_error.CopyFrom(to_proto(error))
            return response
        for new in plan.new_rows:
            ids = [*new.prompt_token_ids, *new.generated_token_ids]
            self.rows[new.row_id] = FakeRow(new, ids, self.fault_of_row(new))
        if self.step_errors:
            error_proto = self.step_errors.popleft()
            response.step_error.CopyFrom(error_proto)
            for planned in planned_rows(plan):
                self.advance(planned).failure = error_proto
            return response
        for planned in planned_rows(plan):
            self.run_row(plan, planned, response)
        return response

    def forget(self, row_id: int) -> None:
        self.rows.pop(row_id, None)

    def _note(self, is_kept: bool, plan: executor_pb2.ExecuteRequest, rule: str) -> None:
        if not is_kept:
            self.violations.append(f"plan {plan.step_id}: {rule}")

    def fault_of(self, plan: executor_pb2.ExecuteRequest) -> str:
        """What is wrong with a plan's form; empty if nothing is."""
        limits = self.capabilities
        num_rows = len(plan.row_ids)
        columns = (plan.num_scheduled_tokens, plan.num_computed_tokens, plan.feeds_back, plan.num_new_blocks)
        if any(len(column) != num_rows for column in columns) or sum(plan.num_new_blocks) != len(plan.new_block_ids):
            return "its columns do not fit together"
        new = {row.row_id: row for row in plan.new_rows}
        if again := self.rows.keys() & new.keys():
            return f"rows {sorted(again)} are new and known"
        if len(set(plan.row_ids)) < num_rows:
            return "a row is in it twice"
        if idle := new.keys() - set(plan.row_ids):
            return f"rows {sorted(idle)} are new and compute nothing"
        if num_rows > limits.max_num_seqs:
            return f"{num_rows} rows; at most {limits.max_num_seqs}"
        if (num_tokens := sum(plan.num_scheduled_tokens)) > limits.max_num_batched_tokens:
            return f"{num_tokens} tokens; at most {limits.max_num_batched_tokens}"
        writers: dict[int, int] = {}
        for planned in planned_rows(plan):
            row = self.rows.get(planned.row_id)
            if row is None and planned.row_id not in new:
                return f"row {planned.row_id} is unknown"
            if row is None:
                brought = new[planned.row_id]
                ids = [*brought.prompt_token_ids, *brought.generated_token_ids]
                row = FakeRow(brought, ids, self.fault_of_row(brought))
            if fault := self.fault_of_part(planned, row):
                return f"row {planned.row_id} {fault}"
            if row.failure is None:
                table = [*row.blocks, *planned.new_blocks]
                first, last = planned.start // limits.block_size, (planned.end - 1) // limits.block_size
                for block in table[first : last + 1]:
                    if writers.setdefault(block, planned.row_id) != planned.row_id:
                        return f"rows {writers[block]} and {planned.row_id} both write into block {block}"
        return ""

    def fault_of_part(self, planned: PlannedRow, row: FakeRow) -> str:
        """What is wrong with a row's part in a plan; empty if nothing is."""
        limits = self.capabilities
        table = [*row.blocks, *planned.new_blocks]
        if planned.num_scheduled < 1:
            return "computes nothing"
        if planned.end > limits.max_model_len:
            return f"reaches token {planned.end} of at most {limits.max_model_len}"
        if any(not 0 < block < self.num_blocks for block in planned.new_blocks) or len(set(table)) < len(table):
            return f"has blocks {table} of {self.num_blocks}"
        if planned.end > len(table) * limits.block_size:
            return f"has room for {len(table) * limits.block_size} tokens and computes up to {planned.end}"
        if row.failure is not None:
            return ""
        if row.num_computed not in (None, planned.start):
            return f"begins at token {planned.start} and has computed {row.num_computed}"
        if planned.end > len(row.ids):
            return "computes tokens that nobody knows"
        if planned.feeds_back and not (row.has_sampled and planned.end == len(row.ids)):
            return "feeds back too early"
        return ""

    def fault_of_row(self, new: executor_pb2.NewRow) -> common_pb2.Error | None:
        """What is wrong inside a new row, which fails alone; None if nothing is."""
        vocab_size = self.capabilities.vocab_size
        error: TokenloomError | None = None
        if not new.prompt_token_ids:
            error = InvalidArgument("the prompt is empty", field="prompt_token_ids")
        elif max([*new.prompt_token_ids, *new.generated_token_ids]) >= vocab_size:
            error = InvalidArgument("a token is outside the vocabulary", field="prompt_token_ids")
        elif not self.is_greedy(new.sampling) and not new.sampling.HasField("seed"):
            error = InvalidArgument("a row that samples needs a seed", field="seed")
        return None if error is None else to_proto(error)

    # --- rows ---------------------------------------------------------------------------------------------------

    def run_row(
        self, plan: executor_pb2.ExecuteRequest, planned: PlannedRow, response: executor_pb2.ExecuteResponse
    ) -> None:
        row = self.advance(planned)
        if row.failure is None:
            row.failure = self.row_errors.get(row.new.request_id)
        if row.failure is not None:
            response.row_errors.add(row_id=planned.row_id, error=row.failure)
            return
        self.write(row, planned.start, planned.end)
        self.add_prompt_logprobs(row, planned.start, planned.end, response)
        if self.samples(row, planned):
            seen = self.read(row, planned.end)
            self._note(seen == row.ids[: planned.end], plan, f"row {planned.row_id} finds other tokens in its blocks")
            self.sample(row, seen, response)

    def advance(self, planned: PlannedRow) -> FakeRow:
        row = self.rows[planned.row_id]
        row.blocks += planned.new_blocks
        row.num_computed = planned.end
        return row

    def samples(self, row: FakeRow, planned: PlannedRow) -> bool:
        return planned.end == len(row.ids)

    def write(self, row: FakeRow, start: int, end: int) -> None:
        """Fill the KV of a range of a row's tokens."""
        size = self.capabilities.block_size
        for position in range(start, end):
            block = self.kv.setdefault(row.blocks[position // size], [_UNWRITTEN] * size)
            block[position % size] = row.ids[position]

    def read(self, row: FakeRow, end: int) -> list[int]:
        """The tokens before `end` as attention finds them."""
        size = self.capabilities.block_size
        unwritten = [_UNWRITTEN] * size
        return [token for block in row.blocks[: -(-end // size)] for token in self.kv.get(block, unwritten)][:end]

    def sample(self, row: FakeRow, seen: list[int], response: executor_pb2.ExecuteResponse) -> None:
        most_likely = next_token(seen, self.capabilities.vocab_size)
        token_id = self.pick(row, self.draw(row, seen, most_likely))
        row.ids.append(token_id)
        row.has_sampled = True
        response.row_ids.append(row.new.row_id)
        response.num_sampled.append(1)
        response.sampled_token_ids.append(token_id)
        sampling = row.new.sampling
        num_logprobs = sampling.num_logprobs if sampling.HasField("num_logprobs") else None
        entries = self.logprob_entries(token_id, most_likely, num_logprobs)
        response.num_logprobs_per_token.append(len(entries))
        response.logprob_token_ids.extend(token for token, _ in entries)
        response.logprobs.extend(logprob for _, logprob in entries)

    def is_greedy(self, sampling: common_pb2.SamplingParams) -> bool:
        default = self.capabilities.default_sampling.temperature
        return (sampling.temperature if sampling.HasField("temperature") else default) < 1e-5

    def draw(self, row: FakeRow, seen: list[int], most_likely: int) -> int:
        """The token that noise ranks first; without noise, or if a filter leaves one token, the most likely one."""
        sampling = row.new.sampling
        leaves_one = sampling.top_k == 1 or (sampling.HasField("top_p") and sampling.top_p == 0) or sampling.min_p == 1
        if self.is_greedy(sampling) or leaves_one:
            return most_likely
        return next_token([*seen, self.seed_of(row) % (1 << 31), len(seen)], self.capabilities.vocab_size)

    def seed_of(self, row: FakeRow) -> int:
        return row.new.sampling.seed

    def pick(self, row: FakeRow, first: int) -> int:
        """The best token after the min_tokens mask and the bias; tokens behind `first` are less and less likely."""
        vocab_size, bias = self.capabilities.vocab_size, self.bias_of(row)
        masked = self.masked(row)
        plain = (first + i for i in range(vocab_size))
        best = next(t for token in plain if (t := token % vocab_size) not in masked and t not in bias)
        candidates = [best, *(token for token in bias if token not in masked)]
        return max(candidates, key=lambda token: bias.get(token, 0.0) + self.logprob(token, first))

    def masked(self, row: FakeRow) -> set[int]:
        if len(row.ids) - row.num_prompt >= row.new.stop.min_tokens:
            return set()
        return {*self.capabilities.eos_token_ids, *row.new.stop.stop_token_ids}

    def bias_of(self, row: FakeRow) -> dict[int, float]:
        return dict(row.new.sampling.logit_bias)

    def logprob(self, token_id: int, first: int) -> float:
        return _FIRST_LOGPROB - _LOG_RATIO * ((token_id - first) % self.capabilities.vocab_size)

    def logprob_entries(self, token_id: int, first: int, num: int | None) -> list[tuple[int, float]]:
        """The token itself, then the `num` most likely; none if nobody asked."""
        if num is None:
            return []
        ranked = [(first + i) % self.capabilities.vocab_size for i in range(num)]
        return [(token, self.logprob(token, first)) for token in (token_id, *ranked)]

    def add_prompt_logprobs(self, row: FakeRow, start: int, end: int, response: executor_pb2.ExecuteResponse) -> None:
        """Of the prompt tokens that follow the computed ones, if the row asked."""
        end = min(end, row.num_prompt - 1)
        if not row.new.sampling.HasField("num_prompt_logprobs") or end <= start:
            return
        num = row.new.sampling.num_prompt_logprobs
        run = response.prompt_logprobs.add(row_id=row.new.row_id, first_position=start + 1, num_per_token=1 + num)
        for position in range(start + 1, end + 1):
            first = next_token(row.ids[:position], self.capabilities.vocab_size)
            entries = self.logprob_entries(row.ids[position], first, num)
            run.token_ids.extend(token for token, _ in entries)
            run.logprobs.extend(logprob for _, logprob in entries)
