"""From recorded plans to plans that an executor can run from nothing.

A recording may begin in the middle. What the executor's blocks held then is computed first, by preparation plans:

1. Rows that were alive begin anew with all ids they had and compute what they had computed.
2. A row that begins behind a cached prefix finds its blocks written, or a preparation row with the same ids and blocks
   writes them just before. A block counts as written when a row of this replay wrote into it: rows write blocks from
   their beginning, or behind blocks that are written.

A preparation row computes less than it has ids, so it samples nothing. Two rows of one plan never depend on each other:
a plan is closed before a row reads a block that is written in it.

A row feeds back only what it sampled in this replay; the first token after a row began anew stands in its ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenloom.api.v1 import common_pb2, executor_pb2, recording_pb2
from tokenloom.common.errors import SetupError

_FIRST_PREPARATION_ROW = 1 << 62


@dataclass(frozen=True)
class Limits:
    """What a plan may hold."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class ReplayPlan:
    """A plan to be sent.

    Args:
        recorded_step_id: the recorded plan that it repeats; None for a preparation.
        positions: where each row's next token would stand in its ids.
    """

    request: executor_pb2.ExecuteRequest
    recorded_step_id: int | None = None
    positions: dict[int, int] = field(default_factory=dict)


@dataclass
class ReplayRow:
    """A row of the replay.

    Args:
        new: what the executor is told when it begins.
        num_tokens: its ids, with those that plans in flight sample.
        block_ids: its table.
        is_known: the executor knows it.
        has_sampled: in this replay.
    """

    new: executor_pb2.NewRow
    num_tokens: int
    block_ids: list[int] = field(default_factory=list)
    is_known: bool = False
    has_sampled: bool = False


@dataclass
class _Part:
    """A row's share of a plan; `begins`: the executor hears of the row for the first time."""

    row: ReplayRow
    start: int
    end: int
    begins: bool
    new_block_ids: Sequence[int]
    feeds_back: bool = False

    @property
    def row_id(self) -> int:
        return self.row.new.row_id


