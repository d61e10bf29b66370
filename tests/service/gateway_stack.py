"""A gateway on a real port before fake tokenizers, all in a thread of its own, for tests that speak HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvloop

from tests.fakes import FakeTokenizerStage
from tokenloom.common.config import ProcessSettings
from tokenloom.gateway.config import GatewayConfig
from tokenloom.gateway.server import GatewayStage

T = TypeVar("T")


class GatewayStack:
    """A running gateway, seen from a test's thread.

    Attributes:
        tokenizers: the fakes behind it.
        stage: the gateway.
        url: where it serves HTTP.
        http: a client of it.
    """

    def __init__(self, folder: Path, num_tokenizers: int, keys: tuple[str, ...], config: GatewayConfig) -> None:
        self._addresses = [f"unix:{folder}/tokenizer{number}.sock" for number in range(num_tokenizers)]
        self._keys = keys
        self._config = replace(config, tokenizer=tuple(self._addresses))
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.tokenizers: list[FakeTokenizerStage] = []
        self.stage: GatewayStage
        self.url = ""
        self.http: httpx.Client

    @property
    def tokenizer(self) -> FakeTokenizerStage:
        """The first fake."""
        return self.tokenizers[0]

    def start(self) -> None:
        """Start everything and wait until it is ready."""
        self._thread.start()
        self.run(self._start())
        self.http = httpx.Client(base_url=self.url, timeout=20, verify=False)  # loading certificates takes 80 ms
        self.wait_for(lambda: self.http.get("/ready").status_code == 200)

    def stop(self) -> None:
        """Stop everything."""
        self.http.close()
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], limit_s: float = 10.0) -> T:
        """Run a coroutine in the stack's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(limit_s)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        """Begin a coroutine in the stack's loop. Returns: its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def do(self, action: Callable[[], Any]) -> None:
        """Call a function in the stack's loop."""

        async def call() -> None:
            action()

        self.run(call())

    @staticmethod
    def wait_for(condition: Callable[[], bool], limit_s: float = 8.0) -> None:
        """Wait until `condition` holds. Raises: AssertionError after `limit_s` seconds."""
        waiting = threading.Event()
        for _ in range(round(limit_s / 0.01)):
            if condition():
                return
            waiting.wait(0.01)
        raise AssertionError("the condition did not come true in time")

    async def add_tokenizer(self, address: str) -> FakeTokenizerStage:
        """Start a fake at an address."""
        tokenizer = FakeTokenizerStage(address, self._keys, self._config.keys_file)  # type: ignore[abstract]  # what the gateway calls is there
        await tokenizer.start()
        return tokenizer

    async def restart_tokenizer(self, index: int = 0) -> None:
        """Kill a fake and start another one in its place."""
        await self.tokenizers[index].stop()
        self.tokenizers[index] = await self.add_tokenizer(self._addresses[index])

    async def _start(self) -> None:
        self.tokenizers = [await self.add_tokenizer(address) for address in self._addresses]
        self.stage = GatewayStage(self._config)
        await self.stage.start()
        self.url = f"http://127.0.0.1:{self.stage.port}"

    async def _stop(self) -> None:
        await self.stage.stop()
        for tokenizer in self.tokenizers:
            await tokenizer.stop()


@contextmanager
def running_gateway(
    folder: Path, num_tokenizers: int = 1, keys: tuple[str, ...] = (), **settings: Any
) -> Iterator[GatewayStack]:
    """A gateway with `settings` over fakes in `folder`."""
    config = GatewayConfig(process=ProcessSettings(), listen="127.0.0.1:0", **settings)
    stack = GatewayStack(folder, num_tokenizers, keys, config)
    stack.start()
    try:
        yield stack
    finally:
        stack.stop()
