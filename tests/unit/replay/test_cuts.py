"""Wherever a ring is cut, and whatever was going on there, it is replayed to the same tokens and breaks no rule."""

from __future__ import annotations

import random

import pytest

from tests.fake_executor import FakeExecutor
from tests.unit.replay.recorded_runs import (
    BLOCK_SIZE,
    RecordedRun,
    act,
    expect_replay,
    random_sampling,
    replayed,
)
from tokenloom.api.v1 import common_pb2, recording_pb2
from tokenloom.common.recording import MAGIC, framed
from tokenloom.scheduler.core.request import FinishReason


@pytest.mark.parametrize("seed", range(12))
def test_a_ring_is_replayed_wherever_it_is_cut(seed: int) -> None:
    """Prefixes, preemptions, aborts, priorities, prompt logprobs, flushes; one to three plans in flight."""
    chance = random.Random(seed)
    run = RecordedRun(depth=1 + seed % 3, max_steps=chance.choice([8, 16, 24]), num_blocks=chance.choice([14, 18, 24]))
    num_prepared = 0
    for number in range(100):
        act(run, chance, number)
        if chance.random() < 0.6:
            run.plan()
        else:
            run.step()
        if number % 4 == 0 and not run.recorder.is_empty:
            summary = expect_replay(run)
            assert summary.num_skipped_rows == 0
            num_prepared += summary.num_prepared_rows
    assert num_prepared > 0
    assert run.core.stats.num_preemptions > 0
    assert run.core.stats.num_prefix_hit_tokens > 0


def test_tables_that_share_a_later_block_and_not_the_one_before_are_prepared_one_after_the_other() -> None:
    """A row without the cache writes a copy of a named first block, and a second block that others find."""
    run = RecordedRun(depth=1, max_steps=8)
    prompt = [7] * (2 * BLOCK_SIZE) + [9]
    first = run.submit("named", [*prompt[:BLOCK_SIZE], 5], 200)  # the first block has its name from here
    run.step()
    uncached = common_pb2.SamplingParams(temperature=0.0, num_prompt_logprobs=1)
    copy = run.submit("copy", prompt, 200, sampling=uncached, priority_class=1)
    run.step()
    run.step()
    both = run.submit("both", prompt, 200)
    run.step()
    assert copy.block_ids[0] != first.block_ids[0] == both.block_ids[0]
    assert copy.block_ids[1] == both.block_ids[1]
    assert run.core.running.index(both) < run.core.running.index(copy), "the copy is prepared behind"
    for _ in range(12):
        run.step()
    assert expect_replay(run).num_prepared_rows == 3


def test_content_of_rows_that_are_gone_is_found_behind_the_cut() -> None:
    run = RecordedRun(depth=2, max_steps=8)
    gone = run.submit("gone", [3] * 9, 2)
    while not gone.is_finished:
        run.step()
    run.submit("busy", [4] * 3, 60)
    for _ in range(20):
        run.step()
    finder = run.submit("finder", [3] * 10, 3)
    run.step()
    assert finder.num_cached_tokens == 2 * BLOCK_SIZE
    while not finder.is_finished:
        run.step()
    assert expect_replay(run).num_prepared_rows == 2


def test_blocks_that_change_hands_with_the_first_plan_behind_the_cut() -> None:
    """Rows are aborted and preempted with plans in flight, and others get their blocks in the plan that is the cut."""
    for lead in range(8):
        run = RecordedRun(depth=3, max_steps=8, num_blocks=8)
        ended = run.submit("ended", [3] * 9, 40)
        run.submit("stays", [4] * 5, 60)
        for _ in range(12 + lead):
            run.step()
            run.plan()
        if not ended.is_finished:
            run.core.finish("ended", FinishReason.ABORTED)
        run.submit("next", [5] * 7, 4)
        for _ in range(7):
            run.step()
            expect_replay(run)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_whose_results_are_missing_are_left_out_and_the_others_are_replayed(depth: int) -> None:
    """A ring whose bytes hold no more than the newest segment, right behind its cut: plans in flight are unanswered."""
    chance = random.Random(depth)
    run = RecordedRun(depth=depth, max_steps=1 << 20, max_bytes=400, num_blocks=40)
    for number in range(6):
        run.submit(f"r-{number}", [number + 3] * (5 + number), 60, sampling=random_sampling(chance))
    num_skipped = 0
    for _ in range(60):
        run.step()
        while run.plan():
            summary = expect_replay(run)
            num_skipped += summary.num_skipped_rows
    assert (num_skipped > 0) == (depth > 1)


def test_a_recording_without_results_is_run_and_nothing_is_compared() -> None:
    run = RecordedRun(depth=3, max_steps=8, num_blocks=64)
    for number in range(4):
        run.submit(f"r-{number}", [number + 3] * 6, 40)
    for _ in range(30):
        run.step()
    entries = [recording_pb2.RecordingEntry.FromString(entry) for entry in run.recorder.chunks()]
    left = [entry for entry in entries if not entry.HasField("result")]
    executor = FakeExecutor(num_blocks=run.num_blocks, block_size=BLOCK_SIZE)
    summary = replayed(MAGIC + b"".join(framed(entry.SerializeToString()) for entry in left), executor)
    assert not executor.violations
    assert summary.is_equal
    assert (summary.num_tokens, summary.num_skipped_rows) == (0, 4)
