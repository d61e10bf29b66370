"""The executor as a program: start, readiness, end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.tiny_models import write_tiny_model
from tokenloom.executor.servicer import SERVICE_NAME

LIMIT_S = 60.0


def start(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "TOKENLOOM_CACHE": str(tmp_path / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "tokenloom.executor", "--listen", f"unix:{tmp_path}/executor.sock", *flags],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_becomes_ready_and_sigterm_ends_it_with_exit_code_zero(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", "gpt2")
    process = start(tmp_path, "--model", str(folder), "--kv-cache-bytes", "1MiB", "--num-threads", "1")
    try:
        wait_until_serving(f"unix:{tmp_path}/executor.sock", process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        assert "Traceback" not in out + err
    finally:
        process.kill()
        process.wait()


def wait_until_serving(address: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert process.poll() is None, process.communicate()
        with grpc.insecure_channel(address) as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
                status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2).status
            except grpc.RpcError:
                status = health_pb2.HealthCheckResponse.UNKNOWN
        if status == health_pb2.HealthCheckResponse.SERVING:
            return
        assert time.monotonic() < deadline, "it never became ready"
        time.sleep(0.1)


def test_a_folder_without_weights_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    process = start(tmp_path, "--model", str(tmp_path / "empty"))
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    (line,) = err.strip().splitlines()
    assert line.startswith("tokenloom: ")
    assert "holds no weights" in line
