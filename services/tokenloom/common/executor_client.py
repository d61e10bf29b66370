"""The connection of a command that feeds plans to an executor: one that checks or replays, not the scheduler's."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from tokenloom.api.v1 import executor_pb2, executor_pb2_grpc
from tokenloom.common.channel import bearer_metadata, make_channel
from tokenloom.common.connect import wait_until_connected
from tokenloom.common.errors import DeadlineExceeded, Unavailable, from_rpc_error

_END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class ExecutorClient:
    """One executor. What it refuses is raised as TokenloomError; every wait has a limit.

    Args:
        timeout_s: longest wait for any answer.
    """

    def __init__(self, address: str, token: str, timeout_s: float) -> None:
        self._channel: Any = make_channel(address)
        self._stub: Any = executor_pb2_grpc.ExecutorServiceStub(self._channel)
        self._metadata = bearer_metadata(token)
        self._timeout_s = timeout_s

    async def capabilities(self) -> executor_pb2.GetCapabilitiesResponse:
        """GetCapabilities; the first call to be made."""
        await wait_until_connected(self._channel, self._timeout_s)
        call = self._stub.GetCapabilities(
            executor_pb2.GetCapabilitiesRequest(), metadata=self._metadata, timeout=self._timeout_s
        )
        answer: executor_pb2.GetCapabilitiesResponse = await answer_of(call, self._timeout_s)
        return answer

    async def initialize(self, num_blocks: int, heartbeat_ms: int = 0) -> executor_pb2.Epoch:
        """Initialize; without heartbeats unless they are asked for."""
        request = executor_pb2.InitializeRequest(num_blocks=num_blocks, heartbeat_ms=heartbeat_ms)
        call = self._stub.Initialize(request, metadata=self._metadata, timeout=self._timeout_s)
        epoch: executor_pb2.Epoch = (await answer_of(call, self._timeout_s)).epoch
        return epoch

    def stream(self) -> PlanStream:
        """Begin an Execute stream."""
        return PlanStream(self._stub.Execute(metadata=self._metadata), self._timeout_s)

    async def close(self) -> None:
        """End all."""
        await self._channel.close()


class PlanStream:
    """An Execute stream."""

    def __init__(self, call: Any, timeout_s: float) -> None:
        self._call = call
        self._timeout_s = timeout_s

    async def send(self, plan: executor_pb2.ExecuteRequest) -> None:
        """Send a plan. On a stream that has ended nothing happens: reading tells why."""
        with contextlib.suppress(asyncio.InvalidStateError):
            await answer_of(self._call.write(plan), self._timeout_s)

    async def read(self) -> executor_pb2.ExecuteResponse | None:
        """The next result; None if the executor ended the stream with status OK."""
        result = await answer_of(self._call.read(), self._timeout_s)
        return None if result is _END_OF_STREAM else result

    async def receive(self) -> executor_pb2.ExecuteResponse:
        """The next result, which must come."""
        if (result := await self.read()) is None:
            raise Unavailable("the executor ended the stream with status OK before it gave all results")
        return result

    async def half_close(self) -> None:
        """No more plans."""
        await answer_of(self._call.done_writing(), self._timeout_s)

    def cancel(self) -> None:
        """End the stream at once."""
        self._call.cancel()


async def answer_of(call: Any, timeout_s: float) -> Any:
    """What a call answers within the limit."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        raise DeadlineExceeded(f"the executor gave no answer for {timeout_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
