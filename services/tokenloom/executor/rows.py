"""The rows that an executor keeps between plans, and the check of every plan against them.

Rules
1. `RowTable.apply` forgets the finished rows first, then checks the plan wholly and only then changes anything: a plan
   that is malformed leaves all other rows as they were.
2. What is wrong with the plan's form (an unknown row, a block outside the memory, too many tokens) is the scheduler's
   fault and fails the plan. What is wrong inside a new row (a token outside the vocabulary) fails that row alone.
3. A failed row stays known and failed until the scheduler finishes it; plans that were in flight may still name it.
4. A row's ids grow by one when it samples. Plans run in order, so a row that feeds back finds its token there.
5. A row's plans follow one another without a gap: only its first one may begin behind tokens that it did not compute
   itself (a prefix hit). Memory that it has not written would be another row's.
6. No block is twice in a table, and no two rows of a plan write into the same block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tokenloom.common.errors import InvalidArgument, TokenloomError
from tokenloom.executor.plan import NewRow, Plan, PlannedRow, SamplingParams
from tokenloom.executor.row_checks import Limits, fault_of
from tokenloom.executor.sampler import PenaltyCounts

_ROWS_KEPT_PER_SEQ = 4


@dataclass
class Row:
    """One row.

    Args:
        token_ids: prompt, generated and sampled ids.
        block_ids: the block table, in order.
        num_computed: tokens whose KV is written; None before its first plan, which may begin behind a cached prefix.
        failure: why nothing more is computed for it; None while it is good.
        counts: kept if its parameters have penalties.
    """

    row_id: int
    request_id: str
    num_prompt_tokens: int
    token_ids: list[int]
    sampling: SamplingParams
    block_ids: list[int] = field(default_factory=list)
    num_computed: int | None = None
    counts: PenaltyCounts | None = None
    failure: TokenloomError | None = None
    has_sampled: bool = False

    def append(self, token_id: int) -> None:
        """Add the token that it sampled."""
        self.token_ids.append(token_id)
        self.has_sampled = True
        if self.counts is not None:
            self.counts.add(token_id)


@dataclass(frozen=True)
class ScheduledRow:
    """A row and the range of its tokens that a plan computes: `first` to `end`, exclusive."""

    row: Row
    first: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return self.end - self.first

    @property
    def is_sampling(self) -> bool:
        """The range reaches the end of the row's ids."""
        return self.end == len(self.row.token_ids)


