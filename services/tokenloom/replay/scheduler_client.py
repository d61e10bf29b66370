"""Fetches the flight recorder's content from a scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from tokenloom.api.v1 import engine_pb2, engine_pb2_grpc, recording_pb2
from tokenloom.common.channel import bearer_metadata, make_channel
from tokenloom.common.connect import wait_until_connected
from tokenloom.common.errors import from_rpc_error


async def recorded_entries(address: str, token: str, timeout_s: float) -> AsyncIterator[recording_pb2.RecordingEntry]:
    """The entries of the scheduler's ring.

    Raises: TokenloomError as the scheduler answered.
    """
    channel: Any = make_channel(address)
    stub: Any = engine_pb2_grpc.EngineServiceStub(channel)
    try:
        await wait_until_connected(channel, timeout_s)
        call = stub.GetRecording(engine_pb2.GetRecordingRequest(), metadata=bearer_metadata(token), timeout=timeout_s)
        async for part in call:
            for entry in part.entries:
                yield entry
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    finally:
        await channel.close()
