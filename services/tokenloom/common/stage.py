"""Life of a stage's process: logs, telemetry, metrics, start, signals, drain, exit code.

SIGTERM and SIGINT drain: the stage stops being ready, running requests get `grace_s` seconds, then it ends with exit
code 0, whatever a stuck thread still does. A second signal ends it at once (exit code 1). A stage started by
`tokenloom serve` also ends when the launcher does, however that died: it holds the read end of a pipe whose write end
only the launcher has.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import uvloop

from tokenloom.common.config import ProcessSettings
from tokenloom.common.errors import SetupError
from tokenloom.common.logs import setup_logs
from tokenloom.common.metrics import MetricsServer, setup_process_metrics
from tokenloom.common.open_files import raise_open_file_limit
from tokenloom.common.telemetry import setup_telemetry

log = logging.getLogger(__name__)
EXIT_SETUP = 2
_STOP_LIMIT_S = 10.0
_END_LIMIT_S = 5.0  # behind the last log line: spans on their way out, threads that end
_ORPHAN_GRACE_S = 5.0


class Stage(Protocol):
    """One of Tokenloom's programs."""

    name: str

    async def start(self) -> None:
        """Listen and begin to work; readiness may come later. Raises SetupError if it cannot."""

    async def drain(self, grace_s: float) -> None:
        """Stop being ready, refuse new requests, return when running ones have ended or after `grace_s` seconds."""

    async def stop(self) -> None:
        """Give up what is left and release everything."""


def run_main(main: Callable[[], int], extra: str) -> int:
    """Run a program's body; a SetupError is one line on standard error and exit code 2.

    Args:
        main: returns the exit code.
        extra: what to install if a package is missing, the name of an extra.
    """
    try:
        return main()
    except SetupError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        if (error.name or "tokenloom").startswith("tokenloom"):
            raise
        message = f"{error.name} is not installed; pip install 'tokenloom[{extra}]'"
    sys.stderr.write(f"tokenloom: {message}\n")
    return EXIT_SETUP


def run_stage(name: str, process: ProcessSettings, build: Callable[[], Stage]) -> int:
    """Run a stage until it is told to stop.

    Args:
        name: gateway, tokenizer, scheduler or executor.
        process: settings of the process.
        build: makes the stage, inside the running loop.

    Returns: the exit code.

    Raises: SetupError if the stage cannot start.
    """
    setup_logs(name, process.log_level, process.log_format)
    raise_open_file_limit()
    if process.parent_fd >= 0:
        _end_with_parent(process.parent_fd)
    setup_process_metrics(name)
    provider = setup_telemetry(name, process.otlp_endpoint)
    try:
        return uvloop.run(_life(process, build))
    finally:
        if provider is not None:
            provider.shutdown()


def freeze_heap() -> None:
    """Take what is there now out of all later garbage collections; for when a program is set up.

    What it holds for good is looked at no more; what it lets go is still freed, unless it is part of a cycle.
    """
    gc.collect()
    gc.freeze()


async def _life(process: ProcessSettings, build: Callable[[], Stage]) -> int:
    stage = build()
    told_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, told_to_stop)
    metrics = MetricsServer(process.metrics_listen) if process.metrics_listen else None
    try:
        if metrics is not None:
            await metrics.start()
        if not await _start_unless_told_to_stop(stage, told_to_stop):
            os._exit(0)  # a thread that loads a model cannot be interrupted, and there is nothing to save
        freeze_heap()
        await told_to_stop.wait()
        log.info("draining, at most %g s", process.grace_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stage.drain(process.grace_s), process.grace_s + _STOP_LIMIT_S)
    finally:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stage.stop(), _STOP_LIMIT_S)
        if metrics is not None:
            await metrics.stop()
    log.info("stopped")
    _end_soon(0)
    return 0


async def _start_unless_told_to_stop(stage: Stage, told_to_stop: asyncio.Event) -> bool:
    """Start the stage; returns False if a signal came first."""
    starting = asyncio.create_task(stage.start())
    stopping = asyncio.create_task(told_to_stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        log.info("told to stop while starting")
        return False
    starting.result()
    return True


def _on_signal(told_to_stop: asyncio.Event) -> None:
    if told_to_stop.is_set():
        log.warning("second signal: ending at once")
        os._exit(1)
    told_to_stop.set()


def _end_soon(code: int) -> None:
    """End the process with this exit code if it does not end by itself: Python waits for its threads without limit."""

    def insist() -> None:
        time.sleep(_END_LIMIT_S)
        log.warning("something still runs; ending without it")
        os._exit(code)

    threading.Thread(target=insist, name="end", daemon=True).start()


def _end_with_parent(fd: int) -> None:
    """Watch the launcher's pipe in a thread; at its end ask for a stop, then insist."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 1):
                pass
        log.warning("the launcher is gone; stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
