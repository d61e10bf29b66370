"""Is a stage ready? Asked through gRPC health for the inner stages and over HTTP for the gateway."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenloom.common.channel import make_channel

_SERVICES = {
    "executor": "tokenloom.api.v1.ExecutorService",
    "scheduler": "tokenloom.api.v1.EngineService",
    "tokenizer": "tokenloom.api.v1.InferenceService",
}
_CALL_TIMEOUT_S = 2.0
_POLL_S = 0.05


async def wait_until_serving(stage: str, address: str) -> None:
    """Return when the stage at `address` reports that it serves."""
    channel = make_channel(address)
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=_SERVICES[stage])
    try:
        while True:
            try:
                answer = await stub.Check(request, timeout=_CALL_TIMEOUT_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass  # not listening yet
            await asyncio.sleep(_POLL_S)
    finally:
        await channel.close(None)


async def wait_until_http_ready(host: str, port: int) -> None:
    """Return when `GET /ready` answers 200."""
    target = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    while True:
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(target, port)
                writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status = await reader.readline()
                writer.close()
            if status.split(b" ")[1:2] == [b"200"]:
                return
        except (OSError, TimeoutError):
            pass  # not listening yet
        await asyncio.sleep(_POLL_S)
