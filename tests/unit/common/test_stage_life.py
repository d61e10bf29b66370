"""The life of a stage's process: it ends when it is told to, with the right exit code and in time."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LIMIT_S = 30.0
PROGRAM = """
import asyncio, sys, threading, time
from tokenloom.common import stage
from tokenloom.common.config import ProcessSettings

stage._END_LIMIT_S = stage._STOP_LIMIT_S = 0.3

class Stage:
    name = "gateway"

    async def start(self):
        print("started", flush=True)

    async def drain(self, grace_s):
        print("draining", flush=True)
        await asyncio.sleep({drain_s})

    async def stop(self):
        threading.Thread(target=time.sleep, args=({stuck_s},)).start()
        await asyncio.sleep({stop_s})

sys.exit(stage.run_stage("gateway", ProcessSettings(grace_s={grace_s}), Stage))
"""


@contextmanager
def running(
    drain_s: float = 0.0, grace_s: float = 0.0, stop_s: float = 0.0, stuck_s: float = 0.0
) -> Iterator[subprocess.Popen[str]]:
    """A stage's process that has started.

    Args:
        drain_s: how long its drain takes.
        grace_s: how long it may take.
        stop_s: how long its stop takes.
        stuck_s: how long a thread of it runs after its stop.
    """
    program = PROGRAM.format(drain_s=drain_s, grace_s=grace_s, stop_s=stop_s, stuck_s=stuck_s)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        expect(process, "started")
        yield process
    finally:
        process.kill()
        process.communicate()


def expect(process: subprocess.Popen[str], text: str) -> None:
    """Read lines until one has the text."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without saying {text!r}")


@pytest.mark.parametrize(
    ("number", "delays"),
    [
        (signal.SIGINT, {"drain_s": 0.1, "grace_s": 1000.0}),
        (signal.SIGTERM, {"drain_s": 1000.0, "grace_s": 0.1}),
        (signal.SIGTERM, {"stop_s": 1000.0}),
        (signal.SIGTERM, {"stuck_s": 1000.0}),
    ],
)
def test_a_signal_ends_a_stage_with_exit_code_0_whatever_takes_long(
    number: signal.Signals, delays: dict[str, float]
) -> None:
    with running(**delays) as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
        assert "stopped" in output
        assert ("something still runs" in output) == ("stuck_s" in delays)


def test_a_second_signal_ends_it_at_once_with_exit_code_1() -> None:
    with running(drain_s=1000.0, grace_s=1000.0) as process:
        process.send_signal(signal.SIGTERM)
        expect(process, "draining\n")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1, output
        assert "second signal" in output
