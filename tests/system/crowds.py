"""Crowds of clients that take much of a gateway and give little, on plain sockets, so that what they read is known.

Sizes: `SHORT` fits into `make test`, `FULL` is what is promised (`make test-slow`).
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.cluster import Cluster
from tests.system.in_process import total

COMPLETIONS = "/v1/completions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
STAGES = ("executor", "scheduler", "tokenizer", "gateway")
RUNNING, WAITING = "tokenloom_num_requests_running", "tokenloom_num_requests_waiting"
USAGE = "tokenloom_kv_cache_usage_perc"
IN_FLIGHT = "tokenloom_gateway_requests_in_flight"
ENDED_EARLY = "tokenloom_gateway_requests_ended_early_total"
ABORTED = 'tokenloom_request_success_total{finished_reason="aborted"}'


@dataclass(frozen=True)
class Size:
    """How many clients of each kind."""

    num_connections: int
    num_slow: int
    num_aborted: int


SHORT, FULL = Size(500, 40, 300), Size(2000, 500, 1000)
SIZES = [pytest.param(SHORT, id="short"), pytest.param(FULL, id="full", marks=pytest.mark.slow)]


class Clients:
    """Sockets to one gateway; all are closed at the end of the block."""

    def __init__(self, cluster: Cluster) -> None:
        host, _, port = cluster.address("gateway").rpartition(":")
        self._address = (host, int(port))
        self._closing = ExitStack()
        self.sockets: list[socket.socket] = []

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, sent: bytes = b"", receive_buffer: int = 0) -> socket.socket:
        """Connect and send."""
        connection = self._closing.enter_context(socket.socket())
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(60)
        connection.connect(self._address)
        connection.sendall(sent)
        self.sockets.append(connection)
        return connection

    def close(self) -> None:
        """Close all of them."""
        self._closing.close()
        self.sockets.clear()


def completion(**body: Any) -> bytes:
    """A POST of a completion that does not end by itself."""
    data = orjson.dumps({"temperature": 0, "ignore_eos": True, **body})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


def wait_for_answers(sockets: Sequence[socket.socket], limit_s: float) -> None:
    """Read until each of them had some bytes of an answer."""
    deadline_s = time.monotonic() + limit_s
    waiting = {connection.fileno(): connection for connection in sockets}
    poll = select.poll()
    for number in waiting:
        poll.register(number, select.POLLIN)
    while waiting:
        assert time.monotonic() < deadline_s, f"{len(waiting)} of {len(sockets)} had no answer"
        for number, _ in poll.poll(200):
            waiting.pop(number).recv(1 << 16)
            poll.unregister(number)


def drip(sockets: Sequence[socket.socket], num_bytes: int) -> int:
    """Take a few bytes from each; returns how many are still connected."""
    num_open = 0
    for connection in sockets:
        connection.setblocking(False)
        with contextlib.suppress(ConnectionError):
            try:
                num_open += bool(connection.recv(num_bytes))
            except BlockingIOError:
                num_open += 1
    return num_open


@contextlib.contextmanager
def read_all(sockets: Sequence[socket.socket]) -> Iterator[None]:
    """Take whatever comes from the sockets within the block, as fast as it comes."""
    is_over = threading.Event()

    def read() -> None:
        poll = select.poll()
        by_number = {connection.fileno(): connection for connection in sockets}
        for number in by_number:
            poll.register(number, select.POLLIN)
        while not is_over.is_set():
            for number, _ in poll.poll(50):
                if not by_number[number].recv(1 << 20):
                    poll.unregister(number)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def metrics_of(cluster: Cluster) -> dict[str, float]:
    """All stages' samples. No gauge of requests may be negative at any time."""
    found: dict[str, float] = {}
    for stage in STAGES[:3]:
        found |= cluster.metrics(stage)
    page = httpx.get(f"{cluster.url()}/metrics", timeout=30, trust_env=False).text  # it has much to do
    rows = (line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
    found |= {name: float(value) for name, value in rows}
    negative = {name: value for name, value in found.items() if value < 0}
    assert not negative
    return found


def num_held(metrics: dict[str, float]) -> dict[str, float]:
    """What is in flight anywhere, by name; empty if nothing is."""
    names = (RUNNING, WAITING, "tokenloom_tokenizer_active_requests", "tokenloom_tokenizer_active_choices", USAGE)
    held = {name: total(metrics, name) for name in names}
    held[IN_FLIGHT] = sum(v for name, v in metrics.items() if name.startswith(IN_FLIGHT) and "/v1/" in name)
    held["executor rows"] = total(metrics, "tokenloom_executor_rows")
    return {name: value for name, value in held.items() if value}


def until(
    cluster: Cluster, holds: Callable[[dict[str, float]], object], limit_s: float
) -> tuple[float, dict[str, float]]:
    """Seconds until the metrics meet a condition, and the metrics then."""
    started_s = time.monotonic()
    while not holds(metrics := metrics_of(cluster)):
        assert time.monotonic() < started_s + limit_s, {n: v for n, v in metrics.items() if v and "bucket" not in n}
        time.sleep(0.05)
    return time.monotonic() - started_s, metrics


def until_idle(cluster: Cluster, limit_s: float) -> tuple[float, dict[str, float]]:
    """Seconds until nothing is in flight in any stage, and the metrics then."""
    return until(cluster, lambda metrics: not num_held(metrics), limit_s)


def resident_mb(cluster: Cluster) -> dict[str, float]:
    """Resident memory of each stage, in MB."""
    return {stage: _status(cluster.pid(stage), "VmRSS") / 1024 for stage in STAGES}


def _status(pid: int | None, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def num_open_files(pid: int | None) -> int:
    """Open file descriptors of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@contextlib.contextmanager
def logs_clean(cluster: Cluster) -> Iterator[None]:
    """No stage logs a warning, an error or a traceback within the block."""
    before = {stage: len(cluster.log(stage)) for stage in STAGES}
    with cluster.logs_on_failure():
        yield
    for stage in STAGES:
        new = cluster.log(stage)[before[stage] :]
        assert "Traceback" not in new, new[-4000:]
        bad = [line for line in new.splitlines() if re.match(r"\S+ \w+ +(warning|error) ", line)]
        assert not bad, "\n".join(bad[:20])
