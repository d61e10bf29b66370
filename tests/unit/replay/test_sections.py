"""A recording's sections: headers part them, and early results complete the rows."""

from __future__ import annotations

from io import BytesIO

from tokenloom.api.v1 import common_pb2, executor_pb2, recording_pb2
from tokenloom.common.recording import MAGIC, EntryKind, RecordingReader, entry_of, framed
from tokenloom.replay.sections import Section, sections_of

HEADER = entry_of(EntryKind.HEADER, recording_pb2.RecordingHeader(num_blocks=9))


def row(row_id: int) -> bytes:
    new = executor_pb2.NewRow(row_id=row_id, prompt_token_ids=[1, 2], generated_token_ids=[3])
    return entry_of(EntryKind.ROW, recording_pb2.RecordedRow(row=new))


def plan(step_id: int) -> bytes:
    return entry_of(EntryKind.PLAN, executor_pb2.ExecuteRequest(step_id=step_id))


def result(step_id: int, tokens: dict[int, int] | None = None, failed: int = 0, *, is_broken: bool = False) -> bytes:
    tokens = tokens or {}
    response = executor_pb2.ExecuteResponse(
        step_id=step_id, row_ids=list(tokens), num_sampled=[1] * len(tokens), sampled_token_ids=list(tokens.values())
    )
    if failed:
        response.row_errors.add(row_id=failed)
    if is_broken:
        response.step_error.CopyFrom(common_pb2.Error(code=13))
    return entry_of(EntryKind.RESULT, response)


def reader(*entries: bytes) -> RecordingReader:
    return RecordingReader(BytesIO(MAGIC + b"".join(map(framed, entries))), "test")


def generated(section: Section) -> dict[int, list[int]]:
    return {one.row.row_id: list(one.row.generated_token_ids) for one in section.rows}


def test_results_of_plans_before_the_first_complete_the_rows_in_order() -> None:
    entries = [row(1), row(2), plan(10), result(8, {1: 4, 7: 0}), plan(11), result(9, {1: 5}), result(10, {1: 6})]
    (seen,) = [(generated(section), section.header.num_blocks) for section in sections_of(reader(HEADER, *entries))]
    assert seen == ({1: [3, 4, 5], 2: [3]}, 9)


def test_rows_that_failed_before_the_first_plan_are_left_out() -> None:
    entries = [row(1), row(2), plan(10)]
    for section in sections_of(reader(HEADER, *entries, result(9, {1: 4}, failed=2), result(10))):
        assert generated(section) == {1: [3, 4]}
    for section in sections_of(reader(HEADER, *entries, result(9, is_broken=True), result(10))):
        assert generated(section) == {}


def test_each_result_is_taken_once_and_plans_come_in_order() -> None:
    for section in sections_of(reader(HEADER, plan(1), plan(2), result(1), result(2))):
        first = section.next_plan()
        assert first is not None
        assert first.step_id == 1
        assert section.take_result(2) is not None
        assert section.take_result(2) is None
        assert section.take_result(1) is not None
        second = section.next_plan()
        assert second is not None
        assert second.step_id == 2
        assert section.next_plan() is None


def test_a_section_sees_nothing_of_the_next_one_and_may_be_left_early() -> None:
    seen = []
    for section in sections_of(reader(HEADER, plan(1), plan(2), result(1), HEADER, plan(1), result(1, {1: 5}))):
        first = section.next_plan()
        seen.append((first is not None, section.take_result(2)))
    assert seen == [(True, None), (True, None)]
    assert [len(one.rows) for one in sections_of(reader(HEADER, row(1)))] == [0], "without a plan nothing is prepared"
