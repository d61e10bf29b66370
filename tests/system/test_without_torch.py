"""The scheduler and the gateway run where torch is not installed."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes import EXECUTOR_SERVICE, FakeExecutor
from tests.system.stack import free_port
from tokenloom.api.v1 import executor_pb2_grpc
from tokenloom.common.channel import make_channel
from tokenloom.common.grpc_server import GrpcServer

ROOT = Path(__file__).parents[2]
FORBIDDEN = ("torch", "transformers", "tokenizers", "numpy")


@pytest.fixture(scope="module")
def python_without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A fresh environment with the extras [gateway,scheduler] alone."""
    folder, source = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("source")
    # A copy, since setuptools builds beside the sources and would pack what an earlier build left there.
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split("\0"):
        if name.startswith(("services/", "pyproject.toml", "README.md", "LICENSE")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "-qqq", "--disable-pip-version-check", f"{source}[gateway,scheduler]"]
    subprocess.run(install, check=True, timeout=200)
    return python


def test_the_environment_has_no_torch(python_without_torch: str) -> None:
    code = f"import importlib.util as u; print([m for m in {FORBIDDEN} if u.find_spec(m)])"
    found = subprocess.run([python_without_torch, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    program = str(Path(python_without_torch).parent / "tokenloom")
    for word, extra in (("executor", "executor"), ("tokenizer", "tokenizer"), ("serve", "all")):
        missing = subprocess.run([program, word], capture_output=True, text=True, check=False)
        assert missing.returncode == 2
        assert missing.stderr.count("\n") == 1, missing.stderr
        assert f"pip install 'tokenloom[{extra}]'" in missing.stderr


async def wait_until_serving(address: str) -> None:
    channel = make_channel(address)
    request = health_pb2.HealthCheckRequest(service="tokenloom.api.v1.EngineService")
    watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True, timeout=30)
    async for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            break
    await channel.close(None)


def test_the_scheduler_becomes_ready_there(python_without_torch: str, tmp_path: Path) -> None:
    async def test() -> None:
        add = executor_pb2_grpc.add_ExecutorServiceServicer_to_server
        executor = GrpcServer(f"unix:{tmp_path}/executor", [(add, FakeExecutor(), EXECUTOR_SERVICE)])
        await executor.start()
        flags = ["--listen", f"unix:{tmp_path}/scheduler", "--executor", f"unix:{tmp_path}/executor"]
        process = await asyncio.create_subprocess_exec(python_without_torch, "-m", "tokenloom.scheduler", *flags)
        try:
            await wait_until_serving(f"unix:{tmp_path}/scheduler")
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 20) == 0
        finally:
            if process.returncode is None:
                process.kill()
            await executor.stop(0)

    asyncio.run(test())


def test_the_gateway_is_alive_there_and_says_that_it_is_not_ready(python_without_torch: str, tmp_path: Path) -> None:
    port = free_port()
    flags = ["--listen", f"127.0.0.1:{port}", "--tokenizer", f"unix:{tmp_path}/nobody"]
    process = subprocess.Popen([python_without_torch, "-m", "tokenloom.gateway", *flags])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            for _ in range(200):
                try:
                    client.get("/health")
                    break
                except httpx.ConnectError:
                    assert process.poll() is None
                    time.sleep(0.1)
            assert client.get("/health").status_code == 200
            assert client.get("/ready").status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
