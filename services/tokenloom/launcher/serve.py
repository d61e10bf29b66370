"""`tokenloom serve`: start all stages, tell how it goes, keep them running, stop them in order."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from tokenloom.common.address import Address, check_port_free
from tokenloom.common.auth import load_api_keys
from tokenloom.common.config import parse
from tokenloom.common.errors import SetupError
from tokenloom.common.logs import setup_logs
from tokenloom.common.model_files import resolve_model
from tokenloom.launcher.child import Child
from tokenloom.launcher.config import ServeSettings
from tokenloom.launcher.plan import STAGES, StackPlan, plan_stack
from tokenloom.launcher.readiness import GatewayProbe, StageProbe, wait_until_http_ready, wait_until_serving
from tokenloom.launcher.watchdog import Probe, Watchdog

DESCRIPTION = "All stages on one machine, supervised, with the HTTP gateway in front."
_RUN_DIR_PREFIX = "tokenloom-serve-"
_KILL_MARGIN_S = 15.0
_NEEDED_PACKAGES = ("torch", "transformers", "tokenizers", "jinja2", "fastapi", "uvicorn")
_WAITING_FOR = {
    "executor": "loading the model (once per model it is converted, which takes a minute)",
    "scheduler": "waiting for the executor",
    "tokenizer": "loading the tokenizer, waiting for the scheduler",
    "gateway": "waiting for the tokenizer",
}


def main(argv: Sequence[str]) -> int:
    """Run the stack until it is told to stop; returns the exit code."""
    settings = parse(ServeSettings, "tokenloom serve", DESCRIPTION, argv)
    load_api_keys(settings.api_key, settings.keys_file)  # told here, in one line, rather than by two stages
    setup_logs("serve", settings.log_level, settings.log_format)
    _check_installed()
    source = resolve_model(settings.model)
    for port in (settings.port, settings.grpc_port):
        check_port_free(Address(host=settings.host, port=port))
    _remove_dead_run_dirs()
    run_dir = Path(tempfile.mkdtemp(prefix=f"{_RUN_DIR_PREFIX}{os.getpid()}-"))
    try:
        return uvloop.run(Stack(settings, plan_stack(settings, run_dir), source.model_id).run())
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


class Stack:
    """All stages and their supervision.

    Args:
        settings: of the stack.
        plan: what to start.
        model_id: for the line that tells that all is ready.
    """

    def __init__(self, settings: ServeSettings, plan: StackPlan, model_id: str) -> None:
        self._settings = settings
        self._plan = plan
        self._model_id = model_id
        self._started_s = time.monotonic()
        self._is_ready = False
        # The write end stays in this process alone: when it closes, however we end, the children stop.
        self._parent_fd, self._alive_fd = os.pipe()
        self._children = [
            Child(name, plan.argv[name], plan.environ, self._parent_fd, lambda: not self._is_ready) for name in STAGES
        ]

    async def run(self) -> int:
        """Start, supervise until a signal or a set-up error, stop; returns the exit code.

        Raises: SetupError if the stack was not ready in time.
        """
        told_to_stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, told_to_stop)
        _say(f"starting {self._model_id}; stages: {', '.join(STAGES)}")
        supervised = [asyncio.create_task(child.supervise()) for child in self._children]
        await asyncio.sleep(0)  # they fork before gRPC is used here: it would complain of each fork
        watchdogs = self._start_watchdogs()
        progress = asyncio.create_task(self._report_progress())
        stopping = asyncio.create_task(told_to_stop.wait())
        try:
            return await self._until_end(supervised, progress, stopping)
        finally:
            for task in (progress, stopping, *watchdogs):
                task.cancel()
            await asyncio.gather(*watchdogs, return_exceptions=True)
            await self._stop()
            await asyncio.gather(*supervised)

    def _on_signal(self, told_to_stop: asyncio.Event) -> None:
        """The first signal stops the stack in order, a second one at once."""
        if told_to_stop.is_set():
            for child in self._children:
                child.kill()
        told_to_stop.set()

    def _start_watchdogs(self) -> list[asyncio.Task[None]]:
        """One per stage. The executor counts as started only once it was ready: until then it loads the model."""
        limit_s, sockets = self._settings.hang_limit_s, self._plan.sockets
        if not limit_s:
            return []
        probes: list[Probe] = [StageProbe(name, sockets[name], needs_ready=name == "executor") for name in STAGES[:3]]
        probes.append(GatewayProbe(self._settings.host, self._settings.port))
        pairs = zip(self._children, probes, strict=True)
        return [asyncio.create_task(Watchdog(child, probe, limit_s).watch()) for child, probe in pairs]

    async def _until_end(
        self, supervised: list[asyncio.Task[int]], progress: asyncio.Task[None], stopping: asyncio.Task[bool]
    ) -> int:
        watched: set[asyncio.Task[Any]] = {progress, stopping, *supervised}
        while True:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in supervised:
                if task.done():
                    return task.result()
            if stopping.done():
                _say("stopping; running requests may finish")
                return 0
            progress.result()
            watched.discard(progress)

    async def _report_progress(self) -> None:
        """Tell which stage is ready and what the others wait for. Raises: SetupError after the time limit."""
        waits = {asyncio.create_task(wait_until_serving(name, self._plan.sockets[name])): name for name in STAGES[:3]}
        waits[asyncio.create_task(wait_until_http_ready(self._settings.host, self._settings.port))] = "gateway"
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                while waits:
                    done, _ = await asyncio.wait(waits, timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        _say(f"{waits.pop(task):<9} ready  ({self._elapsed()})")
                    if not done:
                        first = next(name for name in STAGES if name in waits.values())
                        _say(f"{first:<9} {_WAITING_FOR[first]} ... ({self._elapsed()})")
        except TimeoutError:
            late = ", ".join(waits.values())
            raise SetupError(f"not ready within {self._settings.start_timeout_s:.0f} s: {late}") from None
        finally:
            for task in waits:
                task.cancel()
        self._is_ready = True
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        _say(f"{self._model_id} is served on http://{host}:{self._settings.port}  (ready in {self._elapsed()})")

    async def _stop(self) -> None:
        """From the front to the back, so that running requests find all they need."""
        for child in reversed(self._children):
            await child.stop(self._settings.grace_s + _KILL_MARGIN_S)

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started_s:.1f} s"


def _check_installed() -> None:
    """Raise SetupError if a stage's packages are missing, rather than let it fail again and again."""
    for package in _NEEDED_PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise SetupError(f"{package} is not installed; pip install 'tokenloom[all]'")


def _say(line: str) -> None:
    sys.stdout.write(f"tokenloom: {line}\n")
    sys.stdout.flush()


def _remove_dead_run_dirs() -> None:
    """Remove what launchers that were killed left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_RUN_DIR_PREFIX}*"):
        pid = folder.name.removeprefix(_RUN_DIR_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and folder.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                shutil.rmtree(folder, ignore_errors=True)
