"""Every stage in turn is told to stop and started again under load: no request fails, and every text is the exact one.

Two gateways and two tokenizers before one scheduler and one executor, each a process of its own. The client does what a
balancer does: it takes the gateways in turn, and the other one if a connection is refused or answered 503 by a gateway
that shuts down. The tiny model's choices are clear, so text is compared exactly.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.cluster import Cluster
from tests.openai_streams import joined

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "Write a short story about a brave little fox who wanted to learn mathematics, the moon, the stars, the sea"
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.6, "seed": 11}
NUM_CLIENTS = 6
LIMIT_S = 240.0
Request = tuple[str, dict[str, Any]]


def completion(**body: Any) -> Request:
    return COMPLETIONS, {"prompt": TEXT, "stream": True, "ignore_eos": True, **body}


def chat(**body: Any) -> Request:
    messages = [{"role": "user", "content": TEXT}]
    return CHAT, {"messages": messages, "stream": True, "ignore_eos": True, **body}


REQUESTS = (
    completion(**GREEDY, max_tokens=150),
    completion(**SEEDED, max_tokens=90, n=2),
    completion(**GREEDY, max_tokens=40, prompt=[5, 6, 7] * 20),
    chat(**SEEDED, max_tokens=150),
    chat(**GREEDY, max_tokens=60, logprobs=True, top_logprobs=2),
)


@dataclass
class Load:
    """A steady load of streams.

    Attributes:
        expected: the undisturbed answer of each request.
        num_answers: answers that came, all of them right.
        num_open: streams of which some text came already.
        num_turned_away: connections that were refused, or answered by a gateway that shuts down.
    """

    clients: list[httpx.AsyncClient]
    expected: list[Any] = field(default_factory=list)
    num_answers: int = 0
    num_open: int = 0
    num_turned_away: int = 0
    is_over: bool = False
    turns: Iterator[int] = field(default_factory=itertools.count)

    async def keep_asking(self, number: int) -> None:
        """Send one request after the other, from the given one on, until the load is over."""
        while not self.is_over:
            index = number % len(REQUESTS)
            answer = await self.answer_to(*REQUESTS[index])
            assert answer == self.expected[index], f"request {index}, after {self.num_answers} right answers"
            self.num_answers += 1
            number += 1

    async def answer_to(self, path: str, body: dict[str, Any]) -> Any:
        """What a request generates, through whatever gateway takes it."""
        while True:
            client = self.clients[next(self.turns) % len(self.clients)]
            try:
                if (text := await self._text_of(client, path, body)) is not None:
                    return comparable(joined(text))
            except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
                pass  # refused, if need be by a socket that is being closed
            self.num_turned_away += 1
            await asyncio.sleep(0.02)

    async def _text_of(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str | None:
        """A stream's text; None if the gateway shuts down and takes nothing."""
        parts: list[str] = []
        try:
            async with client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    error = (await response.aread()).decode()
                    assert response.status_code == 503, error
                    assert "shutting_down" in error
                    return None
                async for part in response.aiter_text():
                    self.num_open += not parts
                    parts.append(part)
        except httpx.HTTPError as error:
            if parts:
                raise AssertionError(f"a stream was cut: {error!r}") from error
            raise
        finally:
            self.num_open -= bool(parts)
        return "".join(parts)


def comparable(answer: dict[str, Any]) -> Any:
    """What does not depend on the batch."""
    texts = {index: (choice["text"], choice["ends"]) for index, choice in answer["choices"].items()}
    return texts, answer["error"], answer["is_done"]


async def restart(cluster: Cluster, stage: str) -> None:
    """Tell a stage to stop, as `kubectl rollout restart` does, and wait until all is as before."""
    before = cluster.num_starts(stage)
    cluster.kill(stage, signal.SIGTERM)
    async with asyncio.timeout(LIMIT_S):
        while cluster.num_starts(stage) == before:
            await asyncio.sleep(0.02)
    await asyncio.to_thread(cluster.wait_until_ready)


def test_every_stage_in_turn_is_restarted_under_load_and_no_request_fails() -> None:
    async def scenario() -> None:
        settings = {"executor": {"kv_cache_bytes": "16MiB"}}
        async with Cluster(num_tokenizers=2, num_gateways=2, settings=settings) as cluster:
            load = Load([cluster.async_client(number) for number in range(2)])
            load.expected = [await load.answer_to(*request) for request in REQUESTS]
            asking = [asyncio.create_task(load.keep_asking(number)) for number in range(NUM_CLIENTS)]
            for stage in reversed(cluster.names):
                while load.num_open < NUM_CLIENTS // 2 and not any(task.done() for task in asking):
                    await asyncio.sleep(0.01)
                num_answers = load.num_answers
                await restart(cluster, stage)
                while load.num_answers < num_answers + NUM_CLIENTS and not any(task.done() for task in asking):
                    await asyncio.sleep(0.01)
            load.is_over = True
            await asyncio.gather(*asking)
            for stage in cluster.names:
                assert cluster.exit_codes(stage) == [0], stage
                assert "Traceback" not in cluster.log(stage), stage
            assert load.num_turned_away > 0, "a gateway that drains takes nothing new"

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
