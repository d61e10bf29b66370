"""The tokenizer stage as a process: start, readiness, signals, faults at start-up."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes import FakeEngine
from tests.service.tokenizer_stack import run
from tests.tiny_models import VOCAB_SIZE, write_tiny_tokenizer
from tokenloom.common.channel import make_channel
from tokenloom.tokenizer.stage import SERVICE_NAME

LIMIT_S = 30.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_tiny_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "tokenloom.tokenizer", *flags]


def fault(*flags: str) -> str:
    """What a start that fails says; checks that it is one line with exit code 2."""
    ended = subprocess.run(command(*flags), check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.strip().splitlines()
    return line


@contextmanager
def running(*flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command(*flags), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def until_status(address: str, status: int) -> None:
    """Wait until the service's health is `status`."""
    async with make_channel(address) as channel, asyncio.timeout(LIMIT_S):
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        while True:
            answer = await stub.Check(request, wait_for_ready=True)
            if answer.status == status:
                return
            await asyncio.sleep(0.02)


def test_it_becomes_ready_with_its_engine_and_drains_on_sigterm(tmp_path: Path, model: Path) -> None:
    listen, scheduler = f"unix:{tmp_path}/tokenizer.sock", f"unix:{tmp_path}/scheduler.sock"

    async def scenario(process: subprocess.Popen[str]) -> None:
        await until_status(listen, health_pb2.HealthCheckResponse.NOT_SERVING)
        engine = FakeEngine(scheduler, VOCAB_SIZE)
        await engine.start()
        await until_status(listen, health_pb2.HealthCheckResponse.SERVING)
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, LIMIT_S)
        await engine.stop()

    with running(f"--model={model}", f"--listen={listen}", f"--scheduler={scheduler}", "--log-format=json") as process:
        run(scenario(process))
        assert process.returncode == 0
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
    assert all(line.startswith("{") for line in lines)
    assert not any('"level": "error"' in line for line in lines)


def test_faults_at_start_are_one_line_that_says_what_to_do(tmp_path: Path, model: Path) -> None:
    assert "no such file or folder" in fault(f"--model={tmp_path}/missing")
    (model / "tokenizer.json").write_text("{")
    assert "tokenizer.json cannot be read" in fault(f"--model={model}")
    assert "--max-active-choices" in fault("--max-active-choices=none")
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nsha256 = "{"0" * 64}"\ntenant = "t"\nhighest_class = "top"\n')
    line = fault(f"--model={model}", f"--keys-file={keys}")
    assert f"keys file {keys}: key 1: highest_class: 'top' is not accepted; expected a whole number" in line


def test_an_address_in_use_is_a_fault(tmp_path: Path, model: Path) -> None:
    listen = f"unix:{tmp_path}/tokenizer.sock"

    with running(f"--model={model}", f"--listen={listen}", f"--scheduler=unix:{tmp_path}/none.sock"):
        run(until_status(listen, health_pb2.HealthCheckResponse.NOT_SERVING))
        ended = subprocess.run(
            command(f"--model={model}", f"--listen={listen}"),
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert ended.returncode == 2
    assert "is in use" in ended.stderr


def test_help_names_every_setting_and_its_twin() -> None:
    text = subprocess.run(command("--help"), capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    for name in (
        "model",
        "listen",
        "scheduler",
        "api-key",
        "keys-file",
        "takeover-limit-s",
        "allow-special-tokens",
        "grace-s",
    ):
        assert f"--{name}" in text
        assert f"TOKENLOOM_{name.upper().replace('-', '_')}" in " ".join(text.split())
