"""The gateway as a stage: uvicorn without its signal handlers, and the order of starting and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvicorn

from tokenloom.common.address import Address, parse_address, remove_stale_socket
from tokenloom.common.auth import load_api_keys
from tokenloom.common.errors import SetupError, Unavailable
from tokenloom.common.open_files import open_file_limit
from tokenloom.gateway.app import Gateway, create_app
from tokenloom.gateway.config import GatewayConfig
from tokenloom.gateway.connections import ConnectionLimits, HttpConnection
from tokenloom.gateway.tokenizer_pool import TokenizerPool

log = logging.getLogger(__name__)
_BACKLOG = 2048
# Of open files, for all that is no HTTP connection of a client.
_RESERVED_FILES = 128
# Bytes of an answer that the kernel takes before they can be sent; its own limit is 4 MiB for each client.
_MAX_UNSENT_BYTES = 128 << 10
# After the grace period: time in which handlers write their error events.
_LAST_WRITES_S = 3.0


def listen_on(address: Address) -> socket.socket:
    """A listening socket.

    Raises: SetupError if the address is taken or not ours to take.
    """
    remove_stale_socket(address)
    family = socket.AF_UNIX if address.is_unix else socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if not address.is_unix:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)  # accepted ones inherit it
        sock.bind(address.path if address.is_unix else (address.host, address.port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        advice = "stop what runs there or choose another address with --listen"
        raise SetupError(f"cannot listen on {address}: {reason}; {advice}") from None
    sock.setblocking(False)
    return sock


def _limits_of(config: GatewayConfig) -> ConnectionLimits:
    room = max(1, open_file_limit() - _RESERVED_FILES)
    if room < config.max_connections:
        log.info("at most %d connections, by the limit of open files", room)
    return ConnectionLimits(min(room, config.max_connections), config.head_timeout_s, config.write_timeout_s)


def _remove_socket(address: Address) -> None:
    Path(address.path).unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """Uvicorn that leaves signals to the stage and tells when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayStage:
    """The HTTP front.

    Attributes:
        port: the TCP port in use, once started; 0 on a Unix socket.

    Raises: SetupError if it has no tokenizer's address, or the keys cannot be used.
    """

    name = "gateway"

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._address = parse_address(config.listen)
        client_id = f"gateway-{socket.gethostname()}-{os.getpid()}"
        addresses = config.tokenizer_addresses
        if not addresses:
            raise SetupError("--tokenizer: no address given; expected host:port or unix:PATH")
        keys = load_api_keys(config.api_key, config.keys_file)
        self._pool = TokenizerPool(
            addresses,
            config.process.cluster_token,
            client_id,
            config.max_num_requests,
            takeover_limit_s=config.takeover_limit_s,
            max_total_buffered_bytes=config.max_total_buffered_bytes,
            stall_timeout_s=config.stall_timeout_s,
        )
        self._is_draining = False
        app = create_app(Gateway(config, keys, self._pool, lambda: self._is_draining))
        self._server = _Server(
            uvicorn.Config(
                app,
                http=partial(HttpConnection, _limits_of(config)),  # type: ignore[arg-type]  # called, never looked at
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=config.keep_alive_s,
                timeout_graceful_shutdown=round(_LAST_WRITES_S),
            )
        )
        self._serving: asyncio.Task[None] | None = None
        self._owns_socket = False
        self.port = 0

    async def start(self) -> None:
        """Listen, and begin to connect to the tokenizers. Raises: SetupError if the address is taken."""
        sock = listen_on(self._address)
        self._owns_socket = self._address.is_unix
        if not self._address.is_unix:
            self.port = sock.getsockname()[1]
        await self._pool.start()
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        listening = asyncio.create_task(self._server.is_listening.wait())
        await asyncio.wait({self._serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            listening.cancel()
            self._serving.result()
        shown = self._address if self._address.is_unix else Address(host=self._address.host, port=self.port)
        log.info("listening on %s", shown)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests at once, let running ones end, tell those that do not."""
        self._is_draining = True
        self._pool.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._pool.wait_idle()
        except TimeoutError:
            log.warning("%d requests did not end within %g s", self._pool.num_in_flight, grace_s)
            self._pool.abandon_all(Unavailable("the gateway is shutting down", reason="SHUTTING_DOWN"))
        await self._stop_serving()

    async def stop(self) -> None:
        """Close every connection and session."""
        self._is_draining = True
        await self._pool.stop()
        await self._stop_serving()
        if self._owns_socket:  # not one that another process listens on
            _remove_socket(self._address)

    async def _stop_serving(self) -> None:
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._serving = None
