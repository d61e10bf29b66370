"""The connection to the executor that plans are fed to."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from tokenloom.api.v1 import executor_pb2, executor_pb2_grpc
from tokenloom.common.channel import bearer_metadata, make_channel
from tokenloom.common.connect import wait_until_connected
from tokenloom.common.errors import DeadlineExceeded, Unavailable, from_rpc_error

_END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class ExecutorClient:
    """One executor; calls raise TokenloomError.

    Args:
        timeout_s: longest wait for any answer.
    """

    def __init__(self, address: str, token: str, timeout_s: float) -> None:
        self._channel: Any = make_channel(address)
        self._stub: Any = executor_pb2_grpc.ExecutorServiceStub(self._channel)
        self._metadata = bearer_metadata(token)
        self._timeout_s = timeout_s
        self._call: Any = None

    async def capabilities(self) -> executor_pb2.GetCapabilitiesResponse:
        """What it can do; the first call to be made."""
        await wait_until_connected(self._channel, self._timeout_s)
        call = self._stub.GetCapabilities(
            executor_pb2.GetCapabilitiesRequest(), metadata=self._metadata, timeout=self._timeout_s
        )
        answer: executor_pb2.GetCapabilitiesResponse = await self._answer(call)
        return answer

    async def begin(self, num_blocks: int) -> executor_pb2.Epoch:
        """Begin an epoch and its stream; an earlier stream of this client ends."""
        self.end()
        request = executor_pb2.InitializeRequest(num_blocks=num_blocks)
        call = self._stub.Initialize(request, metadata=self._metadata, timeout=self._timeout_s)
        epoch: executor_pb2.Epoch = (await self._answer(call)).epoch
        self._call = self._stub.Execute(metadata=self._metadata)
        return epoch

    async def send(self, plan: executor_pb2.ExecuteRequest) -> None:
        """Send a plan."""
        try:
            await self._answer(self._call.write(plan))
        except asyncio.InvalidStateError:  # the stream has ended; why, reading tells
            await self.receive()
            raise Unavailable("the executor ended the stream") from None

    async def receive(self) -> executor_pb2.ExecuteResponse:
        """The next result."""
        result = await self._answer(self._call.read())
        if result is _END_OF_STREAM:
            raise Unavailable("the executor ended the stream")
        response: executor_pb2.ExecuteResponse = result
        return response

    def end(self) -> None:
        """End the stream, and so the epoch."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def close(self) -> None:
        """End all."""
        self.end()
        await self._channel.close()

    async def _answer(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise DeadlineExceeded(f"the executor gave no answer for {self._timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
