"""The launcher's watchdog: who does not answer is ended, whoever is slow, loading or told to stop is not."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.unit.launcher.test_child import supervised, until
from tokenloom.launcher.child import Child
from tokenloom.launcher.readiness import GatewayProbe
from tokenloom.launcher.watchdog import Watchdog

LIMIT_S = 0.3


class FakeChild:
    """Notes why it was ended; each end makes a new process, as supervision does."""

    def __init__(self) -> None:
        self.num_restarts = 0
        self.whys: list[str] = []

    def end_hanging(self, why: str) -> None:
        self.whys.append(why)
        self.num_restarts += 1


class FakeProbe:
    """Answers as it is told, after `delay_s`; what has no answer takes as long as it is given."""

    def __init__(self) -> None:
        self.has_started = True
        self.answers = True
        self.delay_s = 0.0
        self.num_asks = 0
        self.is_closed = False

    async def is_up(self, timeout_s: float) -> bool:
        return self.has_started and await self.is_live(timeout_s)

    async def is_live(self, timeout_s: float) -> bool:
        self.num_asks += 1
        if not self.answers:
            await asyncio.sleep(timeout_s)
            return False
        await asyncio.sleep(self.delay_s)
        return True

    async def close(self) -> None:
        self.is_closed = True


def run(test: Callable[[FakeChild, FakeProbe], Coroutine[Any, Any, None]]) -> None:
    async def scenario() -> None:
        child, probe = FakeChild(), FakeProbe()
        watching = asyncio.create_task(Watchdog(child, probe, LIMIT_S).watch())
        try:
            await asyncio.wait_for(test(child, probe), 20)
            assert not watching.done()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        assert probe.is_closed

    asyncio.run(scenario())


def test_a_stage_that_answers_is_left_alone_and_ended_once_when_it_ceases_to() -> None:
    async def test(child: FakeChild, probe: FakeProbe) -> None:
        await asyncio.sleep(3 * LIMIT_S)
        assert not child.whys
        assert probe.num_asks > 5
        probe.answers = False
        await until(lambda: child.whys)
        assert "no sign of life for 0.3 s" in child.whys[0]
        await asyncio.sleep(4 * LIMIT_S)
        assert len(child.whys) == 1, "the next process has not started yet"
        probe.answers, num_asks = True, probe.num_asks
        await until(lambda: probe.num_asks > num_asks + 5)
        probe.answers = False
        await until(lambda: len(child.whys) == 2)

    run(test)


def test_a_stage_that_has_not_started_may_take_its_time() -> None:
    async def test(child: FakeChild, probe: FakeProbe) -> None:
        probe.has_started = False
        await asyncio.sleep(4 * LIMIT_S)
        assert not child.whys

    run(test)


def test_a_slow_answer_is_an_answer() -> None:
    async def test(child: FakeChild, probe: FakeProbe) -> None:
        probe.delay_s = 0.6 * LIMIT_S
        await asyncio.sleep(5 * LIMIT_S)
        assert not child.whys

    run(test)


def test_a_launcher_that_was_stopped_itself_ends_nobody() -> None:
    async def test(child: FakeChild, probe: FakeProbe) -> None:
        await until(lambda: probe.num_asks > 3)
        time.sleep(5 * LIMIT_S)  # noqa: ASYNC251 - as if the process had been stopped
        await asyncio.sleep(2 * LIMIT_S)
        assert not child.whys

    run(test)


def test_a_process_that_ended_by_itself_is_not_ended_again() -> None:
    async def test(child: FakeChild, probe: FakeProbe) -> None:
        await until(lambda: probe.num_asks > 3)
        probe.answers = False
        child.num_restarts += 1
        await asyncio.sleep(4 * LIMIT_S)
        assert not child.whys

    run(test)


def test_a_process_that_hangs_is_killed_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def test(child: Child) -> None:
        await until(lambda: child.pid)
        pid = child.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        child.end_hanging("gave no sign of life")
        await until(lambda: child.pid not in (None, pid))
        assert [record.message for record in caplog.records] == [
            "executor gave no sign of life; starting it again in 0.1 s"
        ]

    with caplog.at_level(logging.WARNING):
        supervised(test, code=0)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Busy\r\n\r\n", b""])
def test_a_gateway_that_refuses_is_alive_and_one_that_is_silent_is_not(answer: bytes) -> None:
    async def test() -> None:
        is_silent = False
        ended: list[bool] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            if is_silent:
                await reader.read()  # until the probe gives up
            else:
                writer.write(answer)
            writer.close()
            ended.append(True)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        probe = GatewayProbe("127.0.0.1", server.sockets[0].getsockname()[1])
        assert await probe.is_live(2.0)
        is_silent = True
        assert not await probe.is_live(0.1)
        await until(lambda: len(ended) == 2)
        server.close()
        assert not await probe.is_live(2.0)

    asyncio.run(test())
