"""Addresses of stages: `unix:/path/to.sock` or `host:port`."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from tokenloom.common.errors import SetupError


@dataclass(frozen=True)
class Address:
    """Where a stage listens: a Unix socket's path, or host and port."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        """A Unix socket."""
        return bool(self.path)

    @property
    def is_local(self) -> bool:
        """Only this machine can reach it."""
        return self.is_unix or self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read `unix:PATH`, `host:port`, `[v6]:port` or `:port` (all interfaces).

    Raises: SetupError if it is none of these.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path or len(path.encode()) > 100:
            raise SetupError(f"{text!r}: the path of a Unix socket has 1 to 100 bytes")
        return Address(path=path)
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise SetupError(f"{text!r} is no address; expected host:port or unix:PATH")
    return Address(host=host.strip("[]") or "0.0.0.0", port=int(port))


def remove_stale_socket(address: Address) -> None:
    """Remove a Unix socket that a dead process left; a living one is a SetupError."""
    if not address.is_unix or not Path(address.path).exists():
        return
    if not stat.S_ISSOCK(os.stat(address.path).st_mode):
        raise SetupError(f"{address.path} exists and is no socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(address.path)
        raise SetupError(f"{address.path} is in use by a running process; stop it or choose another path")
    Path(address.path).unlink()


def check_port_free(address: Address) -> None:
    """Raise SetupError if something listens on a TCP address already."""
    if address.is_unix or address.port == 0:
        return
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise SetupError(f"cannot listen on {address}: {reason}; stop what runs there or choose another") from None