class PlanMaker:
    """Makes the plans of one section, in order.

    Attributes:
        rows: alive, by id.
        num_prepared_rows: rows and prefixes that were computed before they were needed.
    """

    def __init__(self, limits: Limits, rows: Sequence[recording_pb2.RecordedRow]) -> None:
        self._limits = limits
        self._written: set[int] = set()
        self._ended: list[int] = []  # preparation rows that the next plan finishes
        self._next_step_id = 1
        self._next_preparation_row = _FIRST_PREPARATION_ROW
        self._skipped: set[int] = set()
        self._plans: list[ReplayPlan] = []
        self._open: list[_Part] = []  # of the preparation plan that is being filled
        self.rows: dict[int, ReplayRow] = {}
        self.num_prepared_rows = 0
        for recorded in rows:
            new = recorded.row
            new.ClearField("trace")
            row = ReplayRow(new, _num_ids(new), list(recorded.block_ids))
            if recorded.num_computed_tokens >= row.num_tokens:
                continue  # the results of plans in flight are missing
            self.rows[new.row_id] = row
            self._prepare(row, recorded.num_computed_tokens)
        self._close_plan()

    @property
    def num_skipped_rows(self) -> int:
        """Rows that could not be replayed, since the recording does not tell all of their tokens."""
        return len(self._skipped)

    def take_preparations(self) -> list[ReplayPlan]:
        """The preparation plans made since the last call, to be sent before everything else."""
        plans, self._plans = self._plans, []
        return plans

    def plans_for(self, recorded: executor_pb2.ExecuteRequest) -> list[ReplayPlan]:
        """What to send for a recorded plan: preparations, if there must be some, and the plan itself.

        Raises: SetupError if the executor cannot take so large a plan.
        """
        self._check_size(recorded)
        new = {row.row_id: row for row in recorded.new_rows}
        parts = self._parts(recorded, new)
        for part in parts:
            if part.row_id in new and part.start:
                self._prepare_prefix(part)
        self._close_plan()
        finished = [row_id for row_id in recorded.finished_row_ids if self._forget(row_id)]
        request = self._request(parts, finished)
        request.grammars.extend(recorded.grammars)
        positions = {part.row_id: part.end for part in parts}
        return [*self.take_preparations(), ReplayPlan(request, recorded.step_id, positions)]

    def _check_size(self, recorded: executor_pb2.ExecuteRequest) -> None:
        limits, num_tokens = self._limits, sum(recorded.num_scheduled_tokens)
        if num_tokens > limits.max_num_batched_tokens or len(recorded.row_ids) > limits.max_num_seqs:
            raise SetupError(
                f"recorded step {recorded.step_id} has {len(recorded.row_ids)} rows and {num_tokens} tokens; the "
                f"executor takes {limits.max_num_seqs} rows and {limits.max_num_batched_tokens} tokens"
            )

    def _forget(self, row_id: int) -> bool:
        """Whether the executor has to be told that a row ended."""
        row = self.rows.pop(row_id, None)
        return row is not None and row.is_known

    def _parts(self, recorded: executor_pb2.ExecuteRequest, new: dict[int, executor_pb2.NewRow]) -> list[_Part]:
        parts, at = [], 0
        columns = zip(
            recorded.row_ids,
            recorded.num_scheduled_tokens,
            recorded.num_computed_tokens,
            recorded.feeds_back,
            recorded.num_new_blocks,
            strict=True,
        )
        for row_id, num_scheduled, start, feeds_back, num_blocks in columns:
            block_ids = list(recorded.new_block_ids[at : at + num_blocks])
            at += num_blocks
            if row_id in new:
                new[row_id].ClearField("trace")
                self.rows[row_id] = ReplayRow(new[row_id], _num_ids(new[row_id]))
            row = self.rows.get(row_id)
            if row is None or start + num_scheduled > row.num_tokens:
                self._skip(row_id, start, block_ids)
                continue
            row.block_ids += block_ids
            parts.append(self._part(row, start, start + num_scheduled, block_ids, feeds_back and row.has_sampled))
        return parts

    def _part(
        self, row: ReplayRow, start: int, end: int, new_block_ids: Sequence[int] = (), feeds_back: bool = False
    ) -> _Part:
        begins, row.is_known = not row.is_known, True
        return _Part(row, start, end, begins, list(row.block_ids) if begins else new_block_ids, feeds_back)

    def _skip(self, row_id: int, start: int, new_block_ids: Sequence[int]) -> None:
        """Leave a row out; the blocks that it would have written do not hold what others may find there later."""
        self._skipped.add(row_id)
        self._written.difference_update(new_block_ids)
        if (row := self.rows.pop(row_id, None)) is not None:
            self._written.difference_update(row.block_ids[start // self._limits.block_size :])
            if row.is_known:
                self._ended.append(row_id)

    # --- preparation --------------------------------------------------------------------------------------------

    def _prepare_prefix(self, part: _Part) -> None:
        """Have the blocks written behind which a new row begins."""
        prefix = part.row.block_ids[: self._num_blocks(part.start)]
        if self._written.issuperset(prefix):
            self._wait_for(reads=prefix)
            return
        row_id, self._next_preparation_row = self._next_preparation_row, self._next_preparation_row + 1
        new = executor_pb2.NewRow(
            row_id=row_id,
            request_id=part.row.new.request_id,
            prompt_token_ids=_ids(part.row.new)[: part.start + 1],
            sampling=common_pb2.SamplingParams(temperature=0.0),
        )
        self._prepare(ReplayRow(new, part.start + 1, prefix), part.start)
        self._ended.append(row_id)

    def _prepare(self, row: ReplayRow, end: int) -> None:
        """Compute a row's tokens up to `end`, behind those whose blocks are written."""
        table = row.block_ids[: self._num_blocks(end)]
        num_written = next((i for i, block in enumerate(table) if block not in self._written), len(table))
        start = min(num_written * self._limits.block_size, end)
        self._wait_for(reads=table[:num_written], writes=table[num_written:])
        self.num_prepared_rows += start < end
        while start < end:
            budget = self._limits.max_num_batched_tokens - sum(part.end - part.start for part in self._open)
            if not budget or len(self._open) >= self._limits.max_num_seqs:
                self._close_plan()
                continue
            stop = min(end, start + budget)
            self._open.append(self._part(row, start, stop))
            start = stop  # what is left goes into a later plan: this one is full
        self._written.update(table)

    def _wait_for(self, reads: Sequence[int], writes: Sequence[int] = ()) -> None:
        """Close the open plan if it writes one of these blocks, or reads one that is going to be written.

        A block can be written by two rows: when several rows computed the same tokens, each has blocks of its own, but
        their tables go on with the same ones if only one of them was found by its name later.
        """
        touched = {*reads, *writes}
        for part in self._open:
            table = part.row.block_ids[: self._num_blocks(part.end)]
            if not self._blocks_of(part).isdisjoint(touched) or not set(table).isdisjoint(writes):
                return self._close_plan()

    def _close_plan(self) -> None:
        if self._open:
            parts, self._open = self._open, []
            self._plans.append(ReplayPlan(self._request(parts, [])))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)

    def _blocks_of(self, part: _Part) -> set[int]:
        """Blocks that a part writes."""
        return set(part.row.block_ids[part.start // self._limits.block_size : self._num_blocks(part.end)])

    # --- plans --------------------------------------------------------------------------------------------------

    def _request(self, parts: Sequence[_Part], finished: Sequence[int]) -> executor_pb2.ExecuteRequest:
        planned = {part.row_id for part in parts}
        ended = [row_id for row_id in self._ended if row_id not in planned]
        self._ended = [row_id for row_id in self._ended if row_id in planned]
        step_id, self._next_step_id = self._next_step_id, self._next_step_id + 1
        request = executor_pb2.ExecuteRequest(
            step_id=step_id,
            finished_row_ids=[*ended, *finished],
            new_rows=[part.row.new for part in parts if part.begins],
            row_ids=[part.row_id for part in parts],
            num_scheduled_tokens=[part.end - part.start for part in parts],
            num_computed_tokens=[part.start for part in parts],
            feeds_back=[part.feeds_back for part in parts],
            num_new_blocks=[len(part.new_block_ids) for part in parts],
            new_block_ids=[block_id for part in parts for block_id in part.new_block_ids],
        )
        for part in parts:
            self._written |= self._blocks_of(part)
            if part.end == part.row.num_tokens:
                part.row.has_sampled = True
                part.row.num_tokens += 1
        return request


def _ids(row: executor_pb2.NewRow) -> list[int]:
    return [*row.prompt_token_ids, *row.generated_token_ids]


def _num_ids(row: executor_pb2.NewRow) -> int:
    return len(row.prompt_token_ids) + len(row.generated_token_ids)
