"""Runs a recording against an executor: plans out, results in and compared, as many in flight as the executor takes."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from dataclasses import dataclass, field

from tokenloom.api.v1 import executor_pb2, recording_pb2
from tokenloom.common.errors import SetupError, TokenloomError
from tokenloom.common.executor_client import ExecutorClient, PlanStream
from tokenloom.common.recording import RecordingReader
from tokenloom.replay.compare import Comparer, Mismatch
from tokenloom.replay.plans import Limits, PlanMaker, ReplayPlan
from tokenloom.replay.sections import Section, sections_of


@dataclass
class Summary:
    """What a replay gave.

    Args:
        num_steps: recorded steps that were run again.
        num_sections: epochs, and parts behind gaps, of the recording.
        num_preparation_steps: steps that computed what the executor's blocks held before the recording.
        num_prepared_rows: rows and prefixes that those steps computed.
        num_skipped_rows: rows whose tokens the recording does not tell.
        num_unanswered_steps: steps that were run again and have no recorded result: the executor was lost then.
        num_tokens: tokens compared.
        mismatches: the first ones.
        num_dropped: plans and results that are missing in the recording.
        is_truncated: the file ends inside an entry.
        lost: why the replay ended early, with the recorded step that was waited for; empty if it did not.
        seconds: of steps, from the first plan to the last result.
    """

    executor: str = ""
    num_steps: int = 0
    num_sections: int = 0
    num_preparation_steps: int = 0
    num_prepared_rows: int = 0
    num_skipped_rows: int = 0
    num_unanswered_steps: int = 0
    num_tokens: int = 0
    num_mismatches: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    num_dropped: int = 0
    is_truncated: bool = False
    lost: str = ""
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Everything was run, and nothing differed."""
        return not self.num_mismatches and not self.lost

    @property
    def steps_per_second(self) -> float:
        """Recorded and preparation steps."""
        return (self.num_steps + self.num_preparation_steps) / self.seconds if self.seconds else 0.0

    def as_json(self) -> str:
        """All of it, on one line."""
        values = dataclasses.asdict(self)
        values |= {"is_equal": self.is_equal, "steps_per_second": round(self.steps_per_second, 1)}
        return json.dumps(values)

    def as_text(self) -> str:
        """For people."""
        lines = [f"  {mismatch}" for mismatch in self.mismatches]
        if (left := self.num_mismatches - len(self.mismatches)) > 0:
            lines.append(f"  ... and {left} more rows or steps that differ")
        verdict = "all equal" if not self.num_mismatches else f"{self.num_mismatches} rows or steps differ"
        lines += [
            f"executor: {self.executor}",
            f"{self.num_steps} steps in {self.num_sections} sections, {self.num_tokens} tokens compared: {verdict}",
            f"{self.num_preparation_steps} preparation steps for {self.num_prepared_rows} rows and prefixes",
            f"{self.seconds:.2f} s, {self.steps_per_second:.1f} steps/s",
        ]
        notes = {
            f"{self.num_unanswered_steps} steps have no recorded result; they were run": self.num_unanswered_steps,
            f"{self.num_skipped_rows} rows were left out: not all of their tokens are known": self.num_skipped_rows,
            f"{self.num_dropped} plans and results are missing in the recording": self.num_dropped,
            "the file ends inside an entry; it was replayed up to there": self.is_truncated,
            f"ended early: {self.lost}": self.lost,
        }
        return "\n".join([*lines, *(note for note, is_so in notes.items() if is_so)])


@dataclass(frozen=True)
class ReplayOptions:
    """How to replay.

    Args:
        logprob_tolerance: largest accepted difference of logprobs; below 0: they are not compared.
        max_mismatches: most that are kept; all are counted.
    """

    logprob_tolerance: float = -1.0
    max_mismatches: int = 20


