"""Plans of a replay: preparation, limits, rows that are left out, what rows feed back."""

from __future__ import annotations

from typing import Any

import pytest

from tokenloom.api.v1 import executor_pb2, recording_pb2
from tokenloom.common.errors import SetupError
from tokenloom.replay.plans import Limits, PlanMaker

LIMITS = Limits(block_size=4, max_num_seqs=4, max_num_batched_tokens=16)


def new_row(row_id: int, prompt: int, generated: int = 0) -> executor_pb2.NewRow:
    return executor_pb2.NewRow(
        row_id=row_id,
        request_id=f"r-{row_id}",
        prompt_token_ids=range(prompt),
        generated_token_ids=range(generated),
    )


def alive(row: executor_pb2.NewRow, blocks: list[int], num_computed: int) -> recording_pb2.RecordedRow:
    return recording_pb2.RecordedRow(row=row, block_ids=blocks, num_computed_tokens=num_computed)


def plan(*parts: tuple[int, int, int, list[int]], step_id: int = 50, **fields: Any) -> executor_pb2.ExecuteRequest:
    """Of parts (row id, first token, number of tokens, new blocks)."""
    return executor_pb2.ExecuteRequest(
        step_id=step_id,
        row_ids=[row for row, _, _, _ in parts],
        num_scheduled_tokens=[count for _, _, count, _ in parts],
        num_computed_tokens=[start for _, start, _, _ in parts],
        feeds_back=fields.pop("feeds_back", [False] * len(parts)),
        num_new_blocks=[len(blocks) for _, _, _, blocks in parts],
        new_block_ids=[block for _, _, _, blocks in parts for block in blocks],
        **fields,
    )


def test_living_rows_are_computed_within_the_limits_and_sample_nothing() -> None:
    maker = PlanMaker(LIMITS, [alive(new_row(1, 21), [1, 2, 3, 4, 5], 20), alive(new_row(2, 6), [6, 7], 5)])
    requests = [prepared.request for prepared in maker.take_preparations()]
    assert [list(request.num_scheduled_tokens) for request in requests] == [[16], [4, 5]]
    assert [list(request.num_computed_tokens) for request in requests] == [[0], [16, 0]]
    assert [request.step_id for request in requests] == [1, 2]
    assert [[row.row_id for row in request.new_rows] for request in requests] == [[1], [2]]
    assert maker.num_prepared_rows == 2
    assert not maker.take_preparations()


def test_a_row_feeds_back_only_what_it_sampled_in_this_replay() -> None:
    maker = PlanMaker(LIMITS, [alive(new_row(1, 5, 1), [1, 2], 5)])
    maker.take_preparations()
    (first,) = maker.plans_for(plan((1, 5, 1, []), feeds_back=[True]))
    (second,) = maker.plans_for(plan((1, 6, 1, []), step_id=51, feeds_back=[True]))
    assert (list(first.request.feeds_back), first.positions) == ([False], {1: 6})
    assert (list(second.request.feeds_back), second.positions) == ([True], {1: 7})
    assert [first.recorded_step_id, second.recorded_step_id] == [50, 51]
    assert second.request.step_id == first.request.step_id + 1


def test_a_prefix_that_nobody_wrote_is_computed_first_and_its_row_ends_with_the_next_plan() -> None:
    maker = PlanMaker(LIMITS, [])
    preparation, recorded = maker.plans_for(plan((3, 8, 2, [1, 2, 3]), new_rows=[new_row(3, 10)]))
    assert preparation.recorded_step_id is None
    (row,) = preparation.request.new_rows
    assert list(row.prompt_token_ids) == list(range(9)), "one more than it computes, so that it samples nothing"
    assert list(preparation.request.num_scheduled_tokens) == [8]
    assert list(preparation.request.new_block_ids) == [1, 2]
    assert list(recorded.request.finished_row_ids) == [row.row_id]
    # The blocks are written now: the next row needs no preparation.
    (alone,) = maker.plans_for(plan((4, 8, 2, [1, 2, 4]), step_id=51, new_rows=[new_row(4, 10)]))
    assert alone.recorded_step_id == 51


def test_rows_with_unknown_tokens_are_left_out_counted_and_not_finished() -> None:
    maker = PlanMaker(LIMITS, [alive(new_row(1, 6), [1, 2], 7), alive(new_row(2, 6), [3, 4], 5)])
    maker.take_preparations()
    (made,) = maker.plans_for(plan((1, 7, 1, []), (2, 5, 1, []), (9, 3, 1, [5])))
    assert list(made.request.row_ids) == [2]
    assert maker.num_skipped_rows == 2
    (ended,) = maker.plans_for(plan(step_id=51, finished_row_ids=[1, 2, 9]))
    assert list(ended.request.finished_row_ids) == [2]


def test_blocks_that_a_row_that_was_left_out_got_are_not_taken_for_written() -> None:
    maker = PlanMaker(LIMITS, [alive(new_row(2, 5), [3], 4)])
    maker.take_preparations()
    maker.plans_for(plan((9, 0, 4, [3]), finished_row_ids=[2]))  # block 3 changes hands to a row that nobody knows
    preparation, _ = maker.plans_for(plan((4, 4, 1, [3, 5]), step_id=51, new_rows=[new_row(4, 5)]))
    assert list(preparation.request.new_block_ids) == [3]


@pytest.mark.parametrize("parts", [[(1, 0, 17, [1])], [(i, 0, 1, [i]) for i in range(1, 6)]])
def test_plans_that_the_executor_cannot_take_are_named(parts: list[tuple[int, int, int, list[int]]]) -> None:
    with pytest.raises(SetupError, match=r"recorded step 50 has .* the executor takes 4 rows and 16 tokens"):
        PlanMaker(LIMITS, []).plans_for(plan(*parts))
