"""What a session is told: columns that merge, a size that is counted, the newest load."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Coroutine
from typing import Any

import pytest

from tokenloom.api.v1 import engine_pb2
from tokenloom.common.errors import Unavailable
from tokenloom.scheduler.convert import Logprobs, response_of
from tokenloom.scheduler.core.request import FinishReason, PromptLogprobs
from tokenloom.scheduler.frames import FinishedRow, Outbox, parts_of
from tokenloom.scheduler.load import LoadState


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def taken(outbox: Outbox) -> engine_pb2.EngineServiceSessionResponse:
    frame = await outbox.take()
    assert frame is not None
    return response_of(frame)


def load(num_running: int) -> LoadState:
    return LoadState(num_running, 0, 0, 10, 5, 15, 64, 0.0)


def test_steps_that_wait_for_the_writer_become_one_message_in_order() -> None:
    async def test() -> None:
        outbox = Outbox(1 << 20)
        outbox.accept(7, 4)
        outbox.add_tokens(7, 0, [11])
        outbox.add_tokens(8, 5, [21, 22], Logprobs(2, [21, 3, 22, 4], [-0.5, -1.0, -0.25, -2.0]))
        outbox.add_tokens(7, 1, [12])
        outbox.finish(FinishedRow(7, FinishReason.LENGTH, 2, None))
        message = await taken(outbox)
        outputs = message.outputs
        assert list(outputs.handles) == [7, 8, 7]
        assert list(outputs.first_token_indexes) == [0, 5, 1]
        assert list(outputs.num_tokens) == [1, 2, 1]
        assert list(outputs.token_ids) == [11, 21, 22, 12]
        assert list(outputs.num_logprobs_per_token) == [0, 2, 0]
        assert list(outputs.logprob_token_ids) == [21, 3, 22, 4]
        assert list(outputs.logprobs) == [-0.5, -1.0, -0.25, -2.0]
        assert [finished.handle for finished in message.finished] == [7]
        assert not message.HasField("load")

    run(test())


def test_the_newest_load_replaces_the_one_that_waits_and_does_not_grow_the_frame() -> None:
    async def test() -> None:
        outbox = Outbox(100)
        for num_running in range(1000):
            outbox.set_load(load(num_running))
        assert not outbox.is_overflown
        assert (await taken(outbox)).load.num_running == 999
        outbox.set_load(load(0))
        message = await taken(outbox)
        assert message.HasField("load"), "zeros are news"
        assert message.load.num_running == 0

    run(test())


def test_a_frame_that_nobody_takes_is_overflown_at_its_bound_and_not_before() -> None:
    async def test() -> None:
        outbox = Outbox(8000)
        for index in range(100):
            outbox.add_tokens(1, index, [5])
        assert not outbox.is_overflown, "80 bytes a row"
        outbox.add_tokens(1, 100, [5])
        assert outbox.is_overflown
        await outbox.take()
        assert not outbox.is_overflown

    run(test())


@pytest.mark.parametrize("width", [0, 21])
def test_a_frame_weighs_in_memory_what_it_is_counted_for(width: int) -> None:
    async def test() -> None:
        outbox = Outbox(1 << 30)
        token_ids = [[50_000 + index] for index in range(2000)]  # the requests hold these
        tracemalloc.start()
        for index in range(2000):
            columns = Logprobs(width, [index * width + i for i in range(width)], [i + 0.5 for i in range(width)])
            outbox.add_tokens(1000, 1000 + index, token_ids[index], columns if width else None)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        frame = await outbox.take()
        assert frame is not None
        assert 0.6 * held < frame.num_bytes < 1.5 * held, (held, frame.num_bytes)

    run(test())


def test_a_closed_outbox_gives_what_is_left_and_then_nothing() -> None:
    async def test() -> None:
        outbox = Outbox(1000)
        outbox.reject(1, Unavailable("not now"))
        outbox.close()
        assert (await taken(outbox)).rejected[0].handle == 1
        assert await outbox.take() is None

    run(test())


def test_a_failed_outbox_raises_and_drops_what_waited() -> None:
    async def test() -> None:
        outbox = Outbox(1000)
        outbox.add_tokens(1, 0, [5])
        outbox.fail(Unavailable("gone"))
        with pytest.raises(Unavailable, match="gone"):
            await outbox.take()

    run(test())


def test_a_frame_that_the_writer_waits_for_is_not_overflown_however_large() -> None:
    async def test() -> None:
        outbox = Outbox(1000)
        taking = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)
        outbox.add_tokens(1, 0, [5] * 1000)
        assert not outbox.is_overflown
        await taking
        outbox.add_tokens(1, 1000, [5] * 1000)
        assert outbox.is_overflown, "now the writer is busy"

    run(test())


async def add_and_wait(outbox: Outbox) -> None:
    outbox.add_tokens(1, 0, [5])
    await outbox.wait_until_written()


@pytest.mark.parametrize("is_busy", [False, True])
def test_who_would_tell_more_waits_until_it_is_written(is_busy: bool) -> None:
    async def test() -> None:
        outbox = Outbox(1000)
        if is_busy:
            outbox.add_tokens(1, 0, [5])
            await outbox.take()
            outbox.add_tokens(1, 1, [5])
            waiting = asyncio.create_task(outbox.wait_until_written())
            await asyncio.sleep(0)
            await outbox.take()  # what was busy is written, and the rest begun
        else:
            writer = asyncio.create_task(outbox.take())
            await asyncio.sleep(0)
            waiting = asyncio.create_task(add_and_wait(outbox))
            await writer
        await asyncio.sleep(0.01)
        assert not waiting.done()
        writer = asyncio.create_task(outbox.take())
        await waiting
        writer.cancel()

    run(test())


def test_nobody_waits_for_a_closed_outbox() -> None:
    async def test() -> None:
        outbox = Outbox(1000)
        waiting = asyncio.create_task(outbox.wait_until_written())
        await asyncio.sleep(0)
        outbox.close()
        await waiting
        await outbox.wait_until_written()

    run(test())


@pytest.mark.parametrize("max_bytes", [1, 3000, 20_000, 1 << 20])
def test_the_parts_of_a_frame_tell_the_same_in_the_same_order(max_bytes: int) -> None:
    async def test() -> None:
        outbox = Outbox(1 << 20)
        outbox.reject(1, Unavailable("not now"))
        outbox.accept(2, 4)
        for position in range(5):
            outbox.add_prompt_logprobs(2, PromptLogprobs(position, 1, [position] * 10, [0.5] * 10))
        for index in range(40):
            outbox.add_tokens(2, index, [index], Logprobs(3, [index, 8, 9], [-0.5, -1.0, -2.0]) if index % 3 else None)
        outbox.finish(FinishedRow(2, FinishReason.LENGTH, 40, None))
        outbox.set_load(load(3))
        outbox.drain()
        frame = await outbox.take()
        assert frame is not None
        parts = list(parts_of(frame, max_bytes))
        assert (len(parts) > 1) == (frame.num_bytes > max_bytes)
        merged = engine_pb2.EngineServiceSessionResponse()
        for part in parts:
            merged.MergeFrom(response_of(part))
        assert merged == response_of(frame)
        assert [bool(part.accepted) for part in parts] == [True] + [False] * (len(parts) - 1)
        assert [bool(part.finished) for part in parts] == [False] * (len(parts) - 1) + [True]

    run(test())
