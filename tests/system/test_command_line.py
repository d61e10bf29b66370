"""`tokenloom record`, `replay` and `conformance` as a user calls them, on a real executor process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.system.in_process import running_stages
from tests.tiny_models import write_tiny_model
from tokenloom.common.recording import MAGIC, RecordingReader, framed

NUM_BLOCKS = 24
RING = 64
LIMIT_S = 120.0


def tokenloom(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    command = [sys.executable, "-c", "from tokenloom.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)


@dataclass(frozen=True)
class Recorded:
    """What a scheduler recorded: all of it, and what its ring held at the end."""

    whole: Path
    ring: Path
    num_tokens: int
    told: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Greedy and seeded requests with penalties, logprobs and a common prefix, in a pool too small for all at once."""
    folder = tmp_path_factory.mktemp("recorded")
    whole, ring = folder / "whole.tlrec", folder / "ring.tlrec"

    async def record() -> Recorded:
        async with running_stages(folder, num_blocks=NUM_BLOCKS, record_file=str(whole), record_steps=RING) as stages:
            bodies: list[dict[str, Any]] = [
                {"prompt": [*range(10, 30), 40 + i], "max_tokens": 80, "logprobs": 1, "n": 2, **extra}
                for i, extra in enumerate([{}, {"temperature": 1.0, "seed": 3}, {"frequency_penalty": 0.8}, {}])
            ]
            answers = await asyncio.gather(*(stages.complete(**body) for body in bodies))
            command = ("record", ring, "--scheduler", f"unix:{folder}/scheduler")
            told = await asyncio.to_thread(tokenloom, *command)
            num_tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
            return Recorded(whole, ring, num_tokens, told)

    return uvloop.run(asyncio.wait_for(record(), LIMIT_S))


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an executor that no scheduler has."""
    folder = tmp_path_factory.mktemp("executor")
    address, model = f"unix:{folder}/socket", write_tiny_model(folder / "tiny-llama", "llama")
    flags = [f"--model={model}", "--dtype=float32", "--num-threads=1", f"--listen={address}", "--log-level=error"]
    process = subprocess.Popen([sys.executable, "-m", "tokenloom.executor", *flags])
    try:
        wait_until_serving(address)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def wait_until_serving(address: str) -> None:
    request = health_pb2.HealthCheckRequest(service="tokenloom.api.v1.ExecutorService")
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True, timeout=LIMIT_S)
        assert any(answer.status == health_pb2.HealthCheckResponse.SERVING for answer in watch)
        watch.cancel()


def test_a_recorded_run_is_replayed_to_the_same_tokens_and_logprobs(recorded: Recorded, executor: str) -> None:
    ended = tokenloom("replay", recorded.whole, "--executor", executor, "--logprob-tolerance", "0.001", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["num_tokens"] == recorded.num_tokens
    assert summary["num_mismatches"] == summary["num_skipped_rows"] == summary["num_preparation_steps"] == 0


def test_the_ring_of_a_running_scheduler_is_replayed_from_the_middle(recorded: Recorded, executor: str) -> None:
    assert recorded.told.returncode == 0, recorded.told.stderr
    num_steps = int(recorded.told.stdout.removeprefix(f"{recorded.ring}: ").removesuffix(" steps\n"))
    assert RING // 2 < num_steps <= RING
    assert recorded.ring.stat().st_mode & 0o077 == 0, "prompts and outputs are in it"
    ended = tokenloom("replay", recorded.ring, "--executor", executor, "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads(ended.stdout)
    assert num_steps <= summary["num_tokens"] < recorded.num_tokens
    assert summary["num_prepared_rows"] > 0


def test_a_single_token_that_differs_is_found_and_named(recorded: Recorded, executor: str, tmp_path: Path) -> None:
    with recorded.whole.open("rb") as file:
        entries = list(RecordingReader(file, "whole"))
    results = [entry.result for entry in entries if entry.result.sampled_token_ids]
    changed = results[len(results) // 2]
    changed.sampled_token_ids[0] ^= 1
    forged = tmp_path / "forged.tlrec"
    forged.write_bytes(MAGIC + b"".join(framed(entry.SerializeToString()) for entry in entries))
    ended = tokenloom("replay", forged, "--executor", executor)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"expected {changed.sampled_token_ids[0]}, got {changed.sampled_token_ids[0] ^ 1}" in ended.stdout
    assert ended.stdout.count("expected") == 1


def test_the_executor_conforms_to_the_protocol(executor: str) -> None:
    ended = tokenloom("conformance", "--executor", executor, "--json")
    report = json.loads(ended.stdout)
    failed = [outcome for outcome in report["outcomes"] if outcome["verdict"] == "FAIL"]
    assert not failed
    assert ended.returncode == 0
    assert report["counts"]["PASS"] > 20


@pytest.mark.parametrize("is_there", [True, False])
def test_what_cannot_be_replayed_is_one_line_and_exit_code_2(
    is_there: bool, recorded: Recorded, tmp_path: Path
) -> None:
    """Nobody listens at the address, or there is no such file."""
    file = recorded.whole if is_there else tmp_path / "missing"
    ended = tokenloom("replay", file, "--executor", f"unix:{tmp_path}/nobody", "--timeout-s", "2")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ("nobody" if is_there else "missing") in ended.stderr
