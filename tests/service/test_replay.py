"""Runs of the real scheduler are recorded and replayed to the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fake_executor import FakeRow
from tests.fakes import FakeExecutor
from tests.service.recording_stack import (
    NUM_BLOCKS,
    drive,
    entries_of,
    record_run,
    replay_on,
    save_ring,
    serving,
    write_entries,
)
from tests.service.scheduler_stack import run, scheduler_on, serve_executor
from tokenloom.common.errors import SetupError
from tokenloom.replay.command import replay
from tokenloom.replay.config import ReplaySettings


def test_a_whole_run_with_preemption_prefix_hits_and_aborts_is_replayed_to_the_same_tokens(tmp_path: Path) -> None:
    async def test() -> None:
        tokens = await record_run(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS))
        executor = FakeExecutor(num_blocks=NUM_BLOCKS, step_s=0.001)
        summary = await replay_on(tmp_path, executor, "all.tlrec", logprob_tolerance=0.0)
        assert summary.is_equal, summary.as_text()
        assert summary.num_preparation_steps == 0
        assert summary.num_tokens >= sum(map(len, tokens.values()))
        assert not executor.violations
        assert executor.most_waiting >= 2, "plans are sent ahead"

    run(test())


@pytest.mark.parametrize("record_steps", [8, 24, 64])
@pytest.mark.parametrize("plans_in_flight", [1, 2, 3])
def test_a_ring_that_is_cut_in_the_middle_is_replayed_to_the_same_tokens(
    tmp_path: Path, record_steps: int, plans_in_flight: int
) -> None:
    async def test() -> None:
        executor = FakeExecutor(num_blocks=NUM_BLOCKS, step_s=0.001)
        async with scheduler_on(
            tmp_path, executor, record_steps=record_steps, plans_in_flight=plans_in_flight
        ) as stage:
            names: list[str] = []
            while len(names) < 3:
                running = asyncio.create_task(drive(tmp_path))
                while not running.done():
                    await asyncio.sleep(0.02)
                    if stage.engine.core is not None and stage.engine.core.running:
                        names.append(f"{len(names)}.tlrec")
                        assert await save_ring(tmp_path, names[-1]) <= record_steps
                await running
        num_prepared = 0
        for name in names:
            executor = FakeExecutor(num_blocks=NUM_BLOCKS)
            summary = await replay_on(tmp_path, executor, name)
            assert summary.is_equal, f"{name}: {summary.as_text()}"
            assert not executor.violations
            assert summary.num_skipped_rows == 0
            assert summary.num_unanswered_steps <= plans_in_flight
            num_prepared += summary.num_prepared_rows
        assert num_prepared > 0

    run(test())


class OtherTokens(FakeExecutor):
    """Chooses another token at one place of one request."""

    def __init__(self, request_id: str, position: int) -> None:
        super().__init__(num_blocks=NUM_BLOCKS)
        self.request_id = request_id
        self.position = position

    def pick(self, row: FakeRow, first: int) -> int:
        is_there = row.new.request_id == self.request_id and len(row.ids) == self.position
        return super().pick(row, first) + is_there


def test_another_token_is_reported_where_it_stands(tmp_path: Path) -> None:
    async def test() -> None:
        tokens = await record_run(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS))
        # The request's prompt has 18 tokens; it is not used by others as a prefix.
        summary = await replay_on(tmp_path, OtherTokens("request-107", 18 + 9), "all.tlrec")
        assert not summary.is_equal
        assert summary.num_mismatches == 1
        (found,) = summary.mismatches
        right = tokens[107][9]
        assert (found.request_id, found.position, found.what) == ("request-107", 27, "token")
        assert (found.expected, found.got) == (right, right + 1)
        assert f"row {found.row_id} (request-107), position 27: token: expected {right}, got {right + 1}" in (
            summary.as_text()
        )

    run(test())


class LostMidway(FakeExecutor):
    def take(self, waiting):  # type: ignore[no-untyped-def]
        if len(self.plans) > 20:
            raise RuntimeError("the process died")
        return super().take(waiting)


def test_an_executor_that_is_lost_in_the_middle_ends_the_replay_with_what_was_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        await record_run(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS))
        summary = await replay_on(tmp_path, LostMidway(num_blocks=NUM_BLOCKS), "all.tlrec")
        assert not summary.is_equal
        assert not summary.num_mismatches
        assert 0 < summary.num_steps <= 20
        assert "waiting for recorded step" in summary.lost
        assert "ended early" in summary.as_text()

    run(test())
    assert "the process died" in caplog.text


def test_an_executor_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    async def test() -> None:
        await record_run(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS))
        async with serving(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS, step_s=60.0)) as address:
            summary = await replay(ReplaySettings(f"{tmp_path}/all.tlrec", executor=address, timeout_s=0.3))
        assert "no answer for 0.3 s" in summary.lost
        with pytest.raises(SetupError, match="executor unix"):
            await replay(ReplaySettings(f"{tmp_path}/all.tlrec", executor=f"unix:{tmp_path}/nobody", timeout_s=0.3))

    run(test())


def test_a_run_over_two_epochs_is_replayed_with_a_new_epoch_in_between(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(num_blocks=NUM_BLOCKS, step_s=0.001)
        server = await serve_executor(tmp_path, executor)
        async with scheduler_on(
            tmp_path, executor, executor_server=server, record_file=f"{tmp_path}/all.tlrec", record_dir=str(tmp_path)
        ) as stage:
            running = asyncio.create_task(drive(tmp_path, 2))
            while len(executor.plans) < 30:
                await asyncio.sleep(0.002)
            await server.stop(0)
            while stage.engine.is_ready:
                await asyncio.sleep(0.005)
            replacement = await serve_executor(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS))
            await running
            while not (names := saved_files(tmp_path)):
                await asyncio.sleep(0.01)
        await replacement.stop(0)
        summary = await replay_on(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS), "all.tlrec")
        assert summary.is_equal, summary.as_text()
        assert summary.num_sections == 2
        assert len(names) == 1
        assert (tmp_path / names[0]).stat().st_mode & 0o777 == 0o600
        summary = await replay_on(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS), names[0])
        assert summary.is_equal, summary.as_text()
        assert summary.num_sections == 1
        assert summary.num_steps >= 29

    run(test())


def saved_files(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*-executor-lost.tlrec")]


def _without(tmp_path: Path, name: str, kinds: Sequence[str]) -> str:
    """The recording without what its rows or results tell."""
    entries = [entry for entry in entries_of(tmp_path / name) if entry.WhichOneof("kind") not in kinds]
    write_entries(tmp_path / "less.tlrec", entries)
    return "less.tlrec"


def test_a_cut_recording_needs_its_rows(tmp_path: Path) -> None:
    """The control of the tests above: without what they test, the difference is seen."""

    async def test() -> None:
        executor = FakeExecutor(num_blocks=NUM_BLOCKS, step_s=0.001)
        async with scheduler_on(tmp_path, executor, record_steps=24):
            running = asyncio.create_task(drive(tmp_path, 1))
            while len(executor.plans) < 45:
                await asyncio.sleep(0.002)
            await save_ring(tmp_path)
            await running
        whole = await replay_on(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS), "ring.tlrec")
        assert whole.is_equal
        summary = await replay_on(
            tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS), _without(tmp_path, "ring.tlrec", ["row"])
        )
        assert summary.num_skipped_rows > 0
        assert summary.num_tokens < whole.num_tokens

    run(test())


def test_what_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    async def test() -> None:
        await record_run(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS))
        small = FakeExecutor(num_blocks=NUM_BLOCKS - 1)
        other = FakeExecutor(num_blocks=NUM_BLOCKS, block_size=8)
        for executor, words in ((small, "40 blocks"), (other, "block_size is 4, the executor's 8")):
            with pytest.raises(SetupError, match=words):
                await replay_on(tmp_path, executor, "all.tlrec")
            assert not executor.plans

    run(test())


def test_a_truncated_file_is_replayed_up_to_there_and_a_corrupt_one_is_named(tmp_path: Path) -> None:
    async def test() -> None:
        await record_run(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS))
        data = (tmp_path / "all.tlrec").read_bytes()
        (tmp_path / "short.tlrec").write_bytes(data[: len(data) // 2])
        summary = await replay_on(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS), "short.tlrec")
        assert summary.is_equal, summary.as_text()
        assert summary.is_truncated
        assert "ends inside an entry" in summary.as_text()
        for bad, words in (
            (b"", "is empty"),
            (b"GIF89a..", "no recording"),
            (data[:8], "without a single entry"),
            (data[:400] + b"\xff" * 40 + data[440:], "corrupt at byte"),
        ):
            (tmp_path / "bad.tlrec").write_bytes(bad)
            with pytest.raises(SetupError, match=words):
                await replay_on(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS), "bad.tlrec")

    run(test())
