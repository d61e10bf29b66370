"""The benchmarks' questions to a whole stack, against a server that answers from a script."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from loadtest.bench.over_http import http_settings, measure_refusals, measure_tenants

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ERROR = b'{"error":{"code":"queue_full","type":""}}'
REFUSAL = b"HTTP/1.1 429 x\r\ncontent-length: %d\r\n\r\n%s" % (len(ERROR), ERROR)
GAP_S = 0.02
LIMIT_S = 20.0
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def event(data: bytes) -> bytes:
    line = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


async def stream(writer: asyncio.StreamWriter) -> None:
    """Two tokens, GAP_S apart."""
    text = event(json.dumps({"choices": [{"text": "a"}]}).encode())
    writer.write(HEAD + text)
    await asyncio.sleep(GAP_S)
    writer.write(text + event(b"[DONE]") + b"0\r\n\r\n")


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """Yields: its URL. Each request's head and body go to `answer`."""
    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await answer(head + await reader.readexactly(length), writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await listener.wait_closed()
        await asyncio.gather(*handlers)


def test_refusals_are_timed_and_other_errors_named() -> None:
    numbers = itertools.count()

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        number = next(numbers)
        if number == 0:
            writer.write(b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n")
        elif number > 10:
            writer.write(REFUSAL)
        else:
            await stream(writer)

    async def measure() -> dict[str, object]:
        async with server(answer) as url:
            return await measure_refusals(http_settings(url, "", 4, 2), num_clients=3, duration_s=0.9)

    figures = asyncio.run(asyncio.wait_for(measure(), LIMIT_S))
    assert figures["other_errors"] == ["http 500"]
    assert isinstance(figures["num_refused"], int)
    assert isinstance(figures["served_per_s"], float)
    assert figures["num_refused"] >= 3
    assert 0 < figures["served_per_s"] <= 10 / 0.3
    assert figures["offered_per_s"] == pytest.approx(10 * figures["served_per_s"])
    assert isinstance(figures["refusal_ms_p99"], float)


def test_the_light_tenant_is_measured_alone_and_beside_the_flood_and_each_uses_its_key() -> None:
    num_seen = {"flood": 0, "light": 0}
    num_before_the_flood = 0

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal num_before_the_flood
        key = "flood" if b"Bearer flood" in request else "light"
        num_seen[key] += 1
        if not num_seen["flood"]:
            num_before_the_flood += 1
        await stream(writer)

    async def measure() -> dict[str, object]:
        async with server(answer) as url:
            flood, light = (http_settings(url, key, 4, 2) for key in ("flood", "light"))
            return await measure_tenants(flood, light, num_flood=2, every_s=0.1, duration_s=1.0)

    figures = asyncio.run(asyncio.wait_for(measure(), LIMIT_S))
    assert num_seen["flood"] > 0
    assert 0 < num_before_the_flood < num_seen["light"]
    assert figures["num_light_failed"] == 0
    gap_ms, alone_ms, bound_ms = (figures[name] for name in ("flood_gap_ms_p95", "light_ttft_alone_ms_p95", "bound_ms"))
    assert isinstance(gap_ms, float)
    assert isinstance(alone_ms, float)
    assert gap_ms >= 0.9 * GAP_S * 1000
    assert bound_ms == pytest.approx(alone_ms + 3 * gap_ms)


def test_failed_requests_of_the_light_tenant_are_counted_and_give_no_time() -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(REFUSAL)

    async def measure() -> dict[str, object]:
        async with server(answer) as url:
            flood, light = (http_settings(url, key, 4, 2) for key in ("flood", "light"))
            return await measure_tenants(flood, light, num_flood=1, every_s=0.1, duration_s=0.4)

    figures = asyncio.run(asyncio.wait_for(measure(), LIMIT_S))
    assert isinstance(figures["num_light_failed"], int)
    assert figures["num_light_failed"] >= 2
    assert figures["light_ttft_alone_ms_p50"] is figures["bound_ms"] is None
