"""Sessions of tokenizers with the scheduler stage: takeovers, losses, refusals, credentials."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from tests.fakes import FakeExecutor, continuation
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, submit
from tokenloom.api.v1 import common_pb2, engine_pb2, engine_pb2_grpc
from tokenloom.common.channel import bearer_metadata, make_channel
from tokenloom.common.config import ProcessSettings
from tokenloom.common.errors import ResourceExhausted, from_rpc_error
from tokenloom.scheduler import servicer, sessions
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.stage import SchedulerStage


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
            assert first.logprob_ids[2][:4] == [one, one, two, two]
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
    """Without gRPC's buffers between the servicer and its reader."""
    monkeypatch.setattr(sessions, "OUTBOX_BYTES", 4000)

    async def requests() -> AsyncIterator[engine_pb2.EngineServiceSessionRequest]:
        yield engine_pb2.EngineServiceSessionRequest(hello=engine_pb2.Hello(schema_revision=1, client_id="slow"))
        yield engine_pb2.EngineServiceSessionRequest(submits=[submit(i, [i], 200) for i in range(1, 33)])
        await asyncio.Event().wait()

    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(), takeover_s=0.1) as stage:
            other = Tokenizer(tmp_path)
            await other.open()
            frames = servicer.EngineServicer(stage.engine, cast(Any, None), 10.0).Session(requests(), None)
            for _ in range(2):  # the welcome and the load; the rest is left
                await anext(frames)
            while len(stage.engine.registry.sessions) == 2:
                await asyncio.sleep(0.01)
            with pytest.raises(ResourceExhausted, match="was not read") as caught:
                await anext(frames)
            assert caught.value.reason == "SLOW_READER"
            await other.send(submits=[submit(99, [6], 20)])
            await other.read_until_ended(99)
            assert other.tokens[99] == continuation([6], 20)
            await asyncio.wait_for(stage.engine.wait_until_idle(10), 5)
            await other.close()

    run(test())


def test_a_session_that_takes_much_over_is_told_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacks is more than what may wait for a reader that does not read."""
    monkeypatch.setattr(sessions, "OUTBOX_BYTES", 100_000)
    monkeypatch.setattr(servicer, "MUCH_BYTES", 50_000)

    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.03)):
            first, second = Tokenizer(tmp_path), Tokenizer(tmp_path)
            await first.open()
            much = common_pb2.SamplingParams(num_logprobs=20)
            numbers = range(1, 4)
            await first.send(submits=[submit(i, [i], 75, sampling=much) for i in numbers])
            while len(first.tokens.get(3, ())) < 45:
                await first.read()
            await first.close()
            await second.open()
            await second.send(
                attaches=[engine_pb2.Attach(handle=i, request_id=f"request-{i}", from_token_index=0) for i in numbers]
            )
            await second.read_until_ended(*numbers)
            assert not second.rejected
            assert second.tokens == {i: continuation([i], 75) for i in numbers}
            assert all(len(second.logprob_ids[i]) == 75 * 21 for i in numbers)
            await second.close()

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
        assert len(methods) == 7
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
