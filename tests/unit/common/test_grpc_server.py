from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.fakes import EXECUTOR_SERVICE, FakeExecutor
from tokenloom.api.v1 import executor_pb2, executor_pb2_grpc
from tokenloom.common.channel import make_channel
from tokenloom.common.errors import SetupError
from tokenloom.common.grpc_server import GrpcServer

SERVICES = [(executor_pb2_grpc.add_ExecutorServiceServicer_to_server, FakeExecutor(), EXECUTOR_SERVICE)]


def test_reflection_describes_the_services(tmp_path: Path) -> None:
    def ask() -> tuple[set[str], set[str]]:
        with grpc.insecure_channel(f"unix:{tmp_path}/s") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            file = database.FindFileContainingSymbol(EXECUTOR_SERVICE)
            return set(database.get_services()), {method.name for method in file.service[0].method}

    async def test() -> None:
        server = GrpcServer(f"unix:{tmp_path}/s", SERVICES)
        await server.start()
        services, methods = await asyncio.to_thread(ask)
        assert {EXECUTOR_SERVICE, "grpc.health.v1.Health"} <= services
        assert methods == {"GetCapabilities", "Initialize", "Execute"}
        await server.stop(0)

    asyncio.run(test())


def test_a_server_may_listen_at_several_addresses(tmp_path: Path) -> None:
    async def test() -> None:
        server = GrpcServer(f"unix:{tmp_path}/s,127.0.0.1:0", SERVICES)
        await server.start()
        for address in (f"unix:{tmp_path}/s", f"127.0.0.1:{server.port}"):
            channel: Any = make_channel(address)
            stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
            answer = await stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(), timeout=5)
            assert answer.model_id == "fake"
            await channel.close()
        await server.stop(0)

    asyncio.run(test())


def test_an_internal_service_is_not_open_to_other_machines_without_a_credential() -> None:
    async def test() -> None:
        for address in ("0.0.0.0:0", ":0", "127.0.0.1:0,0.0.0.0:0"):
            with pytest.raises(SetupError, match="--cluster-token"):
                await GrpcServer(address, SERVICES, cluster_token="").start()
        for address, token in (("0.0.0.0:0", "secret"), ("127.0.0.1:0", ""), ("0.0.0.0:0", None)):
            server = GrpcServer(address, SERVICES, cluster_token=token)
            await server.start()
            await server.stop(0)

    asyncio.run(test())


def test_a_taken_address_is_a_setup_error(tmp_path: Path) -> None:
    async def test(address: str) -> None:
        with pytest.raises(SetupError, match=address.rpartition(":")[2]):
            await GrpcServer(address, SERVICES).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(test(f"127.0.0.1:{listener.getsockname()[1]}"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        asyncio.run(test(f"unix:{tmp_path}/s"))
