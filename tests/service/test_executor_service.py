"""The executor's service over a real Unix socket, with a tiny real model behind it: plans and their results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.service.executor_stack import (
    END_OF_STREAM,
    LIMIT_S,
    Client,
    Test,
    ask,
    generate,
    new_row,
    run_with_executor,
    running_executor,
)
from tests.tiny_models import write_tiny_model
from tokenloom.api.v1 import common_pb2, executor_pb2
from tokenloom.common.errors import InvalidArgument, Unauthenticated, from_rpc_error
from tokenloom.executor.model import PagedModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def with_executor(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    return lambda test: run_with_executor(test, folder, tmp_path)


def test_capabilities_describe_the_model(with_executor: Callable[[Test], None]) -> None:
    async def test(client: Client) -> None:
        found = await client.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(), timeout=LIMIT_S)
        assert (found.vocab_size, found.max_model_len, found.block_size) == (512, 1024, 16)
        assert found.max_num_blocks == (1 << 20) // found.block_bytes
        assert found.max_plans_in_flight >= 2
        assert list(found.eos_token_ids) == [2]
        assert found.boot_id
        assert "float32" in found.description

    with_executor(test)


def test_plans_in_flight_are_answered_in_order_with_transformers_own_tokens(
    with_executor: Callable[[Test], None],
) -> None:
    prompt, other = [9, 8, 7, 6, 5], [3, 4]

    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        # Both rows' next plans are sent before any result is read: rows feed back what is still in flight.
        await call.write(
            client.plan(1, [(1, 5, 0, [1]), (2, 2, 0, [2])], new_rows=[new_row(1, prompt), new_row(2, other)])
        )
        await call.write(client.plan(2, [(1, 1, 5, []), (2, 1, 2, [])]))
        tokens: dict[int, list[int]] = {1: [], 2: []}
        for step_id in range(1, 11):
            if step_id + 2 <= 10:
                await call.write(client.plan(step_id + 2, [(1, 1, 5 + step_id, []), (2, 1, 2 + step_id, [])]))
            result = await call.read()
            assert result.step_id == step_id
            for row_id, token in zip(result.row_ids, result.sampled_token_ids, strict=True):
                tokens[row_id].append(token)
        await call.done_writing()
        assert await call.read() is END_OF_STREAM
        assert tokens == {1: generate(prompt, 10), 2: generate(other, 10)}

    with_executor(test)


def test_malformed_plans_are_step_errors_and_the_stream_goes_on(with_executor: Callable[[Test], None]) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        await ask(call, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        bad = [
            client.plan(2, [(99, 1, 3, [])]),
            client.plan(3, [(1, 1, 3, [50])]),
            client.plan(4, [(1, 1, 3, [])], num_computed_tokens=[]),
            client.plan(5, [(1, 513, 3, [])]),
            client.plan(9, [(1, 1, 3, [])]),
        ]
        for plan in bad:
            result = await ask(call, plan)
            assert result.step_id == plan.step_id
            assert result.step_error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert result.step_error.reason == "MALFORMED_PLAN"
        good = await ask(call, client.plan(10, [(1, 1, 3, [])]))
        assert list(good.sampled_token_ids) == generate([5, 6, 7], 2)[1:]

    with_executor(test)


def test_a_bad_new_row_fails_alone_beside_a_running_one(with_executor: Callable[[Test], None]) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        await ask(call, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        unseeded = new_row(3, [5], sampling=common_pb2.SamplingParams(temperature=1.0))
        rows = [(1, 1, 3, []), (2, 2, 0, [2]), (3, 1, 0, [3])]
        result = await ask(call, client.plan(2, rows, new_rows=[new_row(2, [5, 512]), unseeded]))
        assert {row.row_id: row.error.field for row in result.row_errors} == {2: "prompt_token_ids", 3: "seed"}
        assert list(result.row_ids) == [1]
        assert list(result.sampled_token_ids) == generate([5, 6, 7], 2)[1:]

    with_executor(test)


def test_a_forward_pass_that_raises_is_a_step_error_and_the_process_goes_on(
    with_executor: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        with monkeypatch.context() as patch:
            patch.setattr(PagedModel, "hidden_states", lambda *_: 1 / 0)
            failed = await ask(call, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        assert failed.step_error.code == grpc.StatusCode.INTERNAL.value[0]
        in_flight = await ask(call, client.plan(2, [(1, 1, 3, []), (2, 2, 0, [2])], new_rows=[new_row(2, [8, 9])]))
        assert [row.row_id for row in in_flight.row_errors] == [1]
        assert list(in_flight.sampled_token_ids) == generate([8, 9], 1)

    with_executor(test)


@pytest.mark.parametrize("num_blocks", [0, 1, 1 << 20])
def test_kv_memory_that_does_not_fit_is_invalid_and_leaves_the_epoch(
    with_executor: Callable[[Test], None], num_blocks: int
) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        await ask(call, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.stub.Initialize(executor_pb2.InitializeRequest(num_blocks=num_blocks), timeout=LIMIT_S)
        error = from_rpc_error(failure.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == "num_blocks"
        assert (await ask(call, client.plan(2, [(1, 1, 3, [])]))).row_ids == [1]

    with_executor(test)


def test_callers_need_the_cluster_credential(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))

    async def main() -> None:
        async with running_executor(folder, tmp_path, cluster_token="secret") as client:
            await client.initialize()
            stranger = Client(f"unix:{tmp_path}/executor.sock")
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stranger.initialize()
            await stranger.channel.close()
            assert isinstance(from_rpc_error(failure.value), Unauthenticated)

    asyncio.run(main())
