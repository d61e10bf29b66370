"""Commands reach a stage that takes long to take their connection, as on a busy machine or over a long line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes import FakeExecutor
from tests.service.recording_stack import NUM_BLOCKS, record_run, serving
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, submit
from tokenloom.common.errors import SetupError
from tokenloom.conformance.config import ConformanceSettings
from tokenloom.conformance.suite import run_suite
from tokenloom.replay.command import replay
from tokenloom.replay.config import RecordSettings, ReplaySettings
from tokenloom.replay.record import record

DELAY_S = 0.3


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)


@asynccontextmanager
async def slow_to_connect(folder: Path, target: Path) -> AsyncIterator[str]:
    """An address that leads to another socket, whose bytes begin to pass only after a while."""
    passing: list[asyncio.Task[None]] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(DELAY_S)
        target_reader, target_writer = await asyncio.open_unix_connection(target)
        pipes = [asyncio.create_task(_pipe(reader, target_writer)), asyncio.create_task(_pipe(target_reader, writer))]
        try:
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.wait(pipes)
            target_writer.close()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing.append(task := asyncio.create_task(pass_on(reader, writer)))
        try:
            await asyncio.wait([task])
        finally:
            writer.close()

    path = folder / "slow.sock"
    server = await asyncio.start_unix_server(take, path)
    try:
        yield f"unix:{path}"
    finally:
        server.close()
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
        await asyncio.sleep(0)  # the handlers close their sides


def test_a_recording_is_fetched_over_a_connection_that_takes_long(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor()):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, [2, 3, 4])])
            await tokenizer.read_until_ended(1)
            await tokenizer.close()
            async with slow_to_connect(tmp_path, tmp_path / "scheduler.sock") as address:
                assert await record(RecordSettings(f"{tmp_path}/ring.tlrec", scheduler=address)) >= 8

    run(test())


def test_an_executor_is_reached_over_a_connection_that_takes_long(tmp_path: Path) -> None:
    async def test() -> None:
        await record_run(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS))
        async with (
            serving(tmp_path, FakeExecutor(num_blocks=NUM_BLOCKS)),
            slow_to_connect(tmp_path, tmp_path / "replay.sock") as address,
        ):
            assert (await replay(ReplaySettings(f"{tmp_path}/all.tlrec", executor=address))).is_equal
            settings = ConformanceSettings(executor=address, only=("capabilities",))
            assert (await run_suite(settings, lambda outcome: None)).is_conformant

    run(test())


def test_who_is_not_there_is_told_after_a_while_with_the_reason(tmp_path: Path) -> None:
    async def test() -> None:
        started_s = time.monotonic()
        with pytest.raises(SetupError, match=r"executor unix.*nobody.*(connect|No such file)"):
            await run_suite(
                ConformanceSettings(executor=f"unix:{tmp_path}/nobody", timeout_s=0.5), lambda outcome: None
            )
        assert time.monotonic() - started_s < 5.0

    run(test())
