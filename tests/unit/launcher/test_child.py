"""The launcher's supervision of one process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tokenloom.launcher import child as child_module
from tokenloom.launcher.child import Child

LIMIT_S = 20.0
PROGRAM = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
while {waits}:
    signal.pause()
sys.exit({code})
"""


def supervised(test: Callable[[Child], Coroutine[Any, Any, None]], code: int, *, waits: bool = True) -> None:
    """Run a test with a child that ends with `code`: when it is told to, or else at once."""

    async def scenario() -> None:
        read_fd, write_fd = os.pipe()
        child = Child("executor", (), {}, read_fd, lambda: False)
        child._command = [sys.executable, "-S", "-c", PROGRAM.format(code=code, waits=waits)]
        supervising = asyncio.create_task(child.supervise())
        try:
            await asyncio.wait_for(test(child), LIMIT_S)
        finally:
            await child.stop(5.0)
            await supervising
            os.close(read_fd)
            os.close(write_fd)

    asyncio.run(scenario())


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


async def terminate(child: Child) -> None:
    """Send SIGTERM to the process once it can take it, and wait for the next one."""
    await until(lambda: child.pid)
    pid = child.pid
    assert pid is not None
    await until(lambda: _catches_sigterm(pid))
    os.kill(pid, signal.SIGTERM)
    await until(lambda: child.pid not in (None, pid))


def _catches_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_a_stage_that_was_told_to_stop_and_did_is_started_again_at_once_and_calmly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_module, "_CLEAN_AFTER_S", 0.0)
    monkeypatch.setattr(child_module, "_FIRST_BACKOFF_S", LIMIT_S)

    async def test(child: Child) -> None:
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                await terminate(child)
        assert child.num_restarts == 2
        assert {record.levelno for record in caplog.records} == {logging.INFO}

    supervised(test, 0)


def test_a_stage_that_dies_is_started_again_with_a_warning_and_a_growing_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_module, "_FIRST_BACKOFF_S", 0.01)

    async def test(child: Child) -> None:
        await until(lambda: child.num_restarts == 3)
        assert [record.message.split("; ")[1] for record in caplog.records[:3]] == [
            f"starting it again in {pause_s:.1f} s" for pause_s in (0.01, 0.02, 0.04)
        ]
        assert {record.levelno for record in caplog.records} == {logging.WARNING}

    supervised(test, 3, waits=False)


def test_a_stage_that_ends_at_once_is_no_clean_stop_whatever_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_module, "_CLEAN_AFTER_S", LIMIT_S)
    monkeypatch.setattr(child_module, "_FIRST_BACKOFF_S", 0.01)

    async def test(child: Child) -> None:
        await until(lambda: child.num_restarts == 1)
        assert "ended with exit code 0" in caplog.text

    supervised(test, 0, waits=False)
