"""Starting, supervising and stopping the stack; what keeps it from starting."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from tests.system.stack import STAGES, Stack, free_port, is_alive, running_stack
from tests.tiny_models import write_tiny_model
from tokenloom.api.v1 import common_pb2, inference_pb2


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def complete(stack: Stack, api_key: str) -> str:
    client = stack.client(api_key)
    return client.completions.create(model="tiny-llama", prompt="The fox", max_tokens=8, temperature=0).choices[0].text


def test_killed_stages_are_started_again_and_ctrl_c_stops_all(tiny_model: Path) -> None:
    grpc_port = free_port()
    keys = ("--api-key=one", "--api-key=two")
    with running_stack(f"--model={tiny_model}", f"--grpc-port={grpc_port}", *keys) as stack:
        check_that_start_up_shows_progress(stack)
        check_that_grpc_asks_for_a_key(grpc_port)
        expected = complete(stack, "one")
        assert complete(stack, "two") == expected
        for key in ("three", "on", "none"):
            with pytest.raises(openai.AuthenticationError):
                complete(stack, key)
        for stage in STAGES:
            kill_and_wait_for_recovery(stack, stage)
            assert complete(stack, "one") == expected
            assert f"{stage} was ended by SIGKILL" in stack.output
        num_lines = len(stack.lines)
        for stage in ("scheduler", "gateway"):
            kill_and_wait_for_recovery(stack, stage, signal.SIGTERM)
            assert complete(stack, "one") == expected
        alarms = [line for line in stack.lines[num_lines:] if " warning " in line or " error " in line]
        assert not alarms, "a stage that was told to stop is no cause for alarm"
        pids = stack.stage_pids()
        chunks = long_stream(stack, "one")
        next(chunks)
        assert stack.stop() == 0
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length", "what runs may finish"
        assert not any(is_alive(pid) for pid in pids.values())


def long_stream(stack: Stack, api_key: str) -> Iterator[Any]:
    stream = stack.client(api_key).completions.create(
        model="tiny-llama", prompt="The fox", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    return iter(stream)


def kill_and_wait_for_recovery(stack: Stack, stage: str, number: int = signal.SIGKILL) -> None:
    before = stack.stage_pids()
    assert set(before) == set(STAGES)
    os.kill(before[stage], number)
    wait_for(lambda: not is_alive(before[stage]), 15)
    wait_for(lambda: set(stack.stage_pids()) == set(STAGES) and stack.is_ready(), 60)
    after = stack.stage_pids()
    assert {name for name in STAGES if after[name] != before[name]} == {stage}


def check_that_start_up_shows_progress(stack: Stack) -> None:
    assert all(f"{stage:<9} ready" in stack.output for stage in STAGES)
    assert sum("http://" in line for line in stack.lines) == 1
    lines = [line for line in stack.lines if not line.startswith("tokenloom: ")]
    assert not lines, f"start-up shows nothing but progress: {lines}"


def check_that_grpc_asks_for_a_key(port: int) -> None:
    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content="Hello")],
        options=inference_pb2.GenerationOptions(stop=common_pb2.StopConditions(max_tokens=4, ignore_eos=True)),
    )
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        chat = channel.unary_stream(
            "/tokenloom.api.v1.InferenceService/Chat",
            request_serializer=inference_pb2.ChatRequest.SerializeToString,
            response_deserializer=inference_pb2.ChatResponse.FromString,
        )
        for metadata in ((), (("authorization", "Bearer three"),)):
            with pytest.raises(grpc.RpcError) as caught:
                list(chat(request, metadata=metadata, timeout=10))
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        events = [answer.event for answer in chat(request, metadata=(("authorization", "Bearer one"),), timeout=30)]
    assert events[0].WhichOneof("kind") == "accepted"
    assert events[-1].completed.usage.num_generated_tokens == 4
    assert sum(event.delta.num_tokens for event in events) == 4


def test_no_orphan_is_left_when_the_launcher_is_killed(tiny_model: Path) -> None:
    with running_stack(f"--model={tiny_model}") as stack:
        pids = stack.stage_pids()
        assert len(pids) == 4
        stack.process.kill()
        stack.process.wait()
        wait_for(lambda: not any(is_alive(pid) for pid in pids.values()), 15)


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_ctrl_c_while_starting_stops_at_once(tiny_model: Path, seconds: float) -> None:
    stack = Stack(f"--model={tiny_model}")
    wait_for(lambda: "starting" in stack.output, 20)
    time.sleep(seconds)
    started = time.monotonic()
    assert stack.stop() == 0
    assert time.monotonic() - started < 10
    assert not stack.stage_pids()


def run_program(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from tokenloom.cli import main; main()", *argv],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def broken_gguf(folder: Path) -> str:
    (folder / "broken.gguf").write_bytes(b"GGUF" + bytes(range(200)))
    return str(folder / "broken.gguf")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--model", "/no/such/folder"], ["/no/such/folder"]),
        (["serve", "--model", "{empty}"], ["no weights"]),
        (["serve", "--port", "eighty"], ["--port", "eighty"]),
        (["serve", "--port", "70000"], ["--port", "70000"]),
        (["serve", "--api-key", ""], ["--api-key", "empty"]),
        (["executor", "--model", "{gguf}", "--listen", "unix:{empty}/x.sock"], ["broken.gguf", "download"]),
        (["serve", "--model", "{gguf}"], ["broken.gguf", "download"]),
        (["tokenizer", "--listen", "nowhere"], ["nowhere", "host:port"]),
        (["juggler"], ["juggler", "scheduler"]),
    ],
)
def test_what_cannot_start_says_so_in_one_line_and_exits_with_2(
    argv: list[str], words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"empty": str(tmp_path / "empty"), "gguf": broken_gguf(tmp_path)}
    port = ["--port", str(free_port())] if argv[0] == "serve" and "--port" not in argv else []
    result = run_program(*[word.format(**names) for word in argv], *port)
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if " info " not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("tokenloom: ")
    assert all(word in lines[0] for word in words), lines


@pytest.mark.parametrize("program", ["serve", "gateway"])
def test_a_port_in_use_is_named(program: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        flags = ["--port", str(port)] if program == "serve" else ["--listen", f"127.0.0.1:{port}"]
        result = run_program(program, *flags)
    assert result.returncode == 2
    assert str(port) in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("program", ["serve", *STAGES])
def test_help_is_readable(program: str) -> None:
    result = run_program(program, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: tokenloom {program} [options]")
    assert "TOKENLOOM_" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120
