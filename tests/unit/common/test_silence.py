"""A peer's silence counts only while this process runs; signs of life come when nothing else was sent."""

from __future__ import annotations

import asyncio
import time

import pytest

from tokenloom.common.pulse import Pulse
from tokenloom.common.silence import Silence, sleep_running

LIMIT_S = 10.0


def test_silence_adds_up_until_something_is_heard() -> None:
    silence = Silence()
    assert silence.pass_time(1.0) == 1.0
    assert silence.pass_time(0.5) == 1.5
    silence.end()
    assert silence.pass_time(1.0) == 0.0, "when in this tick it was heard is not known"
    assert silence.pass_time(1.0) == 1.0


def test_a_silent_peer_is_found_and_one_that_speaks_is_not() -> None:
    async def test() -> None:
        silence = Silence()
        began_s = time.monotonic()
        await asyncio.wait_for(silence.wait_for(0.1), LIMIT_S)
        assert time.monotonic() - began_s >= 0.1

        waiting = asyncio.create_task(silence.wait_for(0.2))
        for _ in range(20):
            silence.end()
            await asyncio.sleep(0.03)
        assert not waiting.done()
        await asyncio.wait_for(waiting, LIMIT_S)

    asyncio.run(test())


@pytest.mark.parametrize("wait", [lambda: Silence().wait_for(0.3), lambda: sleep_running(0.3)])
def test_time_in_which_the_loop_was_held_does_not_count(wait) -> None:  # type: ignore[no-untyped-def]
    async def test() -> None:
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.02)
        time.sleep(1.0)  # noqa: ASYNC251 - as if the process had been stopped
        await asyncio.sleep(0.05)
        assert not waiting.done(), "what the peer said meanwhile can be read first"
        await asyncio.wait_for(waiting, LIMIT_S)

    asyncio.run(test())


def test_a_pulse_beats_only_in_silence_and_never_after_its_end() -> None:
    async def test() -> None:
        beats: list[float] = []
        pulse = Pulse(0.1, lambda: beats.append(time.monotonic()))
        for _ in range(30):
            pulse.note_sent()
            await asyncio.sleep(0.01)
        assert not beats
        async with asyncio.timeout(LIMIT_S):
            while len(beats) < 3:
                await asyncio.sleep(0.01)
        assert beats[2] - beats[1] >= 0.09
        pulse.stop()
        count = len(beats)
        await asyncio.sleep(0.25)
        assert len(beats) == count
        Pulse(0.0, lambda: beats.append(0.0))
        await asyncio.sleep(0.05)
        assert len(beats) == count, "a period of 0 is none"

    asyncio.run(test())