class Replayer:
    """Replays one recording on one executor."""

    def __init__(self, executor: ExecutorClient, options: ReplayOptions) -> None:
        self._executor = executor
        self._options = options
        self._comparer = Comparer(options.logprob_tolerance)
        self._request_ids: dict[int, str] = {}
        self._in_flight: deque[ReplayPlan] = deque()
        self.summary = Summary()

    async def run(self, reader: RecordingReader) -> Summary:
        """Replay all sections.

        Raises: SetupError if the file is corrupt, or the executor cannot run it. TokenloomError if the executor does
            not answer at all.
        """
        capabilities = await self._executor.capabilities()
        self.summary.executor = capabilities.description or capabilities.model_id
        for section in sections_of(reader):
            check_fit(section.header, capabilities)
            self.summary.num_sections += 1
            self.summary.num_dropped += section.header.num_dropped
            try:
                await self._run_section(section, capabilities)
            except TokenloomError as error:
                waited_for = next((p.recorded_step_id for p in self._in_flight if p.recorded_step_id is not None), None)
                where = "between steps" if waited_for is None else f"waiting for recorded step {waited_for}"
                self.summary.lost = f"{error} ({where})"
                break
        self.summary.is_truncated = reader.is_truncated
        self.summary.num_tokens = self._comparer.num_tokens
        return self.summary

    async def _run_section(self, section: Section, capabilities: executor_pb2.GetCapabilitiesResponse) -> None:
        epoch = await self._executor.initialize(section.header.num_blocks)
        stream = self._executor.stream()
        self._comparer.begin_section()
        self._in_flight.clear()
        self._request_ids = {row.row.row_id: row.row.request_id for row in section.rows}
        limits = Limits(capabilities.block_size, capabilities.max_num_seqs, capabilities.max_num_batched_tokens)
        maker = PlanMaker(limits, section.rows)
        depth = max(1, capabilities.max_plans_in_flight)
        started_s = time.perf_counter()
        try:
            plans = maker.take_preparations()
            while True:
                for plan in plans:
                    while len(self._in_flight) >= depth:
                        await self._receive(stream, section)
                    plan.request.epoch.CopyFrom(epoch)
                    self._in_flight.append(plan)
                    await stream.send(plan.request)
                if (recorded := section.next_plan()) is None:
                    break
                self._request_ids |= {row.row_id: row.request_id for row in recorded.new_rows}
                plans = maker.plans_for(recorded)
            while self._in_flight:
                await self._receive(stream, section)
        finally:
            stream.cancel()
            self.summary.seconds += time.perf_counter() - started_s
            self.summary.num_prepared_rows += maker.num_prepared_rows
            self.summary.num_skipped_rows += maker.num_skipped_rows

    async def _receive(self, stream: PlanStream, section: Section) -> None:
        """Take the oldest result in and compare it."""
        got = await stream.receive()
        plan = self._in_flight.popleft()
        if got.step_id != plan.request.step_id:
            raise SetupError(f"the executor answered plan {got.step_id} instead of {plan.request.step_id}")
        if plan.recorded_step_id is None:
            self.summary.num_preparation_steps += 1
            if got.HasField("step_error"):
                raise SetupError(f"the executor cannot prepare the rows: {got.step_error.message}")
            return
        self.summary.num_steps += 1
        expected = section.take_result(plan.recorded_step_id)
        if expected is None:
            self.summary.num_unanswered_steps += 1
            return
        found = self._comparer.compare(expected, got, plan.positions, self._request_ids)
        self.summary.num_mismatches += len(found)
        room = self._options.max_mismatches - len(self.summary.mismatches)
        self.summary.mismatches += found[: max(0, room)]


def check_fit(header: recording_pb2.RecordingHeader, capabilities: executor_pb2.GetCapabilitiesResponse) -> None:
    """Raise SetupError unless an executor can run what was recorded."""
    recorded = header.capabilities
    for name in ("model_id", "tokenizer_fingerprint", "vocab_size", "block_size"):
        if (theirs := getattr(capabilities, name)) != (mine := getattr(recorded, name)):
            raise SetupError(f"the recording does not fit: its {name} is {mine!r}, the executor's {theirs!r}")
    if not 2 <= header.num_blocks <= capabilities.max_num_blocks:
        raise SetupError(
            f"the recording does not fit: it has {header.num_blocks} blocks, the executor room for "
            f"{capabilities.max_num_blocks}"
        )