class RowTable:
    """All rows of an epoch."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self._limits = limits
        self._device = device
        self._rows: dict[int, Row] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._rows)

    def begin_epoch(self, num_blocks: int) -> None:
        """Forget all rows; block ids are below `num_blocks` from now on."""
        self._rows.clear()
        self._num_blocks = num_blocks

    def apply(self, plan: Plan) -> list[ScheduledRow]:
        """Bring the rows up to date with a plan.

        Returns: what the plan computes, in its order, failed rows included.

        Raises: InvalidArgument (reason MALFORMED_PLAN) if the plan does not fit; only finished rows are gone then.
        """
        for row_id in plan.finished_row_ids:
            self._rows.pop(row_id, None)
        known = dict(self._rows)
        for new in plan.new_rows:
            if new.row_id in known:
                raise _malformed(plan, f"row {new.row_id} is new and known already")
            known[new.row_id] = self._make(new)
        self._check(plan, known)
        self._rows = known
        scheduled = []
        for planned in plan.rows:
            row = known[planned.row_id]
            row.block_ids.extend(planned.new_block_ids)
            row.num_computed = planned.end
            scheduled.append(ScheduledRow(row, planned.num_computed_tokens, planned.end))
        return scheduled

    def _make(self, new: NewRow) -> Row:
        row = Row(
            row_id=new.row_id,
            request_id=new.request_id,
            num_prompt_tokens=len(new.prompt_token_ids),
            token_ids=[*new.prompt_token_ids, *new.generated_token_ids],
            sampling=new.sampling,
            failure=fault_of(new, self._limits),
        )
        if row.failure is None and new.sampling.has_penalties:
            vocab_size = self._limits.vocab_size
            row.counts = PenaltyCounts(new.prompt_token_ids, new.generated_token_ids, vocab_size, self._device)
        return row

    def _check(self, plan: Plan, known: dict[int, Row]) -> None:
        limits = self._limits
        planned_ids = {planned.row_id for planned in plan.rows}
        if len(planned_ids) < len(plan.rows):
            raise _malformed(plan, "a row stands in it twice")
        for new in plan.new_rows:
            if new.row_id not in planned_ids:
                raise _malformed(plan, f"row {new.row_id} is new and computes nothing")
        if len(plan.rows) > limits.max_num_seqs:
            raise _malformed(plan, f"{len(plan.rows)} rows; at most {limits.max_num_seqs}")
        if len(known) > limits.max_num_seqs * _ROWS_KEPT_PER_SEQ:
            raise _malformed(plan, f"{len(known)} rows are known; finish those that have ended")
        num_tokens = sum(planned.num_scheduled_tokens for planned in plan.rows)
        if num_tokens > limits.max_num_batched_tokens:
            raise _malformed(plan, f"{num_tokens} tokens; at most {limits.max_num_batched_tokens}")
        writers: dict[int, int] = {}
        for planned in plan.rows:
            if (row := known.get(planned.row_id)) is None:
                raise _malformed(plan, f"row {planned.row_id} is unknown")
            self._check_row(plan, planned, row)
            if row.failure is not None:
                continue  # nothing is computed for it
            for block_id in self._written_blocks(planned, row):
                if writers.setdefault(block_id, row.row_id) != row.row_id:
                    raise _malformed(
                        plan, f"rows {writers[block_id]} and {row.row_id} both write into block {block_id}"
                    )

    def _check_row(self, plan: Plan, planned: PlannedRow, row: Row) -> None:
        limits = self._limits
        name = f"row {planned.row_id}"
        end = planned.end
        if planned.num_scheduled_tokens < 1 or planned.num_computed_tokens < 0:
            raise _malformed(plan, f"{name} computes nothing")
        if end > limits.max_model_len:
            raise _malformed(plan, f"{name} reaches token {end} of at most {limits.max_model_len}")
        self._check_new_blocks(plan, planned, row)
        if (len(row.block_ids) + len(planned.new_block_ids)) * limits.block_size < end:
            raise _malformed(plan, f"{name} has too few blocks for {end} tokens")
        if row.failure is not None:
            return  # its ids stopped growing while plans were in flight
        if row.num_computed not in (None, planned.num_computed_tokens):
            raise _malformed(
                plan, f"{name} begins at token {planned.num_computed_tokens} and has computed {row.num_computed}"
            )
        if end > len(row.token_ids):
            raise _malformed(plan, f"{name} has {len(row.token_ids)} token ids and computes up to {end}")
        if planned.feeds_back and not (row.has_sampled and end == len(row.token_ids)):
            raise _malformed(plan, f"{name} feeds back and the last token of its range was not sampled")

    def _check_new_blocks(self, plan: Plan, planned: PlannedRow, row: Row) -> None:
        if not planned.new_block_ids:
            return
        name, table = f"row {planned.row_id}", set(row.block_ids)
        for block_id in planned.new_block_ids:
            if not 0 < block_id < self._num_blocks:
                raise _malformed(plan, f"{name} has block {block_id}; blocks are 1 to {self._num_blocks - 1}")
            if block_id in table:
                raise _malformed(plan, f"{name} has block {block_id} twice")
            table.add(block_id)

    def _written_blocks(self, planned: PlannedRow, row: Row) -> list[int]:
        """Blocks that hold the tokens which a checked row of a plan computes."""
        table, new, size = row.block_ids, planned.new_block_ids, self._limits.block_size
        indices = range(planned.num_computed_tokens // size, (planned.end - 1) // size + 1)
        return [table[i] if i < len(table) else new[i - len(table)] for i in indices]


def _malformed(plan: Plan, what: str) -> InvalidArgument:
    return InvalidArgument(f"plan {plan.step_id}: {what}", reason="MALFORMED_PLAN")
