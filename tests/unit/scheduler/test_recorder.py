"""The flight recorder: its bounds, what its files hold, and that nothing it meets harms the step loop."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tokenloom.api.v1 import common_pb2, executor_pb2, recording_pb2
from tokenloom.common.errors import SetupError
from tokenloom.common.recording import EntryKind, RecordingReader, entry_of
from tokenloom.scheduler import convert
from tokenloom.scheduler.convert import RowPayload
from tokenloom.scheduler.core.plan import ScheduledRow, SchedulerOutput
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.recorder import Recorder, RecorderLimits, parts_of
from tokenloom.scheduler.recording_file import RecordingFile, RecordingFolder

LIMIT_S = 10.0


class Steps:
    """A request that decodes, one token per step, and the plans and results of it."""

    def __init__(self, recorder_of: Any, prompt: int = 6) -> None:
        payload = RowPayload(common_pb2.SamplingParams(seed=3), common_pb2.StopConditions(min_tokens=1))
        self.request = Request("r-1", list(range(prompt)), 10_000, payload=payload)
        self.request.row_id = 1
        self.request.block_ids = []
        self.recorder: Recorder = recorder_of(lambda: [self.request])
        self.step_id = 0
        self.recorder.begin_epoch(executor_pb2.GetCapabilitiesResponse(model_id="m", block_size=4), 100)

    def run(self, count: int, *, lag: int = 0) -> None:
        """Make `count` plans; results come `lag` steps later."""
        first = self.step_id
        for step_id in range(first + 1, first + count + 1):
            self.plan()
            if step_id > lag:
                self.result(step_id - lag)

    def plan(self) -> None:
        request, start = self.request, self.request.num_computed_tokens
        self.step_id += 1
        num_new = request.num_prompt_tokens if self.step_id == 1 else 1
        end = start + num_new
        new_blocks = list(range(len(request.block_ids) + 1, -(-end // 4) + 1))
        request.block_ids += new_blocks
        request.num_computed_tokens = end
        row = ScheduledRow(request, 1, num_new, start, new_blocks, self.step_id == 1, self.step_id > 1, True)
        plan = SchedulerOutput(self.step_id, [row])
        self.recorder.plan(plan, convert.execute_request_of(plan, executor_pb2.Epoch(boot_id="b", counter=1), None))

    def result(self, step_id: int) -> None:
        response = executor_pb2.ExecuteResponse(
            step_id=step_id, row_ids=[1], num_sampled=[1], sampled_token_ids=[100 + step_id]
        )
        self.recorder.result(response)
        self.request.append_output(100 + step_id)


def ring(max_steps: int = 256, max_bytes: int = 1 << 20, **files: Any) -> Any:
    return lambda rows_alive: Recorder(RecorderLimits(max_steps, max_bytes), rows_alive, **files)


def entries_of(recorder: Recorder) -> list[recording_pb2.RecordingEntry]:
    return [recording_pb2.RecordingEntry.FromString(entry) for entry in recorder.chunks()]


def entries_in(path: Path) -> list[recording_pb2.RecordingEntry]:
    with path.open("rb") as file:
        return list(RecordingReader(file, path.name))


def kinds(entries: list[recording_pb2.RecordingEntry]) -> list[str]:
    return [str(entry.WhichOneof("kind")) for entry in entries]


def test_a_run_that_fits_begins_at_the_epoch() -> None:
    steps = Steps(ring())
    steps.run(5)
    entries = entries_of(steps.recorder)
    assert kinds(entries) == ["header", *["plan", "result"] * 5]
    assert not entries[0].header.is_cut
    assert (entries[0].header.num_blocks, entries[0].header.capabilities.model_id) == (100, "m")
    assert list(entries[1].plan.new_rows[0].prompt_token_ids) == list(range(6))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_ring_that_was_cut_begins_with_the_rows_as_they_were_before_its_first_plan(lag: int) -> None:
    steps = Steps(ring(max_steps=16))
    steps.run(50, lag=lag)
    entries = entries_of(steps.recorder)
    assert kinds(entries[:3]) == ["header", "row", "plan"]
    assert entries[0].header.is_cut
    row, first = entries[1].row, entries[2].plan
    assert (row.row.row_id, row.row.request_id, row.row.sampling.seed) == (1, "r-1", 3)
    assert row.num_computed_tokens == first.num_computed_tokens[0]
    assert list(row.block_ids) == list(range(1, -(-row.num_computed_tokens // 4) + 1))
    # What plans in flight sampled is not known yet; their results come behind the row.
    early = [e.result.step_id for e in entries if e.HasField("result") and e.result.step_id < first.step_id]
    assert len(early) == lag
    num_known = len(row.row.prompt_token_ids) + len(row.row.generated_token_ids)
    assert num_known + lag == row.num_computed_tokens + 1
    plans = [e.plan.step_id for e in entries if e.HasField("plan")]
    assert plans == list(range(plans[0], 51))
    assert 14 <= len(plans) <= 16


def test_steps_and_bytes_are_bounded() -> None:
    steps = Steps(ring(max_steps=40))
    for _ in range(200):
        steps.run(1)
        assert steps.recorder.num_steps <= 40
    assert steps.recorder.num_steps >= 35
    steps = Steps(ring(max_steps=100_000, max_bytes=20_000))
    for _ in range(2000):
        steps.run(1)
        assert steps.recorder.num_bytes <= 20_000 + 200
    assert 10 < steps.recorder.num_steps < 2000


def test_epochs_without_a_step_leave_nothing_behind() -> None:
    steps = Steps(ring())
    for _ in range(1000):
        steps.recorder.begin_epoch(executor_pb2.GetCapabilitiesResponse(model_id="later"), 7)
    assert steps.recorder.is_empty
    assert len(entries_of(steps.recorder)) == 1
    steps.run(1)
    assert kinds(entries_of(steps.recorder)) == ["header", "plan", "result"]


def test_a_recorder_that_is_off_keeps_nothing() -> None:
    steps = Steps(ring(max_steps=0))
    steps.run(10)
    assert steps.recorder.is_empty
    assert not entries_of(steps.recorder)


def test_a_fault_of_the_recorder_turns_it_off_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(lambda rows_alive: Recorder(RecorderLimits(max_steps=8), lambda: 1 / 0))  # type: ignore[arg-type,return-value]
    steps.run(20)
    assert steps.recorder.is_empty
    assert caplog.text.count("flight recorder failed") == 1


def test_the_file_gets_everything_and_an_earlier_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "all.tlrec"
    for count in (3, 7):
        steps = Steps(ring(max_steps=0, file=RecordingFile(str(path))))
        steps.run(count)
        steps.recorder.close()
    assert kinds(entries_in(path)) == ["header", *["plan", "result"] * 7]
    assert kinds(entries_in(tmp_path / "all.tlrec.1")) == ["header", *["plan", "result"] * 3]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(ring(max_steps=16, file=RecordingFile("/dev/full")))
    deadline = time.monotonic() + LIMIT_S
    with caplog.at_level(logging.ERROR):
        while "No space left" not in caplog.text:
            assert time.monotonic() < deadline
            steps.run(1)
            time.sleep(0.001)
        steps.run(100)
        steps.recorder.close()
    assert caplog.text.count("recording to /dev/full stops") == 1
    assert 14 <= steps.recorder.num_steps <= 16, "the ring goes on"


class SlowFile(RecordingFile):
    """Writes nothing until it may."""

    def __init__(self, path: str, max_queued_bytes: int) -> None:
        self.may_write = threading.Event()
        super().__init__(path, max_queued_bytes)

    def _write(self, chunk: Any) -> None:
        self.may_write.wait(LIMIT_S)
        super()._write(chunk)


def test_what_a_slow_disk_drops_is_counted_and_marked_and_the_recording_goes_on_behind_the_gap(tmp_path: Path) -> None:
    file = SlowFile(str(tmp_path / "all.tlrec"), 4000)
    steps = Steps(ring(max_steps=0, file=file))
    steps.run(200)
    file.may_write.set()
    deadline = time.monotonic() + LIMIT_S
    while not file.has_room:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    steps.run(3)
    steps.recorder.close()
    entries = entries_in(tmp_path / "all.tlrec")
    headers = [i for i, entry in enumerate(entries) if entry.HasField("header")]
    assert len(headers) == 2
    again = entries[headers[1]].header
    assert again.is_cut
    assert again.num_dropped == 400 - (headers[1] - 1)
    assert kinds(entries[headers[1] :]) == ["header", "row", *["plan", "result"] * 3]
    assert entries[headers[1] + 1].row.num_computed_tokens == 6 + 199
    assert len(entries[headers[1] + 1].row.row.generated_token_ids) == 200


def test_files_that_cannot_be_made_end_the_start_with_the_setting_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"--record-file: cannot write .*No such file"):
        RecordingFile(str(tmp_path / "none" / "all.tlrec"))
    with pytest.raises(SetupError, match="--record-dir: cannot make"):
        RecordingFolder(str(tmp_path / "file" / "folder"), 3)


def test_the_ring_is_saved_once_per_event_and_few_files_stay(tmp_path: Path) -> None:
    folder = RecordingFolder(str(tmp_path / "crashes"), 3)
    steps = Steps(ring(max_steps=16, folder=folder))
    steps.recorder.save("error")  # nothing ran yet
    for _ in range(6):
        steps.run(2)
        steps.recorder.save("executor-lost")
        steps.recorder.close()  # waits for the file
        steps.recorder.save("executor-lost")  # nothing happened since
    names = sorted(path.name for path in (tmp_path / "crashes").iterdir())
    assert len(names) == 3
    assert [name.split("-")[1] for name in names] == ["0004", "0005", "0006"]
    entries = entries_in(tmp_path / "crashes" / names[-1])
    assert [e.plan.step_id for e in entries if e.HasField("plan")] == list(range(1, 13))


def test_a_folder_that_went_away_is_told_and_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RecordingFolder(str(tmp_path / "crashes"), 3)
    steps = Steps(ring(folder=folder))
    steps.run(2)
    (tmp_path / "crashes").rmdir()
    steps.recorder.save("error")
    steps.recorder.close()
    assert "cannot be written" in caplog.text


def test_parts_are_of_bounded_size_and_hold_all_entries() -> None:
    small = entry_of(EntryKind.PLAN, executor_pb2.ExecuteRequest(step_id=1, row_ids=range(20_000)))
    large = entry_of(EntryKind.PLAN, executor_pb2.ExecuteRequest(step_id=2, row_ids=range(200_000)))
    parts = list(parts_of([*[small] * 20, large, small]))
    assert [entry.plan.step_id for part in parts for entry in part.entries] == [*[1] * 20, 2, 1]
    assert all(part.ByteSize() < (256 << 10) + 1000 for part in parts if len(part.entries) > 1)
    assert len(parts) >= 5
