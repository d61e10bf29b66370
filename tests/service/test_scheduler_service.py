"""The scheduler stage over real sockets: requests, plans, results, deadlines, the executor's loss."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from tests.fakes import FakeExecutor, continuation
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, serve_executor, submit
from tokenloom.api.v1 import common_pb2, engine_pb2


def test_result_k_may_wait_for_plan_k_plus_1(tmp_path: Path) -> None:
    """With one plan in flight this would stand still: the executor answers plan k only when plan k + 1 is there."""

    async def test() -> None:
        executor = FakeExecutor(hold_back=1)
        async with scheduler_on(tmp_path, executor):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5, 6, 7], 40)])
            while len(tokenizer.tokens.get(1, [])) < 30:
                await tokenizer.read()
            assert tokenizer.tokens[1] == continuation([5, 6, 7], 40)[: len(tokenizer.tokens[1])]
            assert executor.most_waiting == 2
            executor.hold_back = 0
            await tokenizer.send(submits=[submit(2, [9], 4)])
            await tokenizer.read_until_ended(1, 2)
            assert tokenizer.tokens[1] == continuation([5, 6, 7], 40)
            await tokenizer.close()

    run(test())


def test_many_requests_share_frames_and_get_the_tokens_they_would_get_alone(tmp_path: Path) -> None:
    async def test() -> None:
        prompts = {i: [i, 2 * i, 3] for i in range(1, 33)}
        async with scheduler_on(tmp_path, FakeExecutor(num_blocks=40, step_s=0.002)) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(i, prompt, 20) for i, prompt in prompts.items()])
            await tokenizer.read_until_ended(*prompts)
            assert tokenizer.tokens == {i: continuation(prompt, 20) for i, prompt in prompts.items()}
            assert all(f.reason == engine_pb2.ENGINE_FINISH_REASON_LENGTH for f in tokenizer.finished.values())
            assert len(tokenizer.frames) < 32 * 20 / 4, "one frame per step, not per token"
            assert stage.engine.core is not None
            assert stage.engine.core.stats.num_preemptions > 0
            assert stage.engine.core.kv.pool.num_held_blocks == 0
            await tokenizer.close()

    run(test())


def test_a_stop_token_ends_a_request_and_no_wasted_token_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        expected = continuation([5, 6, 7], 20)
        async with scheduler_on(tmp_path, FakeExecutor()) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5, 6, 7], 20, stop={"stop_token_ids": [expected[9]]})])
            await tokenizer.read_until_ended(1)
            await tokenizer.send(submits=[submit(2, [5], 3)])
            await tokenizer.read_until_ended(2)
            first = expected.index(expected[9])
            assert tokenizer.tokens[1] == expected[: first + 1]
            assert tokenizer.finished[1].reason == engine_pb2.ENGINE_FINISH_REASON_STOP_TOKEN
            assert tokenizer.finished[1].num_generated_tokens == first + 1
            assert stage.engine.core is not None
            assert stage.engine.core.stats.num_wasted_rows <= 1
            await tokenizer.close()

    run(test())


@pytest.mark.parametrize(
    ("bad", "field", "words"),
    [
        (submit(1, [5, 1000]), "prompt", ["1000", "below 1000"]),
        (submit(1, []), "prompt", ["empty"]),
        (submit(1, [5] * 300), "prompt", ["300", "252"]),
        (submit(1, [5], 0), "max_tokens", ["0"]),
        (submit(1, [5], stop={"stop_token_ids": [5000]}), "stop_token_ids", ["5000"]),
        (submit(1, [5], request_id=""), "request_id", ["id"]),
        (submit(1, [5], sampling=common_pb2.SamplingParams(num_logprobs=21)), "logprobs", ["21", "20"]),
        (submit(1, [5], sampling=common_pb2.SamplingParams(logit_bias={1000: 1.0})), "logit_bias", ["1000"]),
    ],
)
def test_bad_requests_are_named_and_harm_no_neighbour(
    tmp_path: Path, bad: engine_pb2.Submit, field: str, words: list[str]
) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor()):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(2, [5], 12), bad, submit(3, [999, 0], 12)])
            await tokenizer.read_until_ended(1, 2, 3)
            error = tokenizer.rejected[1]
            assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert error.field == field
            assert all(word in error.message for word in words), error.message
            assert tokenizer.tokens == {2: continuation([5], 12), 3: continuation([999, 0], 12)}
            await tokenizer.close()

    run(test())


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.01), max_num_seqs=1, max_num_waiting=2):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(i, [i], 5) for i in range(1, 7)])
            await tokenizer.read_until_ended(*range(1, 7))
            assert len(tokenizer.rejected) == 4
            for error in tokenizer.rejected.values():
                assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
                assert error.retry_after_ms > 0
            await tokenizer.close()

    run(test())


def test_cancel_frees_the_blocks_and_is_answered(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.005)) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 200), submit(2, [6], 10)])
            while len(tokenizer.tokens.get(1, [])) < 3:
                await tokenizer.read()
            await tokenizer.send(cancels=[engine_pb2.Cancel(handle=1, reason="client_disconnected")])
            await tokenizer.read_until_ended(1, 2)
            assert tokenizer.finished[1].reason == engine_pb2.ENGINE_FINISH_REASON_ABORTED
            assert tokenizer.tokens[2] == continuation([6], 10)
            assert stage.engine.core is not None
            assert stage.engine.core.kv.pool.num_held_blocks == 0
            await tokenizer.close()

    run(test())


def test_a_deadline_ends_a_request_also_while_it_waits(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.01), max_num_seqs=1):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 240, remaining_time_ms=1000)])
            await tokenizer.read()
            await tokenizer.send(submits=[submit(2, [6], 10, remaining_time_ms=50)])
            await tokenizer.read_until_ended(1, 2)
            assert tokenizer.finished[1].reason == engine_pb2.ENGINE_FINISH_REASON_DEADLINE
            assert 0 < len(tokenizer.tokens[1]) < 240
            assert tokenizer.finished[2].reason == engine_pb2.ENGINE_FINISH_REASON_DEADLINE
            assert 2 not in tokenizer.tokens
            await tokenizer.close()

    run(test())


def test_a_deadline_that_came_with_a_result_is_told_once(tmp_path: Path) -> None:
    """A loop that was held up sees the result of a step and a deadline that passed before it at the same time."""

    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.01)) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 200, remaining_time_ms=100), submit(2, [6], 40)])
            while len(tokenizer.tokens.get(2, [])) < 2:
                await tokenizer.read()
            time.sleep(0.2)  # noqa: ASYNC251  (hold the loop up)
            await tokenizer.read_until_ended(1, 2)
            assert tokenizer.finished[1].reason == engine_pb2.ENGINE_FINISH_REASON_DEADLINE
            assert tokenizer.tokens[2] == continuation([6], 40)
            assert stage.engine.is_ready
            await tokenizer.close()

    run(test())


def test_deadlines_hold_while_the_executor_is_away(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.01)
        server = await serve_executor(tmp_path, executor)
        async with scheduler_on(tmp_path, executor, executor_server=server):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await server.stop(0)
            await tokenizer.send(submits=[submit(1, [5], 200, remaining_time_ms=100)])
            await tokenizer.read_until_ended(1)
            assert tokenizer.finished[1].reason == engine_pb2.ENGINE_FINISH_REASON_DEADLINE
            await tokenizer.close()

    run(test())


def test_a_row_error_fails_its_request_alone(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        executor.row_errors["request-1"] = common_pb2.Error(code=13, message="logits are not finite")
        async with scheduler_on(tmp_path, executor):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 10), submit(2, [6], 10)])
            await tokenizer.read_until_ended(1, 2)
            assert tokenizer.finished[1].reason == engine_pb2.ENGINE_FINISH_REASON_ERROR
            assert "not finite" in tokenizer.finished[1].error.message
            assert tokenizer.tokens[2] == continuation([6], 10)
            await tokenizer.close()

    run(test())


def test_a_step_that_fails_is_tried_again(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        async with scheduler_on(tmp_path, executor):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            executor.step_errors.append(common_pb2.Error(code=13, message="out of memory"))
            await tokenizer.send(submits=[submit(1, [5], 10), submit(2, [6], 10)])
            await tokenizer.read_until_ended(1, 2)
            assert tokenizer.tokens == {1: continuation([5], 10), 2: continuation([6], 10)}
            await tokenizer.close()

    run(test())


def test_a_request_whose_steps_fail_again_and_again_fails_with_the_executors_error(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        async with scheduler_on(tmp_path, executor):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            executor.step_errors.extend([common_pb2.Error(code=13, message="out of memory")] * 20)
            await tokenizer.send(submits=[submit(1, [5], 10)])
            await tokenizer.read_until_ended(1)
            executor.step_errors.clear()
            assert "out of memory" in tokenizer.finished[1].error.message
            await tokenizer.send(submits=[submit(2, [6], 10)])
            await tokenizer.read_until_ended(2)
            assert tokenizer.tokens == {2: continuation([6], 10)}
            await tokenizer.close()

    run(test())


def test_a_result_that_makes_no_sense_begins_a_new_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected exception must not leave the engine standing still while it says that it serves."""

    async def test() -> None:
        executor = FakeExecutor(step_s=0.01)
        server = await serve_executor(tmp_path, executor)
        async with scheduler_on(tmp_path, executor, executor_server=server) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 20)])
            await tokenizer.read()
            assert stage.engine.core is not None
            stage.engine.core.plans_in_flight[0].step_id += 100
            await tokenizer.read_until_ended(1)
            assert tokenizer.tokens[1] == continuation([5], 20)
            assert executor.num_epochs == 2
            executor.restart_counting()
            await tokenizer.close()

    run(test())
    assert "unexpected error" in caplog.text


