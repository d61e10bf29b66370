"""Is a stage ready, or alive? Asked through gRPC health for the inner stages and over HTTP for the gateway."""

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


class StageProbe:
    """Asks an inner stage for its health; see `watchdog.Probe`. Made inside the running event loop.

    Args:
        needs_ready: it counts as started only once it was ready: it works hard before that.
    """

    def __init__(self, stage: str, address: str, *, needs_ready: bool) -> None:
        self._service = _SERVICES[stage] if needs_ready else ""
        self._channel = make_channel(address)
        self._stub = health_pb2_grpc.HealthStub(self._channel)

    async def is_up(self, timeout_s: float) -> bool:
        """It has started."""
        return await self._is_serving(self._service, timeout_s)

    async def is_live(self, timeout_s: float) -> bool:
        """It answers that it is alive."""
        return await self._is_serving("", timeout_s)

    async def close(self) -> None:
        """Ask no more."""
        await self._channel.close(None)

    async def _is_serving(self, service: str, timeout_s: float) -> bool:
        try:
            answer = await self._stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class GatewayProbe:
    """Asks the gateway; see `watchdog.Probe`. Whatever it does with the connection, it is alive."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def is_up(self, timeout_s: float) -> bool:
        """It has started."""
        return await self.is_live(timeout_s)

    async def is_live(self, timeout_s: float) -> bool:
        """It answers, or refuses to."""
        try:
            await _status_of(self._host, self._port, "/health", timeout_s)
        except (ConnectionRefusedError, TimeoutError):
            return False
        except OSError:
            pass  # it ended the connection: too many, perhaps
        return True

    async def close(self) -> None:
        """Ask no more."""


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
    while True:
        try:
            if await _status_of(host, port, "/ready", _CALL_TIMEOUT_S) == b"200":
                return
        except OSError:
            pass  # not listening yet
        await asyncio.sleep(_POLL_S)


async def _status_of(host: str, port: int, path: str, timeout_s: float) -> bytes:
    """The status that a GET is answered with; empty if the connection was ended.

    Raises: OSError, of which TimeoutError is one.
    """
    target = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(target, port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            return (await reader.readline()).partition(b" ")[2][:3]
        finally:
            writer.close()
