"""Resumable requests at the scheduler: they go on without a reader for a while, and who comes back gets every token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeExecutor, continuation
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, submit
from tokenloom.api.v1 import common_pb2, engine_pb2
from tokenloom.common.metrics import REGISTRY
from tokenloom.scheduler.stage import SchedulerStage

NUM_TOKENS = 60
WITH_LOGPROBS = common_pb2.SamplingParams(num_logprobs=1)


@asynccontextmanager
async def session(folder: Path) -> AsyncIterator[Tokenizer]:
    tokenizer = Tokenizer(folder)
    await tokenizer.open()
    yield tokenizer
    await tokenizer.close()


async def until_idle(stage: SchedulerStage) -> None:
    await asyncio.wait_for(stage.engine.wait_until_idle(10), 8)
    assert stage.engine.core is not None
    assert stage.engine.core.num_requests == 0
    assert stage.engine.core.kv.pool.num_held_blocks == 0


def resumable(handle: int, name: str = "r", max_tokens: int = NUM_TOKENS, **fields: Any) -> engine_pb2.Submit:
    return submit(handle, [5, 6], max_tokens, request_id=name, resumable=True, **fields)


async def begin(tokenizer: Tokenizer, *submits: engine_pb2.Submit, num_tokens: int = 5) -> None:
    """Submit and read some tokens of each."""
    await tokenizer.send(submits=submits)
    while any(len(tokenizer.tokens.get(one.handle, [])) < num_tokens for one in submits):
        await tokenizer.read()


async def expect_all(tokenizer: Tokenizer, again: engine_pb2.Submit, num_tokens: int = NUM_TOKENS) -> None:
    """A reader that comes back with nothing gets all tokens and the end."""
    await tokenizer.send(submits=[again])
    await tokenizer.read_until_ended(again.handle)
    assert again.handle not in tokenizer.rejected, tokenizer.rejected
    told = tokenizer.tokens[again.handle]
    assert told == continuation([5, 6], num_tokens)
    assert tokenizer.finished[again.handle].reason == engine_pb2.ENGINE_FINISH_REASON_LENGTH
    width = 2 if again.sampling.HasField("num_logprobs") else 0
    assert tokenizer.logprob_ids[again.handle] == [token_id for token_id in told for _ in range(width)]


@pytest.mark.parametrize("sampling", [None, WITH_LOGPROBS])
def test_a_detached_request_goes_on_and_is_told_from_its_first_token_to_who_comes_back(
    tmp_path: Path, sampling: common_pb2.SamplingParams | None
) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.005)
        async with scheduler_on(tmp_path, executor) as stage, session(tmp_path) as first, session(tmp_path) as second:
            await begin(first, resumable(1, sampling=sampling))
            await first.send(detaches=[engine_pb2.Detach(handle=1)])
            request = stage.engine.registry.streams["r"].request
            had = len(request.output_token_ids)
            while len(request.output_token_ids) < had + 3:
                await asyncio.sleep(0.002)
            num_frames = len(first.frames)
            await expect_all(second, resumable(7, sampling=sampling))
            assert first.finished == {}
            await first.send(submits=[submit(2, [9], 2)])
            await first.read_until_ended(2)
            told = [handle for frame in first.frames[num_frames + 1 :] for handle in frame.outputs.handles]
            assert set(told) == {2}, "nothing more of the detached one"

    run(test())


def test_a_lost_sessions_resumable_requests_wait_for_their_own_time_and_the_others_for_theirs(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.005)
        async with scheduler_on(tmp_path, executor, takeover_s=0.1, resumable_s=20.0) as stage:
            async with session(tmp_path) as first:
                await begin(first, resumable(1, max_tokens=200), submit(2, [7], 200), num_tokens=1)
            while "request-2" in stage.engine.registry.streams:
                await asyncio.sleep(0.01)
            async with session(tmp_path) as second:
                await expect_all(second, resumable(7, max_tokens=200), num_tokens=200)

    run(test())


def test_who_never_comes_back_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.01), resumable_s=0.2) as stage:
            async with session(tmp_path) as first:
                await begin(first, resumable(1, "a", 240), resumable(2, "b", 240), num_tokens=1)
                await first.send(detaches=[engine_pb2.Detach(handle=1)])
            await until_idle(stage)
            async with session(tmp_path) as second:
                await expect_all(second, resumable(1, "c", 4), num_tokens=4)
            assert REGISTRY.get_sample_value("tokenloom_num_finished_requests_kept") == 1, "the aborted ones are not"
            while REGISTRY.get_sample_value("tokenloom_num_finished_requests_kept"):
                await asyncio.sleep(0.01)
            assert REGISTRY.get_sample_value("tokenloom_finished_requests_kept_bytes") == 0
            assert not stage.engine._returns._alone

    run(test())


def test_each_absence_has_its_whole_time(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.02), resumable_s=1.2) as stage:
            async with session(tmp_path) as first:
                await begin(first, resumable(1, max_tokens=240), num_tokens=1)
            await asyncio.sleep(0.7)
            async with session(tmp_path) as second:
                await begin(second, resumable(1, max_tokens=240), num_tokens=1)
                await second.send(detaches=[engine_pb2.Detach(handle=1)])
                await asyncio.sleep(0.7)
            assert "r" in stage.engine.registry.streams, "the first absence's time is up, not the second's"
            await until_idle(stage)

    run(test())


def test_who_is_back_stays_as_long_as_it_takes(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.005)
        async with scheduler_on(tmp_path, executor, resumable_s=0.4), session(tmp_path) as tokenizer:
            await begin(tokenizer, resumable(1, max_tokens=200), num_tokens=1)
            await tokenizer.send(detaches=[engine_pb2.Detach(handle=1)])
            await expect_all(tokenizer, resumable(2, max_tokens=200), num_tokens=200)  # takes a second

    run(test())


@pytest.mark.parametrize("sampling", [None, WITH_LOGPROBS])
def test_one_that_has_ended_is_told_again_and_nothing_is_computed(
    tmp_path: Path, sampling: common_pb2.SamplingParams | None
) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        async with scheduler_on(tmp_path, executor), session(tmp_path) as first, session(tmp_path) as second:
            await expect_all(first, resumable(1, sampling=sampling))
            steps = REGISTRY.get_sample_value("tokenloom_iteration_tokens_count")
            await expect_all(second, resumable(7, sampling=sampling))
            assert second.cached[7] == first.cached[1]
            told = first.tokens[1]
            second.tokens[8] = told[:20]
            await second.send(submits=[resumable(8, sampling=sampling, resume_token_ids=told[:20])])
            await second.read_until_ended(8)
            assert second.tokens[8] == told, "behind the ids that its reader has"
            assert REGISTRY.get_sample_value("tokenloom_iteration_tokens_count") == steps

    run(test())


def test_prompt_logprobs_are_told_again_to_who_asks_for_them_again(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        sampling = common_pb2.SamplingParams(num_prompt_logprobs=1)
        async with scheduler_on(tmp_path, executor), session(tmp_path) as tokenizer:
            for handle in (1, 2, 3):
                asked = sampling if handle < 3 else common_pb2.SamplingParams()
                await expect_all(tokenizer, resumable(handle, sampling=asked, max_tokens=4), num_tokens=4)
            runs = [run for frame in tokenizer.frames for run in frame.prompt_logprobs]
            assert [run.handle for run in runs] == [1, 2]
            assert list(runs[0].token_ids) == list(runs[1].token_ids)
            assert list(runs[0].logprobs) == list(runs[1].logprobs)

    run(test())


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": common_pb2.SamplingParams(seed=4)},
        {"resume_token_ids": [900]},
        {"cache_salt": "x"},
        {"tenant": "t"},
    ],
)
def test_another_request_of_the_same_id_is_computed_and_not_told_what_is_kept(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        async with scheduler_on(tmp_path, executor), session(tmp_path) as tokenizer:
            await expect_all(tokenizer, resumable(1))
            before = REGISTRY.get_sample_value("tokenloom_iteration_tokens_count")
            tokenizer.tokens[2] = list(changes.get("resume_token_ids", ()))
            await tokenizer.send(submits=[resumable(2, max_tokens=8, **changes)])
            await tokenizer.read_until_ended(2)
            assert REGISTRY.get_sample_value("tokenloom_iteration_tokens_count") != before

    run(test())


def test_aborts_and_cancels_end_resumable_requests_and_their_groups_for_good(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.005)
        async with scheduler_on(tmp_path, executor) as stage, session(tmp_path) as tokenizer:
            await begin(
                tokenizer,
                resumable(1, "a", 240),
                resumable(2, "b:0", 240, group_id="b"),
                resumable(3, "b:1", 2, group_id="b"),
                num_tokens=2,
            )
            await tokenizer.send(detaches=[engine_pb2.Detach(handle=2)])
            await tokenizer.send(cancels=[engine_pb2.Cancel(handle=1)])
            await tokenizer.read_until_ended(1, 3)
            answer = await tokenizer.stub.Abort(engine_pb2.AbortRequest(request_id="b"))
            assert answer.outcome == engine_pb2.AbortResponse.OUTCOME_ABORTED
            await until_idle(stage)
            assert REGISTRY.get_sample_value("tokenloom_num_finished_requests_kept") == 0

    run(test())


def test_detaching_what_is_not_resumable_cancels_it_and_unknown_handles_do_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.005)
        async with scheduler_on(tmp_path, executor) as stage, session(tmp_path) as tokenizer:
            await begin(tokenizer, submit(1, [5], 240))
            await tokenizer.send(detaches=[engine_pb2.Detach(handle=1), engine_pb2.Detach(handle=99)])
            await tokenizer.read_until_ended(1)
            assert tokenizer.finished[1].reason == engine_pb2.ENGINE_FINISH_REASON_ABORTED
            await until_idle(stage)

    run(test())


def test_a_reader_that_lacks_logprobs_which_went_with_an_earlier_engine_has_them_computed_again(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.005)
        had = continuation([5, 6], 10)
        async with scheduler_on(tmp_path, executor), session(tmp_path) as first, session(tmp_path) as second:
            for is_over, handle in ((False, 1), (True, 2)):
                name, max_tokens = f"r{handle}", 20 if is_over else 200
                first.tokens[handle] = list(had)
                again = resumable(handle, name, max_tokens, resume_token_ids=had, sampling=WITH_LOGPROBS)
                await begin(first, again, num_tokens=12)
                if is_over:
                    await first.read_until_ended(handle)
                else:
                    await first.send(detaches=[engine_pb2.Detach(handle=handle)])
                returned = resumable(handle, name, max_tokens, sampling=WITH_LOGPROBS)
                await expect_all(second, returned, max_tokens)

    run(test())


def test_a_refused_request_is_not_kept(tmp_path: Path) -> None:
    """Whoever comes back later may find room."""

    async def test() -> None:
        executor = FakeExecutor(step_s=0.005)
        async with (
            scheduler_on(tmp_path, executor, max_num_seqs=1, max_num_waiting=1),
            session(tmp_path) as tokenizer,
        ):
            await begin(tokenizer, resumable(1, "a", 60))
            await tokenizer.send(submits=[resumable(2, "b", 4), resumable(3, "c", 4)])
            await tokenizer.read_until_ended(3)
            assert 3 in tokenizer.rejected
            await tokenizer.read_until_ended(1, 2)
            await expect_all(tokenizer, resumable(4, "c", 4), num_tokens=4)

    run(test())
