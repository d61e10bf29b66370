"""What checks work with: epochs of the executor under test, rows, plans and results by hand.

`Epoch.part` plans a row's next tokens and counts on it, like a scheduler: blocks come from a plain stack, ids and
positions are kept here. Checks that want a faulty plan change the message before it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenloom.api.v1 import common_pb2, executor_pb2
from tokenloom.common.executor_client import ExecutorClient
from tokenloom.conformance.results import Failed, Result, Skipped, result_of

GREEDY = common_pb2.SamplingParams(temperature=0.0)
_USUAL_BLOCKS = 256
_SPARE_BLOCKS = 16


@dataclass
class Row:
    """A row that the check drives.

    Args:
        new: what the executor is told when it begins.
        num_tokens: its ids, with those that plans in flight sample.
        num_computed: where its next plan begins.
        token_ids: what it sampled, as far as results came.
        gaps: difference of the logprobs of the two most likely tokens at each of them, if the row asked for two.
    """

    new: executor_pb2.NewRow
    num_tokens: int
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_known: bool = False
    has_sampled: bool = False
    token_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def row_id(self) -> int:
        """As the executor knows it."""
        return self.new.row_id


@dataclass
class Part:
    """A row's share of a plan."""

    row: Row
    start: int
    end: int
    new_block_ids: list[int]
    begins: bool
    feeds_back: bool
    samples: bool


