"""A proxy between two stages that does what networks do: cuts, delays, throttles, truncates, swallows.

It runs on an event loop in a thread of its own, so tests of any kind can use it; every command returns when it is done.
A server that cannot be reached, or that closes, closes its client's connection too: a killed process looks as it does
without a proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
_CHUNK_BYTES = 64 << 10
_LIMIT_S = 10.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST and throws away what is buffered


class ProxyThread:
    """The event loop that proxies run on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._proxies: list[Proxy] = []
        self._thread.start()

    def proxy(self, address: str, target: str) -> Proxy:
        """A proxy that listens at `address` (unix:PATH or host:port) for a server at `target`."""
        proxy = Proxy(self, address, target)
        self.run(proxy.listen())
        self._proxies.append(proxy)
        return proxy

    def run(self, command: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(command, self._loop).result(_LIMIT_S)

    def close(self) -> None:
        """End all connections and the thread."""
        for proxy in self._proxies:
            self.run(proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_S)
        self._loop.close()

    def __enter__(self) -> ProxyThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class Proxy:
    """One listening address in front of one server. Commands are called from outside of the loop's thread.

    Attributes:
        address: for clients.
    """

    def __init__(self, thread: ProxyThread, address: str, target: str) -> None:
        self.address = address
        self._thread = thread
        self._target = target
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self.num_accepted = 0
        # What is done to every chunk, in both directions.
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.is_truncating = False
        self.can_pass = asyncio.Event()
        self.can_pass.set()

    # --- commands -------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def cut(self) -> int:
        """Reset every connection; new ones are let through. Returns: how many there were."""
        return self._do(self._cut_all)

    def truncate(self) -> None:
        """Of the next chunk that the server sends on each connection let half through, then reset it."""
        self._do(lambda: self._set(is_truncating=True))

    def delay(self, seconds: float) -> None:
        """Deliver every chunk so much later; 0 ends it."""
        self._do(lambda: self._set(delay_s=seconds))

    def throttle(self, bytes_per_s: float) -> None:
        """Pass at most so many bytes per second in each direction; 0 ends it."""
        self._do(lambda: self._set(bytes_per_s=bytes_per_s))

    def blackhole(self) -> None:
        """Keep all connections open, accept new ones, and pass nothing on: no byte, no end."""
        self._do(self.can_pass.clear)

    def heal(self) -> None:
        """End delays, throttling, truncation and the black hole; what was held back is delivered."""
        self._do(lambda: self._set(delay_s=0.0, bytes_per_s=0.0, is_truncating=False))
        self._do(self.can_pass.set)

    def retarget(self, target: str) -> None:
        """Send new connections to another server, and cut those to the old one."""
        self._do(lambda: self._set(_target=target))
        self.cut()

    # --- on the loop ----------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Accept connections."""
        if self.address.startswith("unix:"):
            self._server = await asyncio.start_unix_server(self._serve, self.address.removeprefix("unix:"))
        else:
            host, _, port = self.address.rpartition(":")
            self._server = await asyncio.start_server(self._serve, host, int(port))

    async def close(self) -> None:
        """Stop listening, end every connection."""
        assert self._server is not None
        self._server.close()
        self._set(delay_s=0.0, bytes_per_s=0.0)
        self.can_pass.set()
        tasks = [connection.task for connection in self._connections]
        self._cut_all()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(self, writer, task)
        self._connections.add(connection)
        try:
            await connection.run(reader, self._target)
        finally:
            self._connections.discard(connection)
            connection.reset()

    def _do(self, command: Callable[[], T]) -> T:
        async def do() -> T:
            return command()

        return self._thread.run(do())

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _cut_all(self) -> int:
        connections = list(self._connections)
        for connection in connections:
            connection.reset()
        return len(connections)


class _Connection:
    """A client's connection and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, client: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        self._proxy = proxy
        self._client = client
        self._server: asyncio.StreamWriter | None = None
        self.task = task

    async def run(self, from_client: asyncio.StreamReader, target: str) -> None:
        """Pass bytes on in both directions until one side ends, which ends the other."""
        with contextlib.suppress(OSError):
            if target.startswith("unix:"):
                from_server, self._server = await asyncio.open_unix_connection(target.removeprefix("unix:"))
            else:
                host, _, port = target.rpartition(":")
                from_server, self._server = await asyncio.open_connection(host, int(port))
            ways = [
                asyncio.ensure_future(self._pass(from_client, self._server, is_answer=False)),
                asyncio.ensure_future(self._pass(from_server, self._client, is_answer=True)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.wait(ways)

    def reset(self) -> None:
        """Close both connections without delivering what is buffered."""
        for writer in (self._client, self._server):
            if writer is not None:
                sock = writer.get_extra_info("socket")
                if sock is not None and sock.family != socket.AF_UNIX:
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        proxy = self._proxy
        delayed: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)
        sender = asyncio.create_task(self._deliver(delayed, writer))
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(_CHUNK_BYTES):
                await proxy.can_pass.wait()
                if proxy.is_truncating and is_answer and len(data) > 1:
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    return
                await delayed.put((loop.time() + proxy.delay_s, data))
                if sender.done():
                    return
        except OSError:
            return
        finally:
            sender.cancel()
            await asyncio.wait([sender])

    async def _deliver(self, delayed: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while True:
                due_s, data = await delayed.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                if (rate := self._proxy.bytes_per_s) > 0:
                    await asyncio.sleep(len(data) / rate)
                await self._proxy.can_pass.wait()
                writer.write(data)
                await writer.drain()
