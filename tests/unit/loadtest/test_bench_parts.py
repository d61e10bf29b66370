"""What the engine core's benchmarks share: idle accounting, tables, the timed executor's rows, command lines."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from loadtest.bench.executor import Rows, diary_of, output_token
from loadtest.bench.machine import cpu_model, describe, machine_facts
from loadtest.bench.options import chosen_parts, parser_of, write_json
from loadtest.bench.stack import read_diary
from loadtest.bench.steps import StepCost, StepRecord, idleness, num_steps_ended
from loadtest.bench.table import to_table
from tokenloom.api.v1 import executor_pb2


def step(number: int, start_s: float, end_s: float, *, num_carried: int = 1) -> StepRecord:
    return StepRecord(number, start_s, end_s, num_rows=1, num_tokens=1, num_carried=num_carried)


# --- idle accounting --------------------------------------------------------------------------------------------


def test_idle_time_is_that_between_steps_of_all_time_in_which_a_request_ran() -> None:
    records = [step(1, 0.0, 2.0), step(2, 3.0, 5.0), step(3, 5.0, 7.0)]
    figures = idleness(records, 0.0, 10.0)
    assert figures.idle_pct == pytest.approx(100 / 7)
    assert figures.num_steps == 3
    assert figures.step_ms == pytest.approx((2000, 2000))
    assert figures.gap_us == pytest.approx((0, 1e6, 1e6))


def test_a_gap_in_which_no_request_ran_is_not_idle_time() -> None:
    records = [step(1, 0.0, 2.0), step(2, 50.0, 52.0, num_carried=0), step(3, 53.0, 55.0)]
    assert idleness(records, 0.0, 100.0).idle_pct == pytest.approx(100 / 7)


def test_steps_outside_the_window_do_not_count() -> None:
    records = [step(1, 0.0, 1.0), step(2, 6.0, 8.0), step(3, 8.5, 9.5), step(4, 9.6, 10.5)]
    figures = idleness(records, 5.0, 10.0)
    assert figures.num_steps == 2
    assert figures.idle_pct == pytest.approx(100 * 0.5 / 3.5)


def test_without_steps_there_is_no_figure() -> None:
    assert idleness([], 0.0, 1.0).idle_pct is None
    assert idleness([step(1, 0.0, 1.0)], 0.0, 1.0).gap_us is None


def test_steps_are_counted_by_their_ends() -> None:
    records = [step(1, 0.0, 1.0), step(2, 1.0, 2.0), step(3, 2.0, 3.0)]
    assert num_steps_ended(records, after_s=1.0, until_s=3.0) == 2
    assert num_steps_ended(records, after_s=3.0, until_s=9.0) == 0


def test_a_step_takes_its_base_and_a_time_for_rows_and_tokens() -> None:
    assert StepCost(2.0, row_ms=0.1, token_ms=0.01).seconds(10, 100) == pytest.approx(0.004)


# --- tables -----------------------------------------------------------------------------------------------------


def test_a_table_is_aligned_and_shows_what_is_not_known() -> None:
    text = to_table(["what", "ms"], [["long name", 1234.5], ["x", None], ["y", 0.1234], ["z", 12.34]])
    assert text == "what          ms\nlong name   1234\nx              -\ny          0.123\nz           12.3"


# --- the timed executor -----------------------------------------------------------------------------------------


def plan(step_id: int, rows: list[tuple[int, int, int]], **fields: object) -> executor_pb2.ExecuteRequest:
    """Rows are (row id, tokens to compute, tokens computed)."""
    return executor_pb2.ExecuteRequest(
        step_id=step_id,
        row_ids=[row[0] for row in rows],
        num_scheduled_tokens=[row[1] for row in rows],
        num_computed_tokens=[row[2] for row in rows],
        **fields,  # type: ignore[arg-type]
    )


def new_row(row_id: int, request_id: str, prompt: int, generated: int = 0) -> executor_pb2.NewRow:
    return executor_pb2.NewRow(
        row_id=row_id, request_id=request_id, prompt_token_ids=[1] * prompt, generated_token_ids=[2] * generated
    )


def run(rows: Rows, request: executor_pb2.ExecuteRequest) -> tuple[int, list[int], list[int]]:
    num_carried = rows.begin(request)
    response = rows.run(request)
    return num_carried, list(response.row_ids), list(response.sampled_token_ids)


def test_a_row_samples_when_its_ids_are_all_computed_and_its_nth_token_is_known_beforehand() -> None:
    rows = Rows()
    assert run(rows, plan(1, [(7, 3, 0)], new_rows=[new_row(7, "a", 5)])) == (0, [], [])
    assert run(rows, plan(2, [(7, 2, 3)])) == (1, [7], [output_token(0)])
    assert run(rows, plan(3, [(7, 1, 5)])) == (1, [7], [output_token(1)])


def test_a_preempted_request_goes_on_with_the_token_it_lacks_and_counts_two_rows() -> None:
    rows = Rows()
    run(rows, plan(1, [(7, 5, 0)], new_rows=[new_row(7, "a", 5)]))
    again = plan(2, [(8, 6, 0)], new_rows=[new_row(8, "a", 5, generated=1)], finished_row_ids=[7])
    assert run(rows, again) == (0, [8], [output_token(1)])
    assert rows.requests["a"] == [1, 2, 2]


def test_the_diary_comes_back_as_it_was_written(tmp_path: Path) -> None:
    rows = Rows()
    run(rows, plan(4, [(7, 5, 0)], new_rows=[new_row(7, "a", 5)]))
    rows.steps.append(step(4, 1.0, 2.0))
    (tmp_path / "steps.json").write_text(json.dumps(diary_of(rows)))
    diary = read_diary(tmp_path / "steps.json")
    assert diary.steps == rows.steps
    assert (diary.first_step_ids, diary.num_samples, diary.num_rows) == ({"a": 4}, {"a": 1}, {"a": 1})


# --- facts and command lines ------------------------------------------------------------------------------------


def test_the_machine_is_named_in_every_result(tmp_path: Path) -> None:
    facts = machine_facts()
    assert set(facts) == {"cpu", "num_cores", "python", "commit", "load_average_1m"}
    assert str(facts["cpu"]) in describe(facts)
    (tmp_path / "cpuinfo").write_text("processor: 0\nmodel name\t: A Chip : 2\n")
    assert cpu_model(tmp_path / "cpuinfo") == "A Chip : 2"
    assert cpu_model(tmp_path / "missing")


def parser() -> argparse.ArgumentParser:
    return parser_of("bench", "words", ("a", "b"), "out.json")


def test_parts_run_in_their_own_order_and_all_of_them_by_default() -> None:
    assert chosen_parts(parser(), [], ("a", "b")) == ["a", "b"]
    assert chosen_parts(parser(), ["b", "a"], ("a", "b")) == ["a", "b"]
    assert chosen_parts(parser(), ["b"], ("a", "b")) == ["b"]


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        chosen_parts(parser(), ["c"], ("a", "b"))
    assert stopped.value.code == 2
    assert re.search("unknown part 'c'; one of: a, b", capsys.readouterr().err)


def test_results_are_written_into_a_folder_that_is_made(tmp_path: Path) -> None:
    write_json(str(tmp_path / "new" / "x.json"), {"a": 1})
    assert json.loads((tmp_path / "new" / "x.json").read_text()) == {"a": 1}