class Lab:
    """The executor under test.

    Args:
        near_tie: see ConformanceSettings.
    """

    def __init__(self, client: ExecutorClient, can: executor_pb2.GetCapabilitiesResponse, near_tie: float) -> None:
        self.client = client
        self.can = can
        self._near_tie = near_tie
        self._epochs: list[Epoch] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that checks lay out."""
        for_one_plan = self.can.max_num_seqs + self.can.max_num_batched_tokens // self.can.block_size
        return min(self.can.max_num_blocks, max(_USUAL_BLOCKS, for_one_plan + _SPARE_BLOCKS))

    async def epoch(self, heartbeat_ms: int = 0) -> Epoch:
        """Begin an epoch and open a stream in it."""
        epoch = Epoch(self, await self.client.initialize(self.num_blocks, heartbeat_ms))
        self._epochs.append(epoch)
        return epoch

    def end(self) -> None:
        """End the streams that checks left open."""
        for epoch in self._epochs:
            epoch.stream.cancel()
        self._epochs.clear()

    def prompt(self, num_tokens: int, salt: int = 0) -> list[int]:
        """Token ids that depend on the salt from the first one on."""
        return [(salt * 7919 + 104729 * (i + 1) + 31 * i * i) % self.can.vocab_size for i in range(num_tokens)]

    @property
    def usual_prompt_tokens(self) -> int:
        """A prompt of two full blocks and a part of a third."""
        return min(2 * self.can.block_size + max(1, self.can.block_size // 2), self.can.max_model_len // 2)

    def need_rows(self, num_rows: int) -> None:
        """Raise Skipped unless plans may have so many rows."""
        if self.can.max_num_seqs < num_rows:
            raise Skipped(f"the executor takes {self.can.max_num_seqs} rows, the check needs {num_rows}")

    def need_logprobs(self, num: int) -> None:
        """Raise Skipped unless rows may ask for so many logprobs."""
        if self.can.max_num_logprobs < num:
            raise Skipped(f"the executor gives {self.can.max_num_logprobs} logprobs, the check needs {num}")

    def watched(self, **sampling: object) -> common_pb2.SamplingParams:
        """Greedy, with the logprobs that tell near ties."""
        num = min(2, self.can.max_num_logprobs)
        return common_pb2.SamplingParams(**{"temperature": 0.0, "num_logprobs": num, **sampling})  # type: ignore[arg-type]

    def expect_same(self, reference: Row, other: Sequence[int], what: str, offset: int = 0) -> None:
        """Compare tokens with those of a watched row from its token `offset` on.

        Raises: Failed if they differ; Skipped if they may, because the executor is not batch invariant and the two most
            likely tokens were nearly equal.
        """
        expected = reference.token_ids[offset:]
        if expected == list(other):
            return
        at = next((i for i, (a, b) in enumerate(zip(expected, other, strict=False)) if a != b), None)
        if at is None:
            raise Failed(f"{what}: {len(other)} tokens instead of {len(expected)}")
        told = f"{what}: token {at} is {other[at]} instead of {expected[at]}"
        if not self.can.batch_invariant:
            gap = reference.gaps[offset + at] if reference.gaps else None
            if gap is None:
                raise Skipped(f"{told}; the executor is not batch invariant, and how near a tie it was is not known")
            if gap < self._near_tie:
                raise Skipped(f"{told}; the executor is not batch invariant, and the two best were {gap:.2g} apart")
        raise Failed(told)


class Epoch:
    """An epoch with its stream; hands out step ids, row ids and blocks."""

    def __init__(self, lab: Lab, epoch: executor_pb2.Epoch) -> None:
        self._can = lab.can
        self._free = list(range(lab.num_blocks - 1, 0, -1))
        self._next_row_id = 1
        self._next_step_id = 1
        self.epoch = epoch
        self.stream = lab.client.stream()

    def row(
        self,
        prompt: Sequence[int],
        *,
        generated: Sequence[int] = (),
        sampling: common_pb2.SamplingParams = GREEDY,
        stop: common_pb2.StopConditions | None = None,
    ) -> Row:
        """A row that the executor does not know yet."""
        row_id, self._next_row_id = self._next_row_id, self._next_row_id + 1
        new = executor_pb2.NewRow(
            row_id=row_id,
            request_id=f"conformance-{row_id}",
            prompt_token_ids=prompt,
            generated_token_ids=generated,
            sampling=sampling,
            stop=stop,
        )
        return Row(new, len(prompt) + len(generated))

    def blocks(self, count: int) -> list[int]:
        """Blocks that nobody has."""
        if count > len(self._free):
            raise Skipped(f"the check needs more than the {self._can.max_num_blocks} blocks that the executor has")
        return [self._free.pop() for _ in range(count)]

    def part(self, row: Row, num_tokens: int | None = None) -> Part:
        """Plan a row's next tokens, all that it has by default, with the blocks they need."""
        start = row.num_computed
        end = row.num_tokens if num_tokens is None else start + num_tokens
        num_blocks = -(-end // self._can.block_size)
        new_block_ids = self.blocks(max(0, num_blocks - len(row.block_ids)))
        row.block_ids += new_block_ids
        samples = end == row.num_tokens
        begins = not row.is_known
        told = list(row.block_ids) if begins else new_block_ids
        part = Part(row, start, end, told, begins, samples and row.has_sampled, samples)
        row.num_computed = end
        row.is_known = True
        if samples:
            row.num_tokens += 1
            row.has_sampled = True
        return part

    def plan(self, parts: Sequence[Part], finished: Iterable[int] = ()) -> executor_pb2.ExecuteRequest:
        """The message of a plan."""
        step_id, self._next_step_id = self._next_step_id, self._next_step_id + 1
        return executor_pb2.ExecuteRequest(
            epoch=self.epoch,
            step_id=step_id,
            finished_row_ids=finished,
            new_rows=[part.row.new for part in parts if part.begins],
            row_ids=[part.row.row_id for part in parts],
            num_scheduled_tokens=[part.end - part.start for part in parts],
            num_computed_tokens=[part.start for part in parts],
            feeds_back=[part.feeds_back for part in parts],
            num_new_blocks=[len(part.new_block_ids) for part in parts],
            new_block_ids=[block_id for part in parts for block_id in part.new_block_ids],
        )

    async def ask(self, plan: executor_pb2.ExecuteRequest) -> Result:
        """Send a plan and wait for its result; none may be in flight."""
        await self.stream.send(plan)
        return await self.result(plan.step_id)

    async def result(self, step_id: int) -> Result:
        """The next result, which must be that of a step."""
        response = await self.stream.receive()
        if response.step_id != step_id:
            raise Failed(f"the result of plan {response.step_id} came where that of plan {step_id} was due")
        return result_of(response)

    async def step(self, *parts: Part, finished: Iterable[int] = ()) -> Result:
        """Run a plan that must succeed, and keep what its rows sampled."""
        result = await self.ask(self.plan(parts, finished))
        self.apply(result, parts)
        return result

    def apply(self, result: Result, parts: Sequence[Part]) -> None:
        """Keep what rows sampled.

        Raises: Failed if the plan or one of the rows failed, or rows sampled that should not, or the other way round.
        """
        if result.step_error is not None:
            raise Failed(f"plan {result.step_id} failed: {result.step_error.message}")
        if result.row_errors:
            row_id, error = next(iter(result.row_errors.items()))
            raise Failed(f"row {row_id} failed: {error.message}")
        should = {part.row.row_id for part in parts if part.samples}
        if should != result.sampled.keys():
            raise Failed(f"rows {sorted(result.sampled)} sampled instead of {sorted(should)}")
        for part in parts:
            if part.samples:
                sampled = result.sampled[part.row.row_id]
                part.row.token_ids += sampled.token_ids
                if len(sampled.logprobs) >= 3:
                    part.row.gaps.append(sampled.logprobs[1] - sampled.logprobs[2])

    async def generate(self, rows: Sequence[Row], count: int, *, depth: int = 1, chunk: int | None = None) -> None:
        """Let rows sample `count` tokens more each.

        Args:
            depth: plans in flight.
            chunk: most tokens that a row computes in a plan; None: as many as a plan may have.
        """
        left = {row.row_id: count for row in rows}
        in_flight: list[tuple[int, list[Part]]] = []
        while any(left.values()) or in_flight:
            while len(in_flight) < depth and (parts := self._next_parts(rows, left, chunk)):
                plan = self.plan(parts)
                await self.stream.send(plan)
                in_flight.append((plan.step_id, parts))
            step_id, parts = in_flight.pop(0)
            self.apply(await self.result(step_id), parts)

    def _next_parts(self, rows: Sequence[Row], left: dict[int, int], chunk: int | None) -> list[Part]:
        parts: list[Part] = []
        budget = self._can.max_num_batched_tokens
        for row in rows:
            num_tokens = min(row.num_tokens - row.num_computed, budget, chunk or budget)
            if left[row.row_id] and num_tokens and len(parts) < self._can.max_num_seqs:
                part = self.part(row, num_tokens)
                parts.append(part)
                budget -= num_tokens
                left[row.row_id] -= part.samples
        return parts

    def behind(self, row: Row, donor: Row, num_blocks: int) -> Row:
        """Let a new row begin behind another row's first blocks."""
        row.block_ids = donor.block_ids[:num_blocks]
        row.num_computed = num_blocks * self._can.block_size
        return row


def changed(plan: executor_pb2.ExecuteRequest, **fields: object) -> executor_pb2.ExecuteRequest:
    """A copy of a plan with other values in these fields."""
    copy = executor_pb2.ExecuteRequest()
    copy.CopyFrom(plan)
    for name, value in fields.items():
        copy.ClearField(name)  # type: ignore[arg-type]
        getattr(copy, name).extend(value)
    return copy
