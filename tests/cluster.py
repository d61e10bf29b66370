"""A cluster of real processes for tests: each stage is its own program, as under Kubernetes, and can be ended alone.

    with Cluster(num_tokenizers=2) as cluster:       # ready when the block begins; `async with` does the same
        cluster.kill("executor", signal.SIGKILL)     # its supervisor starts it again
        cluster.wait_until_ready()

Stages are called executor, scheduler, tokenizer-0, tokenizer-1, ..., gateway-0, ...; a kind's name alone means the
first. They talk over Unix sockets in a temporary folder, or over whatever `link` was told, a proxy for example.
Methods block; in a coroutine call those that wait through `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.stage_process import StageProcess, until
from tests.system.stack import free_port
from tests.tiny_models import write_tiny_model
from tokenloom.api.v1 import engine_pb2_grpc
from tokenloom.common.channel import bearer_metadata

START_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0
_LOG_LINES = 40
_SERVICES = {"executor": "ExecutorService", "scheduler": "EngineService", "tokenizer": "InferenceService"}
Settings = Mapping[str, Mapping[str, object]]


class Cluster:
    """Stages as processes, supervised.

    Args:
        model: folder of a model; None: a tiny one is written.
        settings: flags by stage or kind of stage, as in `{"scheduler": {"takeover_s": 2}, "tokenizer-1": {...}}`.
        programs: what Python runs instead of a stage's module, by stage or kind: `{"executor": ["-m", "my.module"]}`.
        environ: variables of all stages.
        unsupervised: stages that are not started again when they end.
    """

    def __init__(
        self,
        *,
        num_tokenizers: int = 1,
        num_gateways: int = 1,
        model: Path | None = None,
        settings: Settings | None = None,
        programs: Mapping[str, Sequence[str]] | None = None,
        environ: Mapping[str, str] | None = None,
        unsupervised: Collection[str] = (),
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tokenloom-cluster-"))
        self.model = model or write_tiny_model(self.folder / "tiny-llama", "llama")
        self.tokenizers = [f"tokenizer-{i}" for i in range(num_tokenizers)]
        self.gateways = [f"gateway-{i}" for i in range(num_gateways)]
        self._settings, self._programs = dict(settings or {}), dict(programs or {})
        self._token = secrets.token_hex(16)
        own = {"TOKENLOOM_CACHE": str(self.folder / "cache"), "TOKENLOOM_CLUSTER_TOKEN": self._token}
        self._environ = {**os.environ, **own, **(environ or {})}
        self._addresses = {name: f"unix:{self.folder}/{name}" for name in ("executor", "scheduler", *self.tokenizers)}
        self._addresses |= {name: f"127.0.0.1:{free_port()}" for name in self.gateways}
        self._changes: dict[str, Mapping[str, object]] = {}
        self._links: dict[tuple[str, str], str] = {}
        self._unsupervised = set(unsupervised)
        self._parent_fd, self._alive_fd = os.pipe()  # stages stop when this process is gone, however it went
        self.stages: dict[str, StageProcess] = {}

    @property
    def names(self) -> list[str]:
        """All stages, in the order in which they start."""
        return ["executor", "scheduler", *self.tokenizers, *self.gateways]

    # --- before the start -----------------------------------------------------------------------------------------

    def address(self, stage: str) -> str:
        """Where a stage listens; may be asked before the start."""
        return self._addresses[self.name_of(stage)]

    def link(self, client: str, server: str, address: str) -> None:
        """Let `client` (a stage, or all of a kind) reach `server` at `address`; for starts after the call."""
        self._links[client, self.name_of(server)] = address

    def configure(self, stage: str, program: Sequence[str] | None = None, **flags: object) -> None:
        """Change what a stage is started with, for starts after the call; `program` None: its own module again.

        Flags replace those of earlier calls, and are put behind those that the cluster was made with.
        """
        name = self.name_of(stage)
        self._programs[name] = program or ("-m", f"tokenloom.{name.partition('-')[0]}")
        self._changes[name] = flags

    def add_stage(self, name: str) -> None:
        """Start one more stage of a kind, such as scheduler-1, and wait until it serves."""
        self._addresses[name] = f"unix:{self.folder}/{name}"
        self.start_stage(name)
        until(partial(self.is_serving, name), START_LIMIT_S, f"{name} does not serve")

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> Cluster:
        """Start all stages and wait until they are ready."""
        for name in self.names:
            self.start_stage(name)
        self.wait_until_ready(START_LIMIT_S)
        return self

    def start_stage(self, stage: str) -> None:
        """Start one that does not run: for unsupervised ones, and for those that were stopped."""
        name = self.name_of(stage)
        assert name not in self.stages or self.stages[name].pid is None, f"{name} runs"
        command = [sys.executable, *self._program(name), *self.flags(name), f"--parent-fd={self._parent_fd}"]
        self.stages[name] = StageProcess(
            name, command, self._environ, self._parent_fd, self.folder / f"{name}.log", name not in self._unsupervised
        )

    def stop_stage(self, stage: str, number: int = signal.SIGTERM, limit_s: float = STOP_LIMIT_S) -> int:
        """End a stage for good (until `start_stage`); returns its exit code, negative for a signal."""
        return self.stages[self.name_of(stage)].stop(number, limit_s)

    def stop(self) -> None:
        """End every process, gateways first, and remove the folder."""
        try:
            for process in reversed(self.stages.values()):
                process.stop(signal.SIGKILL, STOP_LIMIT_S)
        finally:
            os.close(self._alive_fd)
            os.close(self._parent_fd)
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        try:
            return self.start()
        except BaseException:
            self.show_logs()
            self.stop()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.show_logs()
        self.stop()

    async def __aenter__(self) -> Cluster:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    # --- processes ------------------------------------------------------------------------------------------------

    def pid(self, stage: str) -> int | None:
        """Process id of a stage; None while there is no process."""
        return self.stages[self.name_of(stage)].pid

    def kill(self, stage: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a stage's process, waiting for one if it is being started; returns the process id."""
        process = self.stages[self.name_of(stage)]
        until(lambda: process.pid is not None, START_LIMIT_S, f"{process.name} has no process")
        pid = process.pid
        assert pid is not None
        os.kill(pid, number)
        return pid

    def num_starts(self, stage: str) -> int:
        """How many processes of the stage there have been."""
        return self.stages[self.name_of(stage)].num_starts

    def exit_codes(self, stage: str) -> list[int]:
        """Of the stage's processes that have ended; negative for a signal."""
        return self.stages[self.name_of(stage)].exit_codes

    def log(self, stage: str) -> str:
        """What all processes of the stage wrote."""
        return (self.folder / f"{self.name_of(stage)}.log").read_text(errors="replace")

    def clear_log(self, stage: str) -> None:
        """Forget what the stage wrote so far."""
        os.truncate(self.folder / f"{self.name_of(stage)}.log", 0)

    def show_logs(self) -> None:
        """Write the last lines of every stage to standard error."""
        for name in self.stages:
            lines = self.log(name).splitlines()[-_LOG_LINES:]
            sys.stderr.write("\n".join([f"--- {name} ---", *lines, ""]))

    @contextlib.contextmanager
    def logs_on_failure(self) -> Iterator[None]:
        """Show the logs if the block raises; for tests that share a cluster."""
        try:
            yield
        except BaseException:
            self.show_logs()
            raise

    # --- seen from outside ----------------------------------------------------------------------------------------

    def url(self, gateway: int = 0) -> str:
        """Base URL of a gateway."""
        return f"http://{self._addresses[self.gateways[gateway]]}"

    def client(self, gateway: int = 0, **options: Any) -> httpx.Client:
        """A client of a gateway, without a bound on connections."""
        return httpx.Client(base_url=self.url(gateway), **_client_options(options))

    def async_client(self, gateway: int = 0, **options: Any) -> httpx.AsyncClient:
        """The same for coroutines."""
        return httpx.AsyncClient(base_url=self.url(gateway), **_client_options(options))

    def ready(self, gateway: int = 0) -> bool:
        """The gateway says that requests are served."""
        with contextlib.suppress(httpx.HTTPError), httpx.Client(trust_env=False) as client:
            return client.get(f"{self.url(gateway)}/ready", timeout=2).status_code == 200
        return False

    def is_serving(self, stage: str) -> bool:
        """The stage's health says SERVING: of a stage behind the gateway."""
        name = self.name_of(stage)
        service = f"tokenloom.api.v1.{_SERVICES[name.partition('-')[0]]}"
        with grpc.insecure_channel(self._addresses[name]) as channel:
            check: Any = health_pb2_grpc.HealthStub(channel).Check
            with contextlib.suppress(grpc.RpcError):
                answer = check(health_pb2.HealthCheckRequest(service=service), timeout=2)
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    @contextlib.contextmanager
    def engine(self) -> Iterator[Any]:
        """Stub of the scheduler's EngineService; its calls take `metadata=cluster.metadata`."""
        channel: Any = grpc.insecure_channel(self._addresses["scheduler"])
        with channel:
            yield engine_pb2_grpc.EngineServiceStub(channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The credential between stages."""
        return bearer_metadata(self._token)

    def metrics(self, stage: str) -> dict[str, float]:
        """All samples of a stage's metrics page, by name with labels."""
        name = self.name_of(stage)
        if name in self.gateways:
            page = httpx.get(f"http://{self._addresses[name]}/metrics", timeout=5, trust_env=False).text
        else:
            with httpx.Client(transport=httpx.HTTPTransport(uds=f"{self.folder}/{name}.metrics")) as client:
                page = client.get("http://stage/metrics", timeout=5).text
        rows = (line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
        return {key: float(value) for key, value in rows}

    def total(self, stage: str, name: str) -> float:
        """A metric's value, summed over its labels; the request for the page itself does not count."""
        found = {key: value for key, value in self.metrics(stage).items() if key.partition("{")[0] == name}
        return sum(value for key, value in found.items() if 'route="/metrics"' not in key)

    def wait_until_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Every stage serves, and every gateway has a session with every tokenizer."""
        deadline_s = time.monotonic() + limit_s
        for name in self.names[: -len(self.gateways)]:
            until(partial(self.is_serving, name), deadline_s - time.monotonic(), f"{name} does not serve")
        for i in range(len(self.gateways)):
            until(partial(self._has_all_tokenizers, i), deadline_s - time.monotonic(), f"gateway {i} is not ready")

    def _has_all_tokenizers(self, gateway: int) -> bool:
        if not self.ready(gateway):
            return False
        return self.total(self.gateways[gateway], "tokenloom_gateway_tokenizer_session") == len(self.tokenizers)

    # --- command lines --------------------------------------------------------------------------------------------

    def name_of(self, stage: str) -> str:
        """A stage's full name."""
        return f"{stage}-0" if stage in ("tokenizer", "gateway") else stage

    def flags(self, stage: str) -> list[str]:
        """Command line of a stage, without its program."""
        name = self.name_of(stage)
        kind = name.partition("-")[0]
        own: dict[str, dict[str, object]] = {
            "executor": {"model": self.model, "dtype": "float32", "num_threads": 1},
            "scheduler": {"executor": self._reached(name, "executor")},
            "tokenizer": {"model": self.model, "scheduler": self._reached(name, "scheduler")},
            "gateway": {"tokenizer": ",".join(self._reached(name, other) for other in self.tokenizers)},
        }
        common: dict[str, object] = {"listen": self._addresses[name]}
        if kind != "gateway":
            common["metrics_listen"] = f"unix:{self.folder}/{name}.metrics"
        values = {**common, **own[kind], **self._settings.get(kind, {}), **self._settings.get(name, {})}
        values |= self._changes.get(name, {})
        return [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]

    def _reached(self, client: str, server: str) -> str:
        kind = client.partition("-")[0]
        return self._links.get((client, server)) or self._links.get((kind, server)) or self._addresses[server]

    def _program(self, name: str) -> Sequence[str]:
        kind = name.partition("-")[0]
        return self._programs.get(name) or self._programs.get(kind) or ("-m", f"tokenloom.{kind}")


def _client_options(options: dict[str, Any]) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return {"timeout": 60, "limits": limits, "trust_env": False, **options}
