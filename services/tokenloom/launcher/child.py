"""One stage as a supervised child process.

Children run in process groups of their own, so Ctrl-C reaches the launcher only, which stops them in order. They hold
the read end of a pipe; when the launcher is gone, however it died, they see its end and stop (common/stage.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from tokenloom.common.stage import EXIT_SETUP

log = logging.getLogger(__name__)
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_HEALTHY_AFTER_S = 30.0
_CLEAN_AFTER_S = 1.0  # who ends sooner did not even start, whatever its exit code says


class Child:
    """A stage's process, started again with backoff when it dies, and at once when it was told to stop and did.

    Args:
        name: of the stage.
        argv: its flags.
        environ: its environment.
        parent_fd: read end of the launcher's pipe.
        is_fatal: asked when the process ended with a set-up error; True ends the supervision.
    """

    def __init__(
        self, name: str, argv: Sequence[str], environ: Mapping[str, str], parent_fd: int, is_fatal: Callable[[], bool]
    ) -> None:
        self.name = name
        self.num_restarts = 0
        self._command = [sys.executable, "-m", f"tokenloom.{name}", *argv, "--parent-fd", str(parent_fd)]
        self._environ = dict(environ)
        self._parent_fd = parent_fd
        self._is_fatal = is_fatal
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._why_killed = ""

    @property
    def pid(self) -> int | None:
        """Process id; None while there is no process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def supervise(self) -> int:
        """Keep the stage running; returns the exit code once it was told to stop or cannot be set up."""
        loop = asyncio.get_running_loop()
        backoff_s = _FIRST_BACKOFF_S
        while True:
            started_s = loop.time()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(self._parent_fd,),
                start_new_session=True,
            )
            if self._is_stopping:  # told to while the process was being made
                self._process.terminate()
            code = await self._process.wait()
            if self._is_stopping or (code == EXIT_SETUP and self._is_fatal()):
                return code
            self.num_restarts += 1
            lived_s = loop.time() - started_s
            if code == 0 and lived_s > _CLEAN_AFTER_S:
                log.info("%s was stopped; starting it again", self.name)
                continue
            if lived_s > _HEALTHY_AFTER_S:
                backoff_s = _FIRST_BACKOFF_S
            why, self._why_killed = self._why_killed or _how_it_ended(code), ""
            log.warning("%s %s; starting it again in %.1f s", self.name, why, backoff_s)
            await asyncio.sleep(backoff_s)
            if self._is_stopping:
                return code
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def end_hanging(self, why: str) -> None:
        """End a process that hangs, at once; it is started again.

        Args:
            why: for the log.
        """
        if not self._is_stopping and self.pid is not None and self._process is not None:
            self._why_killed = why
            self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """Ask the process to end, insist after `grace_s` seconds."""
        self._is_stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            process.send_signal(signal.SIGCONT)  # one that is stopped would not hear of it
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
                return
            log.warning("%s did not stop within %.0f s; killing it", self.name, grace_s)
            process.kill()
            await process.wait()

    def kill(self) -> None:
        """End the process at once."""
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _how_it_ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
