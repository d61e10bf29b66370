"""Runs of the real scheduler that are recorded, and executors that the recordings are replayed on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.fakes import EXECUTOR_SERVICE, FakeExecutor
from tests.service.scheduler_stack import Tokenizer, scheduler_on, submit
from tokenloom.api.v1 import common_pb2, engine_pb2, executor_pb2_grpc, recording_pb2
from tokenloom.common.grpc_server import GrpcServer
from tokenloom.common.recording import MAGIC, RecordingReader, framed
from tokenloom.replay.command import replay
from tokenloom.replay.config import RecordSettings, ReplaySettings
from tokenloom.replay.record import record
from tokenloom.replay.replayer import Summary

NUM_BLOCKS = 40
SHARED = list(range(100, 117))


def sampled(seed: int, **fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(temperature=1.0, seed=seed, **fields)


def workload(wave: int) -> list[engine_pb2.Submit]:
    """Twelve requests: long and short, with one prefix or none, greedy and sampled, with masks, bias and logprobs."""
    submits = []
    for i in range(12):
        handle = 100 * wave + i
        prompt = [*SHARED, i % 4, wave] if i % 3 == 0 else [i + 20] * (3 + 5 * (i % 4))
        params = sampled(handle, logit_bias={7: 2.0}) if i % 2 else common_pb2.SamplingParams(num_logprobs=2)
        if i == 4:
            params.num_prompt_logprobs = 1
        submits.append(submit(handle, prompt, 8 + 3 * i, sampling=params, stop={"min_tokens": 2}))
    return submits


async def drive(folder: Path, num_waves: int = 3) -> dict[int, list[int]]:
    """Run the workload on a scheduler in waves; in each, one request is cancelled. Gives the tokens of the others."""
    tokenizer = Tokenizer(folder)
    await tokenizer.open()
    for wave in range(1, num_waves + 1):
        submits = workload(wave)
        await tokenizer.send(submits=submits)
        cancelled = submits[11].handle
        while len(tokenizer.tokens.get(cancelled, [])) < 4:
            await tokenizer.read()
        await tokenizer.send(cancels=[engine_pb2.Cancel(handle=cancelled, reason="client_disconnected")])
        await tokenizer.read_until_ended(*(one.handle for one in submits))
    await tokenizer.close()
    assert not tokenizer.rejected
    return {handle: tokens for handle, tokens in tokenizer.tokens.items() if handle % 100 != 11}


async def record_run(folder: Path, executor: FakeExecutor, **settings: Any) -> dict[int, list[int]]:
    """Run the workload; the whole run goes to folder/all.tlrec, the ring to folder/ring.tlrec."""
    async with scheduler_on(folder, executor, record_file=f"{folder}/all.tlrec", **settings) as stage:
        tokens = await drive(folder)
        assert stage.engine.core is not None
        assert stage.engine.core.stats.num_preemptions > 0
        assert stage.engine.core.stats.num_prefix_hit_tokens > 0
        await save_ring(folder)
    return tokens


async def save_ring(folder: Path, name: str = "ring.tlrec") -> int:
    return await record(RecordSettings(f"{folder}/{name}", scheduler=f"unix:{folder}/scheduler.sock"))


@asynccontextmanager
async def serving(folder: Path, executor: FakeExecutor) -> AsyncIterator[str]:
    """A fake executor at an address of its own."""
    address = f"unix:{folder}/replay.sock"
    add = executor_pb2_grpc.add_ExecutorServiceServicer_to_server
    server = GrpcServer(address, [(add, executor, EXECUTOR_SERVICE)])
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def replay_on(folder: Path, executor: FakeExecutor, name: str, **settings: Any) -> Summary:
    async with serving(folder, executor) as address:
        return await replay(ReplaySettings(f"{folder}/{name}", executor=address, timeout_s=5.0, **settings))


def entries_of(path: Path) -> list[recording_pb2.RecordingEntry]:
    with path.open("rb") as file:
        return list(RecordingReader(file, path.name))


def write_entries(path: Path, entries: list[recording_pb2.RecordingEntry]) -> None:
    path.write_bytes(MAGIC + b"".join(framed(entry.SerializeToString()) for entry in entries))
