"""Tenants over a session with the scheduler: policies, limits, giving way, and definitions that make no sense."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.fakes import FakeExecutor, continuation
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, serve_executor, submit
from tokenloom.api.v1 import engine_pb2
from tokenloom.common.errors import from_rpc_error
from tokenloom.scheduler.sessions import MAX_REFUSED_TENANTS

RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT.value[0]


def tenant(name: str, **policy: float) -> engine_pb2.TenantPolicy:
    return engine_pb2.TenantPolicy(tenant=name, **policy)  # type: ignore[arg-type]


def most_running(executor: FakeExecutor) -> int:
    """Most rows in a plan."""
    return max(len(plan.row_ids) for plan in executor.plans)


def test_a_policy_holds_for_the_submits_of_its_own_frame(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.002)
        async with scheduler_on(tmp_path, executor):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(
                submits=[submit(i, [i], 6, tenant="small") for i in range(1, 6)],
                tenants=[tenant("small", max_num_running=1)],
            )
            await tokenizer.read_until_ended(*range(1, 6))
            assert most_running(executor) == 1
            await tokenizer.send(tenants=[tenant("small", max_num_running=3)])
            await tokenizer.send(submits=[submit(i, [i], 6, tenant="small") for i in range(11, 16)])
            await tokenizer.read_until_ended(*range(11, 16))
            assert most_running(executor) == 3
            assert tokenizer.tokens == {i: continuation([i], 6) for i in (*range(1, 6), *range(11, 16))}
            await tokenizer.close()

    run(test())


def test_policies_survive_the_loss_of_the_executor(tmp_path: Path) -> None:
    async def test() -> None:
        executor = FakeExecutor(step_s=0.002)
        server = await serve_executor(tmp_path, executor)
        async with scheduler_on(tmp_path, executor, executor_server=server) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(tenants=[tenant("small", max_num_running=1)], submits=[submit(1, [1], tenant="small")])
            await tokenizer.read_until_ended(1)
            await server.stop(0)
            while stage.engine.is_ready:
                await asyncio.sleep(0.01)
            replacement = FakeExecutor()
            server = await serve_executor(tmp_path, replacement)
            await tokenizer.send(submits=[submit(i, [i], tenant="small") for i in range(2, 6)])
            await tokenizer.read_until_ended(*range(2, 6))
            assert most_running(replacement) == 1
            await tokenizer.close()
            await server.stop(0)

    run(test())


def test_a_tenants_own_queue_bound_refuses_its_requests_and_nobody_elses(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.005), max_num_seqs=1):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(tenants=[tenant("small", max_num_waiting=1)], submits=[submit(1, [1], 20)])
            await tokenizer.read()
            await tokenizer.send(
                submits=[submit(i, [i], 2, tenant="small") for i in (2, 3)] + [submit(i, [i], 2) for i in (4, 5)]
            )
            await tokenizer.read_until_ended(1, 2, 3, 4, 5)
            (refused,) = tokenizer.rejected
            assert refused == 3
            error = tokenizer.rejected[refused]
            assert (error.code, error.reason) == (RESOURCE_EXHAUSTED, "TENANT_QUEUE_FULL")
            assert error.retry_after_ms > 0
            assert "1 requests of this tenant wait" in error.message
            await tokenizer.close()

    run(test())


def test_a_request_that_gives_its_place_away_has_no_event_but_a_refusal_for_now(tmp_path: Path) -> None:
    """Its caller is told 429: the tokenizer answers what was rejected before anything else with the plain status."""

    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.005), max_num_seqs=1, max_num_waiting=3) as stage:
            flood, light = Tokenizer(tmp_path), Tokenizer(tmp_path)
            await flood.open()
            await light.open()
            await flood.send(submits=[submit(1, [1], 30, tenant="flood")])
            await flood.read()
            await flood.send(submits=[submit(i, [i], 3, tenant="flood") for i in (2, 3, 4)])
            while stage.engine.core is None or len(stage.engine.core.waiting) < 3:
                await asyncio.sleep(0.005)
            await light.send(submits=[submit(9, [9], 3, request_id="light", tenant="light")])
            await light.read_until_ended(9)
            await flood.read_until_ended(1, 2, 3, 4)
            assert light.tokens[9] == continuation([9], 3)
            assert list(flood.rejected) == [4], "the newest one of the tenant that fills the queue"
            assert flood.rejected[4].code == RESOURCE_EXHAUSTED
            assert flood.rejected[4].reason == "QUEUE_FULL"
            assert flood.rejected[4].retry_after_ms > 0
            assert 4 not in flood.finished.keys() | flood.cached.keys() | flood.tokens.keys()
            assert stage.engine.core.stats.num_displaced == 1
            await flood.close()
            await light.close()

    run(test())


@pytest.mark.parametrize(
    ("bad", "field", "words"),
    [
        (tenant("b", weight=0.0), "tenants.weight", ["'b'", "0.0", "from 0.001"]),
        (tenant("b", weight=float("nan")), "tenants.weight", ["'b'", "nan"]),
        (tenant("b", max_num_running=0), "tenants.max_num_running", ["'b'", "at least 1"]),
        (tenant("b", max_tokens_per_minute=0), "tenants.max_tokens_per_minute", ["'b'", "at least 1"]),
    ],
)
def test_a_malformed_policy_refuses_its_own_tenants_submits_until_a_good_one_comes(
    tmp_path: Path, bad: engine_pb2.TenantPolicy, field: str, words: list[str]
) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor()):
            tokenizer, other = Tokenizer(tmp_path), Tokenizer(tmp_path)
            await tokenizer.open()
            await other.open()
            await tokenizer.send(
                tenants=[tenant("a"), bad, tenant("c")],
                submits=[submit(1, [1], tenant="a"), submit(2, [2], tenant="b"), submit(3, [3], tenant="c")],
            )
            await tokenizer.send(submits=[submit(4, [4], tenant="b")])
            await tokenizer.read_until_ended(1, 2, 3, 4)
            assert tokenizer.tokens == {i: continuation([i], 8) for i in (1, 3)}, "neighbours run"
            for handle in (2, 4):
                error = tokenizer.rejected[handle]
                assert (error.code, error.field) == (INVALID_ARGUMENT, field)
                assert all(word in error.message for word in words), error.message
            await other.send(submits=[submit(5, [5], request_id="other", tenant="b")])
            await other.read_until_ended(5)
            assert other.tokens[5] == continuation([5], 8), "another session did not say so"
            await tokenizer.send(tenants=[tenant("b", weight=2.0)], submits=[submit(6, [6], tenant="b")])
            await tokenizer.read_until_ended(6)
            assert tokenizer.tokens[6] == continuation([6], 8)
            await tokenizer.close()
            await other.close()

    run(test())


def test_a_malformed_policy_leaves_the_one_before_in_force(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor()) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(tenants=[tenant("a", weight=4.0), tenant("a", weight=-1.0)], submits=[submit(1, [1])])
            await tokenizer.read_until_ended(1)
            assert stage.engine.core is not None
            assert stage.engine.core.tenants["a"].policy.weight == 4.0
            await tokenizer.close()

    run(test())


def test_a_session_that_sends_nothing_but_malformed_policies_ends_and_others_go_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.002)):
            broken, other = Tokenizer(tmp_path), Tokenizer(tmp_path)
            await broken.open()
            await other.open()
            await other.send(submits=[submit(1, [1], 60)])
            await broken.send(tenants=[tenant(f"t{i}", weight=0.0) for i in range(MAX_REFUSED_TENANTS + 1)])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await broken.read_until_ended(1)
            error = from_rpc_error(caught.value)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.field == "tenants.weight"
            await other.read_until_ended(1)
            assert other.tokens[1] == continuation([1], 60)
            await broken.close()
            await other.close()

    run(test())


def test_a_submit_with_too_long_a_tenants_name_is_refused_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor()):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            long = "x" * 257
            await tokenizer.send(
                tenants=[tenant(long)], submits=[submit(1, [1], tenant=long), submit(2, [2], tenant="x" * 256)]
            )
            await tokenizer.read_until_ended(1, 2)
            assert (tokenizer.rejected[1].code, tokenizer.rejected[1].field) == (INVALID_ARGUMENT, "tenant")
            assert "257 bytes" in tokenizer.rejected[1].message
            assert tokenizer.tokens[2] == continuation([2], 8)
            await tokenizer.close()

    run(test())
