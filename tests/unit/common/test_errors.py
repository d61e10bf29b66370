from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.fakes import EXECUTOR_SERVICE
from tokenloom.api.v1 import executor_pb2, executor_pb2_grpc
from tokenloom.common import errors
from tokenloom.common.channel import bearer_metadata, make_channel
from tokenloom.common.errors import TokenloomError, from_proto, from_rpc_error, to_proto
from tokenloom.common.grpc_server import GrpcServer

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, TokenloomError)]


class Raising(executor_pb2_grpc.ExecutorServiceServicer):
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def GetCapabilities(self, request: Any, context: Any) -> executor_pb2.GetCapabilitiesResponse:
        raise self.error

    async def Initialize(self, request: Any, context: Any) -> executor_pb2.InitializeResponse:
        return executor_pb2.InitializeResponse()

    async def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[executor_pb2.ExecuteResponse]:
        async for request in request_iterator:
            yield executor_pb2.ExecuteResponse(step_id=request.step_id)
            raise self.error


async def errors_over_the_wire(folder: Path, error: Exception) -> list[TokenloomError]:
    """What a client gets for `error` from a unary and from a streaming method."""
    add = executor_pb2_grpc.add_ExecutorServiceServicer_to_server
    server = GrpcServer(f"unix:{folder}/s", [(add, Raising(error), EXECUTOR_SERVICE)])
    await server.start()
    channel: Any = make_channel(f"unix:{folder}/s")
    stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
    caught = []
    try:
        await stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(), timeout=5)
    except grpc.aio.AioRpcError as rpc_error:
        caught.append(from_rpc_error(rpc_error))
    call = stub.Execute(timeout=5)
    await call.write(executor_pb2.ExecuteRequest(step_id=1))
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as rpc_error:
        caught.append(from_rpc_error(rpc_error))
    await channel.close()
    await server.stop(0)
    return caught


@pytest.mark.parametrize("cls", ALL)
def test_an_error_survives_the_frame_and_the_status(cls: type[TokenloomError], tmp_path: Path) -> None:
    error = cls("what is wrong", field="temperature", reason="TOO_HOT", retry_after_s=1.5)
    seen = [from_proto(to_proto(error)), *asyncio.run(errors_over_the_wire(tmp_path, error))]
    assert len(seen) == 3
    for got in seen:
        assert got.code == cls.code
        assert (got.message, got.field, got.reason, got.retry_after_s) == (
            "what is wrong",
            "temperature",
            "TOO_HOT",
            1.5,
        )


def test_an_unexpected_exception_becomes_internal_and_tells_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for got in asyncio.run(errors_over_the_wire(tmp_path, ValueError("the secret detail"))):
        assert isinstance(got, errors.Internal)
        assert "secret" not in got.message
    assert "the secret detail" in caplog.text


def test_every_error_has_a_status_of_its_own() -> None:
    leaves = [cls for cls in ALL if cls is not TokenloomError]
    assert len({cls.code for cls in leaves}) == len(leaves) == 10


def test_health_needs_no_credential_and_everything_else_does(tmp_path: Path) -> None:
    async def test() -> None:
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        add = executor_pb2_grpc.add_ExecutorServiceServicer_to_server
        services = [(add, Raising(ValueError()), EXECUTOR_SERVICE)]
        server = GrpcServer(f"unix:{tmp_path}/s", services, cluster_token="secret")
        await server.start()
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        channel: Any = make_channel(f"unix:{tmp_path}/s")
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name, status in (("", 1), (EXECUTOR_SERVICE, 2)):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status == status
        await server.set_serving(True)
        ready = await health.Check(health_pb2.HealthCheckRequest(service=EXECUTOR_SERVICE), timeout=5)
        assert ready.status == 1
        for token in ("", "wrong"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Initialize(executor_pb2.InitializeRequest(), metadata=bearer_metadata(token), timeout=5)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        reflection = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
        await reflection.write(b"")
        assert await reflection.code() == grpc.StatusCode.UNAUTHENTICATED
        await stub.Initialize(executor_pb2.InitializeRequest(), metadata=bearer_metadata("secret"), timeout=5)
        await channel.close()
        await server.stop(0)

    asyncio.run(test())
