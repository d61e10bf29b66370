"""The load is told when it changed, at most once a period, and the last word is the right one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from tokenloom.scheduler import load
from tokenloom.scheduler.load import LoadReporter, LoadState

IDLE = LoadState(0, 0, 0, 10, 0, 10, 64, 0.0)
PERIOD_S = 0.05


class Source:
    """A load that the test sets, and what was told of it, when."""

    def __init__(self) -> None:
        self.now: LoadState | None = IDLE
        self.told: list[LoadState] = []
        self.told_s: list[float] = []
        self.num_looks = 0
        self.reporter = LoadReporter(self.read, self.tell)

    def read(self) -> LoadState | None:
        self.num_looks += 1
        return self.now

    def tell(self, state: LoadState) -> None:
        self.told.append(state)
        self.told_s.append(asyncio.get_running_loop().time())


def run(monkeypatch: pytest.MonkeyPatch, test: Callable[[Source], Coroutine[Any, Any, None]]) -> None:
    monkeypatch.setattr(load, "REPORT_PERIOD_S", PERIOD_S)

    async def limited() -> None:
        source = Source()
        async with asyncio.timeout(20):
            await test(source)
        source.reporter.stop()

    asyncio.run(limited())


def test_a_change_is_told_at_once_and_the_next_ones_at_most_once_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(source: Source) -> None:
        for num_running in range(1, 41):
            source.now = replace(IDLE, num_running=num_running)
            source.reporter.note_change()
            await asyncio.sleep(PERIOD_S / 10)
        await asyncio.sleep(2 * PERIOD_S)
        assert source.told[0].num_running == 1
        assert source.told[-1].num_running == 40, "the last state is told when nothing changes any more"
        gaps = [later - earlier for earlier, later in zip(source.told_s, source.told_s[1:], strict=False)]
        assert min(gaps) >= 0.9 * PERIOD_S

    run(monkeypatch, test)


def test_what_did_not_change_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(source: Source) -> None:
        for _ in range(5):
            source.reporter.note_change()
            await asyncio.sleep(1.5 * PERIOD_S)
        assert source.told == [IDLE]

    run(monkeypatch, test)


def test_the_rate_of_an_engine_that_stands_still_is_told_down_to_zero_and_then_nobody_wakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(source: Source) -> None:
        rates = [30.0, 20.0, 20.0, 0.0]

        def read() -> LoadState:
            source.num_looks += 1
            return replace(IDLE, tokens_per_second=rates.pop(0) if rates else 0.0)

        source.reporter.stop()
        source.reporter = LoadReporter(read, source.tell)
        source.reporter.note_change()
        await asyncio.sleep(12 * PERIOD_S)
        assert [state.tokens_per_second for state in source.told] == [30.0, 20.0, 0.0]
        assert source.num_looks == 4

    run(monkeypatch, test)


def test_without_an_engine_core_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(source: Source) -> None:
        source.now = None
        source.reporter.note_change()
        await asyncio.sleep(2 * PERIOD_S)
        assert (source.told, source.num_looks) == ([], 1)

    run(monkeypatch, test)
