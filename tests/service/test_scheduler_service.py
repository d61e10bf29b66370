"""The scheduler stage over real sockets, between a fake executor and a hand-driven tokenizer session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from tests.fakes import EXECUTOR_SERVICE, FakeExecutor, continuation
from tokenloom.api.v1 import common_pb2, engine_pb2, engine_pb2_grpc, executor_pb2_grpc
from tokenloom.common.channel import bearer_metadata, make_channel
from tokenloom.common.config import ProcessSettings
from tokenloom.common.errors import from_rpc_error
from tokenloom.common.grpc_server import GrpcServer
from tokenloom.scheduler import sessions
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.stage import SchedulerStage

LIMIT_S = 20.0


def run(test: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(test, LIMIT_S))


async def serve_executor(folder: Path, executor: FakeExecutor) -> GrpcServer:
    add = executor_pb2_grpc.add_ExecutorServiceServicer_to_server
    server = GrpcServer(f"unix:{folder}/executor.sock", [(add, executor, EXECUTOR_SERVICE)])
    await server.start()
    return server


@asynccontextmanager
async def scheduler_on(
    folder: Path, executor: FakeExecutor, *, executor_server: GrpcServer | None = None, **changes: Any
) -> AsyncIterator[SchedulerStage]:
    """A scheduler stage that is ready, its fake executor beside it."""
    server = executor_server or await serve_executor(folder, executor)
    settings = SchedulerSettings(
        ProcessSettings(cluster_token=changes.pop("cluster_token", "")),
        listen=f"unix:{folder}/scheduler.sock",
        executor=f"unix:{folder}/executor.sock",
        **changes,
    )
    stage = SchedulerStage(settings)
    await stage.start()
    try:
        while not stage.engine.is_ready:
            await asyncio.sleep(0.01)
        yield stage
    finally:
        await stage.stop()
        await server.stop(0.1)
    assert not executor.violations, executor.violations
    assert executor.num_epochs == 1, "the scheduler lost its executor"


class Tokenizer:
    """A session driven by hand; collects what it is told."""

    def __init__(self, folder: Path) -> None:
        self.channel: Any = make_channel(f"unix:{folder}/scheduler.sock")
        self.stub: Any = engine_pb2_grpc.EngineServiceStub(self.channel)
        self.frames: list[engine_pb2.EngineServiceSessionResponse] = []
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, engine_pb2.Finished] = {}
        self.rejected: dict[int, common_pb2.Error] = {}
        self.cached: dict[int, int] = {}
        self.logprob_ids: dict[int, list[int]] = {}

    async def open(self, **hello: Any) -> engine_pb2.Welcome:
        self.call = self.stub.Session()
        hello = {"schema_revision": 1, "client_id": "test", **hello}
        await self.call.write(engine_pb2.EngineServiceSessionRequest(hello=engine_pb2.Hello(**hello)))
        first: engine_pb2.EngineServiceSessionResponse = await self.call.read()
        return first.welcome

    async def send(self, **parts: Any) -> None:
        await self.call.write(engine_pb2.EngineServiceSessionRequest(**parts))

    async def read(self) -> None:
        frame = await self.call.read()
        self.frames.append(frame)
        outputs, at, logprobs_at = frame.outputs, 0, 0
        for handle, first, count in zip(outputs.handles, outputs.first_token_indexes, outputs.num_tokens, strict=True):
            told = self.tokens.setdefault(handle, [])
            assert first == len(told), "tokens are told once, in order"
            told += outputs.token_ids[at : at + count]
            at += count
        for handle, count, width in zip(
            outputs.handles, outputs.num_tokens, outputs.num_logprobs_per_token, strict=True
        ):
            entries = list(outputs.logprob_token_ids[logprobs_at : logprobs_at + count * width])
            self.logprob_ids.setdefault(handle, []).extend(entries)
            logprobs_at += count * width
        assert logprobs_at == len(outputs.logprobs)
        self.cached |= {accepted.handle: accepted.num_cached_tokens for accepted in frame.accepted}
        self.finished |= {finished.handle: finished for finished in frame.finished}
        self.rejected |= {rejected.handle: rejected.error for rejected in frame.rejected}

    async def read_until_ended(self, *handles: int) -> None:
        while not set(handles) <= self.finished.keys() | self.rejected.keys():
            await self.read()

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


def submit(handle: int, prompt: list[int], max_tokens: int = 8, **fields: Any) -> engine_pb2.Submit:
    return engine_pb2.Submit(
        handle=handle,
        request_id=fields.pop("request_id", f"request-{handle}"),
        prompt_token_ids=prompt,
        stop=stop_conditions(max_tokens, **fields.pop("stop", {})),
        **fields,
    )


def stop_conditions(max_tokens: int, **fields: Any) -> common_pb2.StopConditions:
    return common_pb2.StopConditions(max_tokens=max_tokens, **fields)


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
            await tokenizer.send(
                submits=[submit(1, [5], 240, remaining_time_ms=1000), submit(2, [6], 10, remaining_time_ms=50)]
            )
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


def test_a_failed_step_fails_its_requests_and_no_others(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        async with scheduler_on(tmp_path, executor):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            executor.step_errors.append(common_pb2.Error(code=13, message="out of memory"))
            await tokenizer.send(submits=[submit(1, [5], 10)])
            await tokenizer.read_until_ended(1)
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


def test_a_new_session_takes_a_lost_ones_requests_over(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.005)):
            first = Tokenizer(tmp_path)
            await first.open()
            with_logprobs = common_pb2.SamplingParams(num_logprobs=1)
            await first.send(submits=[submit(1, [5], 60), submit(2, [6], 60, sampling=with_logprobs)])
            while len(first.tokens.get(2, [])) < 5:
                await first.read()
            one, two = first.tokens[2][:2]
            assert first.logprob_ids[2][:4] == [one, one + 1, two, two + 1]
            await first.close()
            second = Tokenizer(tmp_path)
            await second.open()
            second.tokens = {7: first.tokens[1][:], 8: first.tokens[2][:3]}
            resumed = submit(7, [5], 60, request_id="request-1", resume_token_ids=first.tokens[1], age_ms=10)
            attach = engine_pb2.Attach(handle=8, request_id="request-2", from_token_index=3)
            await second.send(submits=[resumed], attaches=[attach])
            await second.read_until_ended(7, 8)
            assert second.tokens == {7: continuation([5], 60), 8: continuation([6], 60)}
            assert second.logprob_ids[7] == []
            assert second.logprob_ids[8][::2] == continuation([6], 60)[3:], "logprobs are told again, too"
            await second.close()

    run(test())


def test_requests_of_a_lost_session_end_when_nobody_takes_them_over(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.005), takeover_s=0.1) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 240)])
            await tokenizer.read()
            await tokenizer.close()
            await asyncio.wait_for(stage.engine.wait_until_idle(10), 8)
            assert stage.engine.core is not None
            assert stage.engine.core.num_requests == 0
            assert stage.engine.core.kv.pool.num_held_blocks == 0

    run(test())


def test_a_takeover_timer_ends_only_what_its_own_loss_orphaned(tmp_path: Path) -> None:
    """Lost, taken over, lost again: the second loss has its whole time. Ended and begun anew: not the old one's."""

    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.01), takeover_s=0.6) as stage:

            async def attach_for_a_while(first: int) -> Tokenizer:
                tokenizer = Tokenizer(tmp_path)
                await tokenizer.open()
                attach = engine_pb2.Attach(handle=first, request_id="request-1", from_token_index=0)
                await tokenizer.send(attaches=[attach])
                await tokenizer.read()
                return tokenizer

            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [5], 240)])
            await tokenizer.read()
            await tokenizer.close()
            await asyncio.sleep(0.3)
            await (await attach_for_a_while(1)).close()
            await asyncio.sleep(0.45)  # the first loss's time is over, the second one's is not
            third = await attach_for_a_while(2)
            assert 2 not in third.rejected
            await third.send(cancels=[engine_pb2.Cancel(handle=2)])
            await third.read_until_ended(2)
            await third.send(submits=[submit(3, [6], 200, request_id="request-1")])
            await asyncio.sleep(0.4)  # the second loss's time is over, too
            assert stage.engine.core is not None
            assert stage.engine.core.find("request-1") is not None
            await third.close()

    run(test())


