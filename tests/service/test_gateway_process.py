"""The gateway as a program, and the load client against it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from loadtest.__main__ import main as loadtest_main
from tests.service.gateway_stack import GatewayStack, running_gateway

GATEWAY = [sys.executable, "-m", "tokenloom.gateway"]


def test_the_program_serves_on_a_unix_socket_and_ends_well_on_sigterm(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    arguments = ["--listen", f"unix:{path}", "--tokenizer", f"unix:{tmp_path}/nobody.sock"]
    with subprocess.Popen([*GATEWAY, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            GatewayStack.wait_for(path.exists, 20)
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://gateway") as client:
                assert client.get("/health").status_code == 200
                assert client.get("/ready").status_code == 503
                refused = client.post("/v1/completions", json={"prompt": "hi"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_tokenizer")
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode == 0, log
    assert "Traceback" not in log
    assert not path.exists()


def test_a_port_in_use_is_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = subprocess.run([*GATEWAY, "--listen", address], capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert address in line
    assert "--listen" in line


def test_a_fault_in_the_keys_file_that_the_environment_names_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[[key]]\n")
    ended = subprocess.run(
        [*GATEWAY, "--listen", f"unix:{tmp_path}/http.sock"],
        env={**os.environ, "TOKENLOOM_KEYS_FILE": str(path)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert f"keys file {path}: key 1: sha256 is missing" in line


def test_the_load_client_measures_the_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    with running_gateway(tmp_path) as stack:
        sizes = ["--clients", "4", "--requests", "8", "--prompt-tokens", "10", "--output-tokens", "6"]
        assert loadtest_main(["--url", stack.url, *sizes, "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert (figures["num_ok"], figures["errors"]) == (8, {})
    assert (figures["num_prompt_tokens"], figures["num_output_tokens"]) == (80, 48)
    assert figures["output_tokens_per_s"] > 0
    assert figures["settings"]["clients"] == 4
    assert "8 of 8 requests" in capsys.readouterr().out
