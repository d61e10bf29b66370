"""A router that reads WatchCacheEvents and hashes prompts as engine.proto says knows what each request will find."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.system.in_process import Stages, StagesOfModule, num_cached_tokens, stages_of_module
from tokenloom.api.v1 import engine_pb2

NUM_BLOCKS = 32
NUM_OUTPUT = 6
_LIMIT_S = 20.0


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagesOfModule]:
    with stages_of_module(tmp_path_factory.mktemp("stack"), num_blocks=NUM_BLOCKS) as running:
        yield running


# --- the router, written from the comments in engine.proto ------------------------------------------------------------


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def root_of(salt: str, adapter: str = "") -> bytes:
    texts = (salt.encode(), adapter.encode())
    return sha256(b"tokenloom/1" + b"".join(u32(len(text)) + text for text in texts))


def blocks_of(token_ids: list[int], salt: str, block_size: int) -> list[tuple[bytes, bytes]]:
    """(hash, parent) of each full block."""
    parent, blocks = root_of(salt), []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        content = b"".join(map(u32, token_ids[start : start + block_size]))
        blocks.append((sha256(parent + content), parent))
        parent = blocks[-1][0]
    return blocks


class Router:
    """Knows which blocks an engine has.

    Attributes:
        blocks: hash and parent of each.
        num_snapshots: messages that said to forget everything before them.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.block_size = 0
        self.hash_scheme = self.engine_epoch = ""
        self.num_snapshots = 0
        self.num_removed = 0
        self._sequence: int | None = None
        self._news = asyncio.Event()

    def apply(self, message: engine_pb2.WatchCacheEventsResponse) -> None:
        assert self._sequence is None or message.sequence == self._sequence + 1
        assert message.cleared or self._sequence is not None, "the first message is a snapshot"
        self._sequence = message.sequence
        if message.cleared:
            self.blocks.clear()
            self.block_size, self.hash_scheme = message.block_size, message.hash_scheme
            self.engine_epoch = message.engine_epoch
            self.num_snapshots += 1
        for block_hash in message.removed_hashes:
            del self.blocks[block_hash]
            self.num_removed += 1
        self.blocks.update(zip(message.stored_hashes, message.parent_hashes, strict=True))
        self._news.set()

    def predict(self, prompt: list[int], salt: str = "") -> int:
        """Prompt tokens that a request will find cached; at least one is always computed."""
        count = 0
        for block_hash, _ in blocks_of(prompt[:-1], salt, self.block_size):
            if block_hash not in self.blocks:
                break
            count += self.block_size
        return count

    async def until(self, holds: Any) -> None:
        """Wait for a message behind which a condition holds."""
        async with asyncio.timeout(_LIMIT_S):
            while not holds():
                self._news.clear()
                await self._news.wait()

    async def read(self, call: Any) -> None:
        async for message in call:
            self.apply(message)


@asynccontextmanager
async def routing(stages: Stages) -> AsyncIterator[Router]:
    """A router that has read its first snapshot."""
    router = Router()
    call = stages.engine.WatchCacheEvents(engine_pb2.WatchCacheEventsRequest())
    reader = asyncio.create_task(router.read(call))
    try:
        await router.until(lambda: router.num_snapshots or reader.done())
        yield router
        assert not reader.done()
    finally:
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await reader


# --- tests ------------------------------------------------------------------------------------------------------------


class Traffic:
    """Requests with prefixes in common, and all blocks that they can have filled."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)
        self._num_marks = 0
        self.known: dict[bytes, bytes] = {}
        self._begins = [[self._choose.randrange(3, 500) for _ in range(80)] for _ in range(3)]

    def prompt(self) -> tuple[list[int], str]:
        """A prompt of up to seven blocks, and its salt."""
        begin, num_shared = self._choose.choice(self._begins), self._choose.choice((16, 32, 33, 48, 64, 80))
        more = [self._choose.choice((10, 11)) for _ in range(self._choose.randrange(40))]
        return begin[:num_shared] + more, self._choose.choice(("", "", "salt"))

    async def ask(self, stages: Stages, prompt: list[int], salt: str) -> int:
        """Send a request; returns the prompt tokens that it found cached."""
        answer = await stages.complete(prompt=prompt, max_tokens=NUM_OUTPUT, cache_salt=salt or None)
        self.known.update(blocks_of(prompt + answer["choices"][0]["token_ids"], salt, 16))
        return num_cached_tokens(answer)

    async def mark(self, stages: Stages, router: Router) -> None:
        """Return when the router knows of all that happened before: a new block of its own marks the place."""
        self._num_marks += 1
        prompt = [20 + self._num_marks % 400, *[20 + self._num_marks // 400] * 16]
        (block,) = blocks_of(prompt, "", 16)
        await self.ask(stages, prompt, "")
        await router.until(lambda: block[0] in router.blocks)


def test_a_router_predicts_cached_tokens_through_evictions(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        traffic, found = Traffic(1), []
        async with routing(stages) as router:
            assert (router.block_size, router.hash_scheme) == (16, "sha256-chain-1")
            assert router.engine_epoch
            for _ in range(60):
                prompt, salt = traffic.prompt()
                predicted = router.predict(prompt, salt)
                found.append(await traffic.ask(stages, prompt, salt))
                assert found[-1] == predicted
                await traffic.mark(stages, router)
                assert len(router.blocks) < NUM_BLOCKS
                assert router.blocks.items() <= traffic.known.items(), "every block told is one that was filled"
            assert router.num_removed > 30, "the pool is small"
            assert router.num_snapshots == 1
            load = (await stages.engine.GetLoad(engine_pb2.GetLoadRequest())).load
            assert len(router.blocks) == load.num_cached_blocks
        assert 0 in found
        assert len(set(found)) > 3

    stages.run(test)


def test_who_comes_later_is_told_the_same_and_a_flush_empties_both(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        traffic = Traffic(2)
        async with routing(stages) as first:
            prompt, salt = traffic.prompt()
            await traffic.ask(stages, prompt, salt)
            await traffic.mark(stages, first)
            async with routing(stages) as second:
                assert second.blocks == first.blocks
                assert first.predict(prompt, salt) > 0
                await stages.engine.FlushPrefixCache(engine_pb2.FlushPrefixCacheRequest())
                await first.until(lambda: not first.blocks)
                await second.until(lambda: not second.blocks)
                assert await traffic.ask(stages, prompt, salt) == 0
                await traffic.mark(stages, first)
                await second.until(lambda: second.blocks == first.blocks)
                predicted = second.predict(prompt, salt)
                assert predicted == (len(prompt) - 1) // 16 * 16
                assert await traffic.ask(stages, prompt, salt) == predicted

    stages.run(test)