def test_a_request_that_another_session_takes_over_ends_for_the_first(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.005)):
            first, second = Tokenizer(tmp_path), Tokenizer(tmp_path)
            await first.open()
            await second.open()
            await first.send(submits=[submit(1, [5], 60)])
            await first.read()
            other = submit(8, [6], 60, request_id="request-1")
            await second.send(submits=[other, submit(7, [5], 60, request_id="request-1")])
            await first.read_until_ended(1)
            await second.read_until_ended(7, 8)
            assert first.finished[1].error.reason == "SUPERSEDED"
            assert second.tokens[7] == continuation([5], 60)
            assert second.rejected[8].field == "request_id", "another prompt is another request"
            await first.close()
            await second.close()

    run(test())


def test_a_session_that_is_not_read_is_closed_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound this small, the news of one step for 32 requests is more than may wait."""
    monkeypatch.setattr(sessions, "OUTBOX_BYTES", 4000)

    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(), takeover_s=0.1) as stage:
            slow, other = Tokenizer(tmp_path), Tokenizer(tmp_path)
            await slow.open()
            await other.open()
            await slow.send(submits=[submit(i, [i], 200) for i in range(1, 33)])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await slow.read_until_ended(*range(1, 33))
            assert from_rpc_error(caught.value).reason == "SLOW_READER"
            await other.send(submits=[submit(99, [6], 20)])
            await other.read_until_ended(99)
            assert other.tokens[99] == continuation([6], 20)
            await asyncio.wait_for(stage.engine.wait_until_idle(10), 5)
            await slow.close()
            await other.close()

    run(test())


def test_a_session_of_another_model_or_tokenizer_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor()):
            for hello in ({"model_id": "other"}, {"tokenizer_fingerprint": "other"}, {"schema_revision": 9}):
                tokenizer = Tokenizer(tmp_path)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await tokenizer.open(**hello)
                assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
                await tokenizer.close()
            tokenizer = Tokenizer(tmp_path)
            welcome = await tokenizer.open(model_id="fake", tokenizer_fingerprint="fake-tokenizer")
            assert (welcome.vocab_size, welcome.block_size, welcome.max_model_len) == (1000, 4, 252)
            await tokenizer.close()

    run(test())


def test_the_cluster_credential_guards_every_method(tmp_path: Path) -> None:
    async def test() -> None:
        settings = SchedulerSettings(
            ProcessSettings(cluster_token="secret"), listen=f"unix:{tmp_path}/scheduler.sock", executor="127.0.0.1:1"
        )
        stage = SchedulerStage(settings)
        await stage.start()
        channel: Any = make_channel(f"unix:{tmp_path}/scheduler.sock")
        methods = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].methods
        assert len(methods) == 5
        for method in methods:
            for metadata in ((), bearer_metadata("wrong")):
                call = channel.stream_stream(f"/tokenloom.api.v1.EngineService/{method.name}")(metadata=metadata)
                await call.write(b"")
                await call.done_writing()
                assert await call.code() == grpc.StatusCode.UNAUTHENTICATED, method.name
        stub: Any = engine_pb2_grpc.EngineServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLoad(engine_pb2.GetLoadRequest(), metadata=bearer_metadata("secret"), timeout=5)
        assert "waits for its executor" in str(from_rpc_error(caught.value))
        await channel.close()
        await stage.stop()

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
            await tokenizer.read_until_ended(1, 2)
            await draining
            assert tokenizer.tokens[1] == continuation([5], 30)
            assert tokenizer.rejected[2].code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert any(frame.draining for frame in tokenizer.frames)
            await tokenizer.close()

    run(test())
