"""A whole stack as a user starts it, for tests that look at it from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai

START_LIMIT_S = 150.0
STOP_LIMIT_S = 60.0
STAGES = ("executor", "scheduler", "tokenizer", "gateway")


class Stack:
    """`tokenloom serve` as a child process.

    Args:
        flags: of `tokenloom serve`.
        environ: `TOKENLOOM_*` settings of the stages.
    """

    def __init__(self, *flags: str, **environ: str) -> None:
        self.port = free_port()
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokenloom.launcher", "--port", str(self.port), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environ},
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_until_ready(self) -> Stack:
        deadline = time.monotonic() + START_LIMIT_S
        while not self._ready.wait(0.05):
            assert self.process.poll() is None, f"the stack ended:\n{self.output}"
            assert time.monotonic() < deadline, f"the stack is not ready:\n{self.output}"
        return self

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def metrics(self) -> dict[str, float]:
        """All samples of the stack's /metrics, by name with labels."""
        page = httpx.get(f"{self.url}/metrics", timeout=5).text
        rows = (line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def stage_pids(self) -> dict[str, int]:
        """Process ids of the stages, by name."""
        found = {}
        for pid, command in processes():
            for stage in STAGES:
                if f"tokenloom.{stage}" in command and parent_of(pid) == self.process.pid:
                    found[stage] = pid
        return found

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait(STOP_LIMIT_S)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if "is served on http://" in line:
                self._ready.set()


@contextmanager
def running_stack(*flags: str, **environ: str) -> Iterator[Stack]:
    """A stack that is ready; stopped at the end."""
    stack = Stack(*flags, **environ)
    try:
        yield stack.wait_until_ready()
    finally:
        stack.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def processes() -> Iterator[tuple[int, str]]:
    """(pid, command line) of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has just ended


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_alive(pid: int) -> bool:
    """The process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