def test_a_plan_that_cannot_be_made_begins_a_new_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No plan is in flight, so no result would ever wake the engine up again."""

    async def test() -> None:
        executor = FakeExecutor(step_s=0.002)
        server = await serve_executor(tmp_path, executor)
        async with scheduler_on(tmp_path, executor, executor_server=server) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            core = stage.engine.core
            assert core is not None
            good_schedule = core.schedule

            def bad_schedule(now_s: float = 0.0, *, admits_new: bool = True) -> None:
                core.schedule = good_schedule  # type: ignore[method-assign]
                raise KeyError("a fault in the core")

            core.schedule = bad_schedule  # type: ignore[method-assign]
            await tokenizer.send(submits=[submit(1, [5], 20), submit(2, [6], 20)])
            await tokenizer.read_until_ended(1, 2)
            assert tokenizer.tokens == {1: continuation([5], 20), 2: continuation([6], 20)}
            assert stage.engine.is_ready
            assert executor.num_epochs == 2
            executor.restart_counting()
            await tokenizer.close()

    run(test())
    assert "unexpected error while making plans" in caplog.text


def test_an_idle_executor_is_told_which_rows_ended(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        async with scheduler_on(tmp_path, executor) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 3), submit(2, [6], 3)])
            await tokenizer.read_until_ended(1, 2)
            assert stage.engine.core is not None
            while executor.num_rows or stage.engine.core.plans_in_flight:
                await asyncio.sleep(0.01)
            await tokenizer.close()

    run(test())


def test_requests_survive_the_loss_of_the_executor(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.005)
        server = await serve_executor(tmp_path, executor)
        async with scheduler_on(tmp_path, executor, executor_server=server) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(i, [i, 3], 40) for i in range(1, 5)])
            while len(tokenizer.tokens.get(4, [])) < 10:
                await tokenizer.read()
            await server.stop(0)
            while stage.engine.is_ready:
                await asyncio.sleep(0.01)
            replacement = await serve_executor(tmp_path, FakeExecutor())
            await tokenizer.read_until_ended(1, 2, 3, 4)
            assert tokenizer.tokens == {i: continuation([i, 3], 40) for i in range(1, 5)}
            await tokenizer.close()
            await replacement.stop(0)

    run(test())


def test_abort_tells_alive_ended_and_unknown_apart(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.005)):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            group = [submit(i, [5], 200, request_id=f"call-{i}", group_id="call") for i in (1, 2)]
            await tokenizer.send(submits=group)
            await tokenizer.read()

            async def abort(request_id: str) -> int:
                response = await tokenizer.stub.Abort(engine_pb2.AbortRequest(request_id=request_id), timeout=5)
                return int(response.outcome)

            assert await abort("call") == engine_pb2.AbortResponse.OUTCOME_ABORTED
            await tokenizer.read_until_ended(1, 2)
            assert await abort("call-1") == engine_pb2.AbortResponse.OUTCOME_ALREADY_FINISHED
            assert await abort("nobody") == engine_pb2.AbortResponse.OUTCOME_NOT_FOUND
            await tokenizer.close()

    run(test())


def test_watch_steps_shows_every_plan(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.002)):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            watch = tokenizer.stub.WatchSteps(engine_pb2.WatchStepsRequest())
            await watch.wait_for_connection()
            await asyncio.sleep(0.05)
            await tokenizer.send(submits=[submit(1, [5, 6, 7], 5)])
            steps = [await watch.read() for _ in range(5)]
            assert [list(step.num_scheduled_tokens) for step in steps] == [[3], [1], [1], [1], [1]]
            assert [step.step_id for step in steps] == list(range(steps[0].step_id, steps[0].step_id + 5))
            assert all(step.request_ids == ["request-1"] and step.num_dropped == 0 for step in steps)
            watch.cancel()
            await tokenizer.close()

    run(test())


def test_a_drain_refuses_new_requests_and_finishes_the_running_ones(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.005)) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 30)])
            await tokenizer.read()
            draining = asyncio.create_task(stage.drain(5.0))
            await asyncio.sleep(0.01)
            await tokenizer.send(submits=[submit(2, [6], 30)])
            await tokenizer.send(submits=[submit(3, [5], 30, request_id="request-1", age_ms=1)])
            await tokenizer.read_until_ended(1, 2, 3)
            await draining
            taken_over = tokenizer.tokens[1] + tokenizer.tokens[3][len(tokenizer.tokens[1]) :]
            assert taken_over == tokenizer.tokens[3] == continuation([5], 30), "what runs may be taken over"
            assert tokenizer.rejected[2].code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert tokenizer.rejected[2].reason == "DRAINING", "which tells tokenizers to keep it"
            assert any(frame.draining for frame in tokenizer.frames)
            await tokenizer.close()

    run(test())
