"""The scheduler stage as in production (a process of its own, `tokenloom scheduler`) between driver and executor."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.bench.steps import StepCost, StepRecord
from loadtest.bench.waiting import until

_START_LIMIT_S = 30.0
_STOP_LIMIT_S = 15.0


class StackFailed(Exception):
    """A process of the stack ended, or did not begin to listen in time."""


@dataclass(frozen=True)
class StackSettings:
    """Which stack to start.

    Args:
        cost: duration of the executor's steps.
        scheduler_flags: further flags of `tokenloom scheduler`.
    """

    cost: StepCost
    scheduler_flags: Sequence[str] = ()
    num_blocks: int = 100_000
    max_num_batched_tokens: int = 8192


@dataclass
class Diary:
    """What the executor did; see loadtest.bench.executor. Requests by id."""

    steps: list[StepRecord] = field(default_factory=list)
    first_step_ids: dict[str, int] = field(default_factory=dict)
    num_samples: dict[str, int] = field(default_factory=dict)
    num_rows: dict[str, int] = field(default_factory=dict)


@dataclass
class Stack:
    """A running stack; `diary` is filled when it has stopped."""

    scheduler: str
    scheduler_pid: int
    diary: Diary = field(default_factory=Diary)

    def scheduler_cpu_s(self) -> float:
        """CPU time that the scheduler's process has used, all threads. Linux only."""
        fields = Path(f"/proc/{self.scheduler_pid}/schedstat").read_text().split()
        tasks = Path(f"/proc/{self.scheduler_pid}/task").iterdir()
        total = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
        return max(total, int(fields[0])) / 1e9


@asynccontextmanager
async def running_stack(settings: StackSettings) -> AsyncIterator[Stack]:
    """Start executor and scheduler; stop both and read the diary at the end."""
    with tempfile.TemporaryDirectory(prefix="tokenloom-bench-") as name:
        folder = Path(name)
        executor, scheduler = folder / "executor.sock", folder / "scheduler.sock"
        async with (
            _process(_executor_command(settings, folder), executor),
            _process(_scheduler_command(settings, folder), scheduler) as pid,
        ):
            stack = Stack(f"unix:{scheduler}", pid)
            yield stack
        stack.diary = read_diary(folder / "steps.json")


@asynccontextmanager
async def running_executor(settings: StackSettings) -> AsyncIterator[str]:
    """Start an executor alone. Yields: its address."""
    with tempfile.TemporaryDirectory(prefix="tokenloom-bench-") as name:
        socket = Path(name) / "executor.sock"
        async with _process(_executor_command(settings, Path(name)), socket):
            yield f"unix:{socket}"


def _executor_command(settings: StackSettings, folder: Path) -> list[str]:
    cost = settings.cost
    return [
        *("loadtest.bench.executor", "--listen", f"unix:{folder}/executor.sock", "--log-level", "warning"),
        *("--step-ms", str(cost.base_ms), "--row-ms", str(cost.row_ms), "--token-ms", str(cost.token_ms)),
        *("--num-blocks", str(settings.num_blocks), "--record", f"{folder}/steps.json"),
        *("--max-num-batched-tokens", str(settings.max_num_batched_tokens)),
    ]


def _scheduler_command(settings: StackSettings, folder: Path) -> list[str]:
    return [
        *("tokenloom.scheduler", "--listen", f"unix:{folder}/scheduler.sock"),
        *("--executor", f"unix:{folder}/executor.sock", "--log-level", "warning", "--grace-s", "0"),
        *settings.scheduler_flags,
    ]


@asynccontextmanager
async def _process(command: Sequence[str], socket: Path) -> AsyncIterator[int]:
    """A Python module as a child process that listens on `socket`; stopped at the end. Yields: its process id."""
    process = _start(command)
    try:
        await _wait_for(process, socket)
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await until(lambda: process.poll() is not None, _STOP_LIMIT_S)
        process.kill()
        process.wait()


async def _wait_for(process: subprocess.Popen[bytes], socket: Path) -> None:
    """Return when it listens. Raises: StackFailed."""
    with contextlib.suppress(TimeoutError):
        await until(lambda: process.poll() is not None or socket.exists(), _START_LIMIT_S)
        if process.returncode is None:
            return
    raise StackFailed(f"the process that was to listen on {socket.name} did not come up; its output says why")


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a module. Not through the event loop: that forks, and gRPC's handlers of a fork complain on stderr."""
    return subprocess.Popen([sys.executable, "-m", *command], cwd=Path(__file__).parents[2])


def read_diary(path: Path) -> Diary:
    """What an executor wrote when it ended."""
    data = json.loads(path.read_text())
    requests = data["requests"]
    return Diary(
        steps=[StepRecord(*step) for step in data["steps"]],
        first_step_ids={request_id: account[0] for request_id, account in requests.items()},
        num_samples={request_id: account[1] for request_id, account in requests.items()},
        num_rows={request_id: account[2] for request_id, account in requests.items()},
    )
