"""The flight recorder: plans and results as they went over the wire, kept in a ring, in a file, or both.

The ring is a queue of segments; the oldest is dropped as a whole when there are too many steps or bytes. Each segment
begins with the rows that were alive then, so that any of them can be the recording's first. That costs little: a row's
ids and blocks are lists that only grow while the row lives, so a reference and a length are a copy. Per step nothing
happens but serializing two messages.

A recording that begins in the middle lacks the tokens of plans in flight; their results follow (recording.proto).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from tokenloom.api.v1 import engine_pb2, executor_pb2, recording_pb2
from tokenloom.common.recording import EntryKind, entry_of, framed
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.core.plan import SchedulerOutput
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.recording_file import RecordingFile, RecordingFolder

log = logging.getLogger(__name__)
_NUM_SEGMENTS = 8
_MAX_SAVED_FILES = 16
_PART_BYTES = 256 << 10
_BYTES_PER_ROW = 200
_BYTES_PER_BLOCK = 8
_BYTES_PER_TOKEN = 36  # a Python list's entry and the number itself


@dataclass(frozen=True)
class RecorderLimits:
    """Bounds of the ring.

    Args:
        max_steps: most steps; 0: no ring.
        max_bytes: most bytes of messages, block tables, and ids of rows that have ended since. The newest segment
            always stays.
    """

    max_steps: int = 256
    max_bytes: int = 32 << 20


@dataclass(slots=True)
class _RowState:
    """A row just before a plan. Its lists go on growing; the lengths say what counts.

    Args:
        num_computed: tokens with KV, once the plans in flight have run.
    """

    row_id: int
    request: Request
    num_output: int
    block_ids: list[int]
    num_blocks: int
    num_computed: int

    @property
    def num_tokens(self) -> int:
        """Prompt and output, as far as they were known."""
        return self.request.num_prompt_tokens + self.num_output

    def entry(self) -> bytes:
        """The row as an entry of a recording."""
        request, payload = self.request, self.request.payload
        row = executor_pb2.NewRow(
            row_id=self.row_id,
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            generated_token_ids=islice(request.output_token_ids, self.num_output),
            sampling=payload.sampling,
            stop=payload.stop,
        )
        recorded = recording_pb2.RecordedRow(
            row=row, block_ids=islice(self.block_ids, self.num_blocks), num_computed_tokens=self.num_computed
        )
        return entry_of(EntryKind.ROW, recorded)


@dataclass(slots=True)
class _Segment:
    """A part of the ring.

    Args:
        header: as the segment would have it if it were the first.
        begins_epoch: nothing of the epoch came before.
        rows: alive when it began.
        entries: serialized plans and results.
        num_entry_bytes: of those.
        num_bytes: of all that the segment alone keeps alive.
    """

    header: recording_pb2.RecordingHeader
    begins_epoch: bool
    rows: list[_RowState] = field(default_factory=list)
    entries: list[bytes] = field(default_factory=list)
    num_steps: int = 0
    num_entry_bytes: int = 0
    num_bytes: int = 0


class Recorder:
    """Records what passes between scheduler and executor. Never raises in the step loop.

    Args:
        limits: of the ring.
        rows_alive: the running requests, read when a plan is recorded: after it was made, before the next one is.
        file: gets everything; None: no file.
        folder: where `save` puts the ring; None: nowhere.
    """

    def __init__(
        self,
        limits: RecorderLimits,
        rows_alive: Callable[[], Iterable[Request]],
        file: RecordingFile | None = None,
        folder: RecordingFolder | None = None,
    ) -> None:
        self._limits = limits
        self._rows_alive = rows_alive
        self._file = file
        self._folder = folder
        self._segments: deque[_Segment] = deque()
        self._num_steps = 0
        self._num_bytes = 0
        self._header = recording_pb2.RecordingHeader()
        self._num_dropped = 0
        self._has_news = False

    @property
    def num_steps(self) -> int:
        """Steps in the ring."""
        return self._num_steps

    @property
    def num_bytes(self) -> int:
        """Bytes in the ring, as its bound counts them."""
        return self._num_bytes

    @property
    def is_empty(self) -> bool:
        """The ring holds no plan: nothing ran yet, or there is no ring."""
        return self._num_steps == 0

    # --- the step loop ------------------------------------------------------------------------------------------

    def begin_epoch(self, capabilities: executor_pb2.GetCapabilitiesResponse, num_blocks: int) -> None:
        """The executor began an epoch: no row is alive."""
        self._header = recording_pb2.RecordingHeader(
            capabilities=capabilities, num_blocks=num_blocks, recorded_at_us=_now_us()
        )
        self._num_dropped = 0
        if self._limits.max_steps:
            if self._segments and not self._segments[-1].entries:
                self._segments.pop()  # an epoch in which nothing ran
            self._add_segment(_Segment(self._header, begins_epoch=True))
        if self._file is not None:
            self._to_file(entry_of(EntryKind.HEADER, self._header))

    def plan(self, plan: SchedulerOutput, request: executor_pb2.ExecuteRequest) -> None:
        """A plan is sent; no other plan was made since it was."""
        if not self._segments and self._file is None:
            return
        try:
            self._record_plan(plan, request)
        except Exception:
            self._give_up()

    def result(self, response: executor_pb2.ExecuteResponse) -> None:
        """A result came."""
        if not self._segments and self._file is None:
            return
        try:
            entry = entry_of(EntryKind.RESULT, response)
            if self._segments:
                self._add(entry)
            if self._file is not None:
                self._to_file(entry)
        except Exception:
            self._give_up()

    def _record_plan(self, plan: SchedulerOutput, request: executor_pb2.ExecuteRequest) -> None:
        entry = entry_of(EntryKind.PLAN, request)
        self._has_news = True
        if self._segments:
            if self._is_full(self._segments[-1]):
                self._add_segment(self._cut_segment(plan))
            self._segments[-1].num_steps += 1
            self._num_steps += 1
            self._add(entry)
            self._drop_oldest()
        if self._file is not None:
            if self._num_dropped and self._file.has_room:
                self._resume_file(plan)
            self._to_file(entry)

    def _give_up(self) -> None:
        """Record nothing more: a fault of the recorder is not to become one of the engine."""
        log.exception("the flight recorder failed and is off from now on")
        self._limits = RecorderLimits(max_steps=0)
        self._segments.clear()
        self._num_steps = self._num_bytes = 0
        if self._file is not None:
            self._file.abandon()
            self._file = None

    # --- the ring -----------------------------------------------------------------------------------------------

    def chunks(self) -> Iterator[bytes]:
        """The ring as the entries of a recording, as of this call.

        May be read in another thread: what is added later is not in it.
        """
        return _chunks([(segment, len(segment.entries)) for segment in self._segments])

    def save(self, reason: str) -> None:
        """Write the ring into the folder, if there is one and something happened since the last time.

        Args:
            reason: one word for the file's name.
        """
        if self._folder is None or self.is_empty or not self._has_news:
            return
        self._has_news = False
        self._folder.save((framed(entry) for entry in self.chunks()), reason)

    def close(self) -> None:
        """Write what waits to be written; takes at most some seconds."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._folder is not None:
            self._folder.close()

    def _is_full(self, segment: _Segment) -> bool:
        max_steps = max(1, self._limits.max_steps // _NUM_SEGMENTS)
        return segment.num_steps >= max_steps or segment.num_entry_bytes >= self._limits.max_bytes // _NUM_SEGMENTS

    def _cut_segment(self, plan: SchedulerOutput) -> _Segment:
        rows = self._rows_before(plan)
        alive, last = {row.row_id for row in rows}, self._segments[-1]
        num_ended_tokens = sum(row.num_tokens for row in last.rows if row.row_id not in alive)
        last.num_bytes += _BYTES_PER_TOKEN * num_ended_tokens
        self._num_bytes += _BYTES_PER_TOKEN * num_ended_tokens
        segment = _Segment(self._cut_header(), begins_epoch=False, rows=rows)
        num_blocks = sum([row.num_blocks for row in rows])
        segment.num_bytes = _BYTES_PER_ROW * len(rows) + _BYTES_PER_BLOCK * num_blocks
        return segment

    def _add_segment(self, segment: _Segment) -> None:
        self._segments.append(segment)
        self._num_bytes += segment.num_bytes

    def _add(self, entry: bytes) -> None:
        segment = self._segments[-1]
        segment.entries.append(entry)
        segment.num_entry_bytes += len(entry)
        segment.num_bytes += len(entry)
        self._num_bytes += len(entry)

    def _drop_oldest(self) -> None:
        limits = self._limits
        while len(self._segments) > 1 and (self._num_steps > limits.max_steps or self._num_bytes > limits.max_bytes):
            oldest = self._segments.popleft()
            self._num_steps -= oldest.num_steps
            self._num_bytes -= oldest.num_bytes

    def _rows_before(self, plan: SchedulerOutput) -> list[_RowState]:
        """The living rows as they were just before a plan that has been made."""
        planned = {row.row_id: row for row in plan.rows}
        states = []
        for request in self._rows_alive():
            if request.row_id is None:
                continue
            num_computed, block_ids = request.num_computed_tokens, request.block_ids
            num_blocks = len(block_ids)
            if (row := planned.get(request.row_id)) is not None:
                if row.is_new:
                    continue
                num_computed = row.num_computed_tokens
                num_blocks -= len(row.new_block_ids)
            num_output = len(request.output_token_ids)
            states.append(_RowState(request.row_id, request, num_output, block_ids, num_blocks, num_computed))
        return states

    def _cut_header(self, num_dropped: int = 0) -> recording_pb2.RecordingHeader:
        return recording_pb2.RecordingHeader(
            capabilities=self._header.capabilities,
            num_blocks=self._header.num_blocks,
            recorded_at_us=_now_us(),
            is_cut=True,
            num_dropped=num_dropped,
        )

    # --- the file -----------------------------------------------------------------------------------------------

    def _to_file(self, entry: bytes) -> None:
        assert self._file is not None
        if self._file.is_broken:
            self._file.abandon()
            self._file = None
        elif self._num_dropped or not self._file.write(framed(entry), len(entry)):
            self._num_dropped += 1

    def _resume_file(self, plan: SchedulerOutput) -> None:
        """Begin the recording anew behind a gap."""
        assert self._file is not None
        header, rows = self._cut_header(self._num_dropped), self._rows_before(plan)
        messages: list[Callable[[], bytes]] = [lambda: entry_of(EntryKind.HEADER, header), *(r.entry for r in rows)]
        num_bytes = header.ByteSize() + sum(_file_bytes(row) for row in rows)
        if self._file.write(lambda: b"".join(framed(message()) for message in messages), num_bytes):
            self._num_dropped = 0


def make_recorder(settings: SchedulerSettings, rows_alive: Callable[[], Iterable[Request]]) -> Recorder:
    """The recorder that the settings ask for.

    Raises: SetupError if its file or folder cannot be written.
    """
    limits = RecorderLimits(settings.record_steps, settings.record_bytes)
    file = RecordingFile(settings.record_file) if settings.record_file else None
    folder = RecordingFolder(settings.record_dir, _MAX_SAVED_FILES) if settings.record_dir else None
    return Recorder(limits, rows_alive, file, folder)


def parts_of(entries: Iterable[bytes]) -> Iterator[engine_pb2.GetRecordingResponse]:
    """Entries as messages of about 256 KiB; an entry that is larger has one for itself."""
    part, num_bytes = engine_pb2.GetRecordingResponse(), 0
    for entry in entries:
        if num_bytes and num_bytes + len(entry) > _PART_BYTES:
            yield part
            part, num_bytes = engine_pb2.GetRecordingResponse(), 0
        part.entries.add().MergeFromString(entry)
        num_bytes += len(entry)
    yield part


def _file_bytes(row: _RowState) -> int:
    """About what a row takes in a file."""
    return _BYTES_PER_ROW + 3 * (row.num_tokens + row.num_blocks)


def _chunks(segments: list[tuple[_Segment, int]]) -> Iterator[bytes]:
    for i, (segment, num_entries) in enumerate(segments):
        if segment.begins_epoch or i == 0:
            yield entry_of(EntryKind.HEADER, segment.header)
        if i == 0:
            yield from (row.entry() for row in segment.rows)
        yield from islice(segment.entries, num_entries)


def _now_us() -> int:
    return time.time_ns() // 1000
