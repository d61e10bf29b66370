"""Prometheus metrics of this process and a small endpoint to serve them.

Names follow vLLM's with the prefix `tokenloom_`; a metric's meaning is that of the vLLM metric of the same name. Each
stage has names of its own, so that the pages of several stages can be joined into one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from tokenloom.common.address import check_port_free, parse_address, remove_stale_socket
from tokenloom.common.errors import Unavailable

REGISTRY = CollectorRegistry(auto_describe=True)
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_MAX_PAGE_BYTES = 4 << 20


def setup_process_metrics(stage: str) -> None:
    """Add CPU, memory and open files of this process as `tokenloom_<stage>_process_*`."""
    ProcessCollector(namespace=f"tokenloom_{stage}", registry=REGISTRY)


class MetricsServer:
    """Serves this process's metrics as `GET /metrics` (HTTP/1.1, one request per connection)."""

    def __init__(self, address: str, page: Callable[[], bytes] = lambda: generate_latest(REGISTRY)) -> None:
        self._address = parse_address(address)
        self._page = page
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        remove_stale_socket(self._address)
        check_port_free(self._address)
        if self._address.is_unix:
            self._server = await asyncio.start_unix_server(self._serve, self._address.path)
        else:
            self._server = await asyncio.start_server(self._serve, self._address.host, self._address.port)

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            async with asyncio.timeout(5):
                request = await reader.readuntil(b"\r\n\r\n")
                found = request.startswith((b"GET /metrics ", b"GET / "))
                status, body = (b"200 OK", self._page()) if found else (b"404 Not Found", b"try /metrics\n")
                head = (
                    f"Content-Type: {CONTENT_TYPE_LATEST}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(b"HTTP/1.1 " + status + b"\r\n" + head.encode() + body)
                await writer.drain()
        writer.close()


async def fetch_metrics(address: str, timeout_s: float = 2.0) -> bytes:
    """The page of a `MetricsServer` at `address`.

    Raises: Unavailable if there is no answer within `timeout_s`.
    """
    target = parse_address(address)
    try:
        async with asyncio.timeout(timeout_s):
            if target.is_unix:
                reader, writer = await asyncio.open_unix_connection(target.path)
            else:
                reader, writer = await asyncio.open_connection(target.host, target.port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: stage\r\n\r\n")
            await writer.drain()
            answer = await reader.read(-1)
            writer.close()
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"no metrics from {address}: {error or 'no answer'}") from None
    return answer.partition(b"\r\n\r\n")[2][:_MAX_PAGE_BYTES]
