"""A recording as sections, read as far as they are needed: a header, rows that were alive, plans, results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tokenloom.api.v1 import executor_pb2, recording_pb2
from tokenloom.common.recording import RecordingReader


class Section:
    """What stands between two headers. Plans are given in order; results are looked up.

    Attributes:
        header: the section's.
        rows: alive just before the first plan, with the tokens that plans in flight then sampled later; rows whose
            tokens cannot be known are left out.
    """

    def __init__(self, header: recording_pb2.RecordingHeader, entries: _Entries) -> None:
        self.header = header
        self._entries = entries
        self._plans: deque[executor_pb2.ExecuteRequest] = deque()
        self._results: dict[int, executor_pb2.ExecuteResponse] = {}
        self._has_ended = False
        rows: dict[int, recording_pb2.RecordedRow] = {}
        while not self._plans and (entry := self._pull()) is not None:
            if entry.HasField("row"):
                rows[entry.row.row.row_id] = entry.row
        self.rows = self._completed(rows)

    def next_plan(self) -> executor_pb2.ExecuteRequest | None:
        """The next plan; None at the section's end."""
        while not self._plans and self._pull() is not None:
            pass
        return self._plans.popleft() if self._plans else None

    def take_result(self, step_id: int) -> executor_pb2.ExecuteResponse | None:
        """The result of a plan; None if none was recorded. Each can be taken once."""
        while step_id not in self._results and self._pull() is not None:
            pass
        return self._results.pop(step_id, None)

    def _completed(self, rows: dict[int, recording_pb2.RecordedRow]) -> list[recording_pb2.RecordedRow]:
        """Give rows the tokens that plans before the first recorded one sampled."""
        if not self._plans:
            return []
        first = self._plans[0].step_id
        while not any(step_id >= first for step_id in self._results) and self._pull() is not None:
            pass
        for step_id in sorted(step_id for step_id in self._results if step_id < first):
            result, at = self._results.pop(step_id), 0
            if result.HasField("step_error"):
                return []
            for row_id, count in zip(result.row_ids, result.num_sampled, strict=True):
                if row_id in rows:
                    rows[row_id].row.generated_token_ids.extend(result.sampled_token_ids[at : at + count])
                at += count
            for error in result.row_errors:
                rows.pop(error.row_id, None)
        return list(rows.values())

    def _pull(self) -> recording_pb2.RecordingEntry | None:
        """Take one entry in; None at the section's end."""
        if self._has_ended or (entry := self._entries.next_in_section()) is None:
            self._has_ended = True
            return None
        if entry.HasField("plan"):
            self._plans.append(entry.plan)
        elif entry.HasField("result"):
            self._results[entry.result.step_id] = entry.result
        return entry


class _Entries:
    """The entries of a file, parted at headers."""

    def __init__(self, reader: RecordingReader) -> None:
        self._iterator = iter(reader)
        self._header: recording_pb2.RecordingEntry | None = None

    def next_in_section(self) -> recording_pb2.RecordingEntry | None:
        """The next entry, unless it is a header or the end has come."""
        entry = None if self._header else next(self._iterator, None)
        if entry is not None and entry.HasField("header"):
            self._header, entry = entry, None
        return entry

    def next_header(self) -> recording_pb2.RecordingHeader | None:
        """The next header; what stands before it is passed over."""
        while self.next_in_section() is not None:
            pass
        entry, self._header = self._header, None
        return None if entry is None else entry.header


def sections_of(reader: RecordingReader) -> Iterator[Section]:
    """The sections in their order; each is to be used before the next one is asked for.

    Raises: SetupError if the file is corrupt.
    """
    entries = _Entries(reader)
    while (header := entries.next_header()) is not None:
        yield Section(header, entries)
