"""One stage's process in a test, with the thread that starts it again when it ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESTART_DELAY_S = 0.1
_POLL_S = 0.02


class StageProcess:
    """One stage's process and the thread that starts it again when it ends."""

    def __init__(
        self, name: str, command: list[str], environ: dict[str, str], parent_fd: int, log: Path, is_supervised: bool
    ) -> None:
        self.name = name
        self.num_starts = 0
        self.exit_codes: list[int] = []
        self._command, self._environ, self._parent_fd, self._log = command, environ, parent_fd, log
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = threading.Event()
        self._is_supervised = is_supervised
        self._lock = threading.Lock()
        self._start()
        self._thread = threading.Thread(target=self._supervise, name=f"supervisor of {name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the process that runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def stop(self, number: int, limit_s: float) -> int:
        """End it for good: by the signal, by SIGKILL after `limit_s` seconds. Returns: its exit code."""
        with self._lock:
            self._is_over.set()
            process = self._process
        assert process is not None
        for signal_number in (number, signal.SIGCONT):  # one that is stopped hears nothing but SIGKILL
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal_number)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            process.kill()
            self._thread.join()
        return process.wait()

    def _start(self) -> None:
        with self._lock, self._log.open("ab") as log:
            if self._is_over.is_set():
                return
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                pass_fds=(self._parent_fd,),
                start_new_session=True,
            )
            self.num_starts += 1

    def _supervise(self) -> None:
        while True:
            assert self._process is not None
            self.exit_codes.append(self._process.wait())
            if not self._is_supervised or self._is_over.wait(RESTART_DELAY_S):
                return
            self._start()


def until(holds: Callable[[], Any], limit_s: float, what: str) -> None:
    """Poll until something holds. Raises: AssertionError that says `what` was wrong after `limit_s` seconds."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"{what}, for {limit_s:.0f} s"
        time.sleep(_POLL_S)
