"""Rows between plans: what a plan may say, and what a bad one leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tokenloom.common.errors import InvalidArgument
from tokenloom.executor.plan import NewRow, Plan, PlannedRow, SamplingParams
from tokenloom.executor.row_checks import Limits
from tokenloom.executor.rows import RowTable

LIMITS = Limits(vocab_size=50, max_model_len=20, block_size=4, max_num_seqs=3, max_num_batched_tokens=10)
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [1, 2, 3, 4, 5]


def new_row(row_id: int = 1, **changes: Any) -> NewRow:
    return replace(NewRow(row_id, PROMPT, (), GREEDY), **changes)


def begin(table: RowTable, row_id: int = 1) -> None:
    """A row that has computed all but the last token of its prompt."""
    table.apply(Plan(1, [PlannedRow(row_id, 4, 0, [1, 2])], [new_row(row_id)]))


@pytest.fixture
def table() -> RowTable:
    table = RowTable(LIMITS, torch.device("cpu"))
    table.begin_epoch(10)
    return table


def test_a_row_samples_when_its_range_reaches_the_end_of_its_ids(table: RowTable) -> None:
    (first,) = table.apply(Plan(1, [PlannedRow(1, 3, 0, [1])], [new_row()]))
    (second,) = table.apply(Plan(2, [PlannedRow(1, 2, 3, [2])]))
    assert not first.is_sampling
    assert second.is_sampling
    assert second.row.block_ids == [1, 2]


def test_a_row_that_feeds_back_reads_the_token_it_sampled(table: RowTable) -> None:
    begin(table)
    (scheduled,) = table.apply(Plan(2, [PlannedRow(1, 1, 4)]))
    scheduled.row.append(42)
    (fed,) = table.apply(Plan(3, [PlannedRow(1, 1, 5, feeds_back=True)]))
    assert fed.row.token_ids[fed.first : fed.end] == [42]
    assert fed.is_sampling


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(2, [PlannedRow(9, 1, 0)]), "row 9 is unknown"),
        (Plan(2, [PlannedRow(1, 1, 4), PlannedRow(1, 1, 4)]), "twice"),
        (Plan(2, [PlannedRow(1, 0, 4)]), "computes nothing"),
        (Plan(2, [PlannedRow(1, 2, 4)]), "5 token ids and computes up to 6"),
        (Plan(2, [PlannedRow(1, 1, 4, feeds_back=True)]), "was not sampled"),
        (Plan(2, [PlannedRow(1, 1, 4, [10])]), "block 10; blocks are 1 to 9"),
        (Plan(2, [PlannedRow(1, 1, 4, [0])]), "block 0"),
        (Plan(2, [PlannedRow(1, 1, 4, [3, 2])]), "block 2 twice"),
        (Plan(2, [PlannedRow(2, 5, 0, [3, 3])], [new_row(2)]), "block 3 twice"),
        (Plan(2, [PlannedRow(2, 5, 0, [3])], [new_row(2)]), "too few blocks for 5 tokens"),
        (Plan(2, [PlannedRow(1, 1, 5)]), "begins at token 5 and has computed 4"),
        (Plan(2, [PlannedRow(1, 3, 2)]), "begins at token 2 and has computed 4"),
        (Plan(2, [PlannedRow(1, 2, -1)]), "computes nothing"),
        (
            Plan(2, [PlannedRow(1, 1, 4), PlannedRow(2, 1, 0, [2])], [new_row(2)]),
            "rows 1 and 2 both write into block 2",
        ),
        (
            Plan(2, [PlannedRow(2, 5, 0, [3, 4]), PlannedRow(3, 4, 0, [4])], [new_row(2), new_row(3)]),
            "rows 2 and 3 both write into block 4",
        ),
        (Plan(2, [PlannedRow(1, 1, 4)], [new_row(1)]), "new and known already"),
        (Plan(2, [PlannedRow(1, 1, 4)], [new_row(2)]), "row 2 is new and computes nothing"),
        (Plan(2, [PlannedRow(1, 1, 30)]), "reaches token 31 of at most 20"),
        (Plan(2, [PlannedRow(2, 11, 0, [3, 4, 5])], [new_row(2, prompt_token_ids=[1] * 11)]), "11 tokens; at most 10"),
        (Plan(2, [PlannedRow(i, 1, 0, [3]) for i in (2, 3, 4, 5)], [new_row(i) for i in (2, 3, 4, 5)]), "4 rows"),
    ],
)
def test_a_malformed_plan_is_refused_and_changes_nothing(table: RowTable, plan: Plan, why: str) -> None:
    begin(table)
    with pytest.raises(InvalidArgument, match=why) as refusal:
        table.apply(plan)
    assert refusal.value.reason == "MALFORMED_PLAN"
    (scheduled,) = table.apply(Plan(3, [PlannedRow(1, 1, 4)]))
    assert len(table) == 1
    assert scheduled.row.block_ids == [1, 2]
    assert scheduled.row.token_ids == PROMPT


def test_only_a_rows_first_plan_may_begin_behind_tokens_that_it_did_not_compute(table: RowTable) -> None:
    (hit,) = table.apply(Plan(1, [PlannedRow(1, 1, 4, [7, 8])], [new_row()]))
    assert (hit.first, hit.end, hit.row.block_ids) == (4, 5, [7, 8])
    hit.row.append(42)
    hit.row.append(43)
    with pytest.raises(InvalidArgument, match="begins at token 6 and has computed 5"):
        table.apply(Plan(2, [PlannedRow(1, 1, 6)]))
    (next_one,) = table.apply(Plan(3, [PlannedRow(1, 2, 5)]))
    assert (next_one.first, next_one.end) == (5, 7)


def test_rows_may_read_the_same_blocks_but_not_write_into_them(table: RowTable) -> None:
    rows = [PlannedRow(1, 1, 4, [1, 2]), PlannedRow(2, 1, 4, [1, 3])]
    shared = table.apply(Plan(1, rows, [new_row(1), new_row(2)]))
    assert [s.row.block_ids for s in shared] == [[1, 2], [1, 3]]


def test_a_block_may_go_from_a_finished_row_to_another_in_one_plan(table: RowTable) -> None:
    begin(table)
    (scheduled,) = table.apply(Plan(2, [PlannedRow(2, 5, 0, [2, 1])], [new_row(2)], finished_row_ids=[1]))
    assert scheduled.row.block_ids == [2, 1]


def test_a_row_that_failed_writes_nothing_and_holds_up_nobody(table: RowTable) -> None:
    bad = new_row(1, prompt_token_ids=[99] * 5)
    table.apply(Plan(1, [PlannedRow(1, 4, 0, [1])], [bad]))
    _, good = table.apply(Plan(2, [PlannedRow(1, 1, 3), PlannedRow(2, 4, 0, [1])], [new_row(2)]))
    assert good.row.failure is None


def test_a_plan_without_rows_only_finishes(table: RowTable) -> None:
    begin(table)
    assert table.apply(Plan(2, [], finished_row_ids=[1])) == []
    assert len(table) == 0


def test_finished_rows_are_forgotten_before_new_ones_are_looked_at(table: RowTable) -> None:
    begin(table)
    table.apply(Plan(2, [PlannedRow(1, 5, 0, [1, 2])], [new_row()], finished_row_ids=[1, 77]))
    assert len(table) == 1


def test_rows_that_nobody_finishes_meet_a_bound(table: RowTable) -> None:
    for row_id in range(1, 13):
        begin(table, row_id)
    with pytest.raises(InvalidArgument, match="finish those that have ended"):
        begin(table, 13)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (new_row(prompt_token_ids=[]), "prompt_token_ids"),
        (new_row(prompt_token_ids=[1, 2, 50]), "prompt_token_ids"),
        (new_row(prompt_token_ids=[1, -1]), "prompt_token_ids"),
        (new_row(prompt_token_ids=[1] * 21), "prompt_token_ids"),
        (new_row(generated_token_ids=[99]), "generated_token_ids"),
        (new_row(grammar_key="g"), "grammar_key"),
        (new_row(sampling=replace(GREEDY, logit_bias={50: 1.0})), "logit_bias"),
        (new_row(sampling=replace(GREEDY, logit_bias={5: 101.0})), "logit_bias"),
        (new_row(sampling=replace(GREEDY, stop_token_ids=(50,))), "stop_token_ids"),
        (new_row(sampling=SamplingParams(temperature=1.0)), "seed"),
        (new_row(sampling=SamplingParams(temperature=float("nan"), seed=1)), "temperature"),
        (new_row(sampling=replace(GREEDY, top_p=1.01)), "top_p"),
        (new_row(sampling=replace(GREEDY, min_p=-0.1)), "min_p"),
        (new_row(sampling=replace(GREEDY, repetition_penalty=0.0)), "repetition_penalty"),
        (new_row(sampling=replace(GREEDY, presence_penalty=2.5)), "presence_penalty"),
        (new_row(sampling=replace(GREEDY, num_logprobs=21)), "num_logprobs"),
    ],
)
def test_what_is_wrong_inside_a_new_row_fails_that_row_alone(table: RowTable, row: NewRow, field: str) -> None:
    plan = Plan(1, [PlannedRow(1, 1, 0, [1]), PlannedRow(2, 5, 0, [2, 3])], [row, new_row(2)])
    bad, good = table.apply(plan)
    assert isinstance(bad.row.failure, InvalidArgument)
    assert bad.row.failure.field == field
    assert good.row.failure is None


def test_plans_in_flight_may_still_name_a_row_that_failed(table: RowTable) -> None:
    begin(table)
    (scheduled,) = table.apply(Plan(2, [PlannedRow(1, 1, 4)]))
    scheduled.row.failure = InvalidArgument("for a reason")
    (again,) = table.apply(Plan(3, [PlannedRow(1, 1, 5, feeds_back=True)]))
    assert again.row.failure is scheduled.row.failure


def test_a_new_epoch_forgets_all_rows(table: RowTable) -> None:
    begin(table)
    table.begin_epoch(10)
    with pytest.raises(InvalidArgument, match="unknown"):
        table.apply(Plan(2, [PlannedRow(1, 1, 4)]))
