"""Requests at a steady rate, some of which their clients give up, and what became of them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_WORDS = "fox moon river story number token block step queue cache prefix weather mountain sea list value".split()  # noqa: SIM905
_COMPLETIONS = "/v1/completions"
MAX_IN_FLIGHT = 1000  # fewer than the scheduler lets wait


@dataclass
class Tally:
    """What became of the requests so far."""

    num_done: int = 0
    num_aborted: int = 0
    num_tokens: int = 0
    num_late: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())


class SteadyLoad:
    """Streams and whole answers, greedy and seeded, of 8 to 64 tokens.

    Args:
        clients: of the gateways, used in turn.
        abort_share: of the streams, closed by the client somewhere in the middle.
        seed: of prompts, lengths and aborts.
    """

    def __init__(self, clients: Sequence[httpx.AsyncClient], *, abort_share: float, seed: int) -> None:
        self.tally = Tally()
        self._clients = clients
        self._abort_share = abort_share
        self._noise = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._tasks)

    async def capacity(self, num_clients: int, seconds: float) -> float:
        """Requests per second that a closed loop of so many clients gets through."""
        end_s = time.monotonic() + seconds

        async def one_after_the_other() -> None:
            while time.monotonic() < end_s:
                await self._request(aborts=False)

        num_before, began_s = self.tally.num_done, time.monotonic()
        await asyncio.gather(*(one_after_the_other() for _ in range(num_clients)))
        return (self.tally.num_done - num_before) / (time.monotonic() - began_s)

    async def offer(self, per_s: float, seconds: float) -> None:
        """Send so many requests per second, evenly, whatever becomes of them; returns after so many seconds."""
        began_s = time.monotonic()
        for number in range(int(per_s * seconds)):
            await asyncio.sleep(max(0.0, began_s + number / per_s - time.monotonic()))
            if len(self._tasks) >= MAX_IN_FLIGHT:
                self.tally.num_late += 1  # left out: the stack is too far behind
                continue
            aborts = self._noise.random() < self._abort_share
            task = asyncio.create_task(self._request(aborts=aborts))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.sleep(max(0.0, began_s + seconds - time.monotonic()))

    async def finish(self, limit_s: float) -> None:
        """Wait for the answers that are still to come; those that do not come are failures."""
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=limit_s)
            for task in pending:
                task.cancel()
                self.tally.failures["no answer at the end"] += 1

    async def _request(self, *, aborts: bool) -> None:
        body, client = self._next()
        try:
            num_tokens = await (self._stream(client, body, aborts) if body["stream"] else self._whole(client, body))
        except httpx.HTTPError as error:
            self.tally.failures[f"{type(error).__name__}: {error}"[:200]] += 1
        except RequestFailed as failure:
            self.tally.failures[str(failure)[:200]] += 1
        else:
            if num_tokens is None:
                self.tally.num_aborted += 1
                return
            self.tally.num_done += 1
            self.tally.num_tokens += num_tokens
            if num_tokens != body["max_tokens"]:
                self.tally.failures[f"{num_tokens} tokens instead of {body['max_tokens']}"] += 1

    def _next(self) -> tuple[dict[str, Any], httpx.AsyncClient]:
        noise, self._number = self._noise, self._number + 1
        prompt = " ".join([str(self._number), *noise.choices(_WORDS, k=noise.randint(4, 60))])
        sampling = {"temperature": 0} if noise.random() < 0.5 else {"temperature": 0.8, "seed": self._number}
        is_stream = noise.random() < 0.8
        body = {
            "prompt": prompt,
            "max_tokens": noise.randint(8, 64),
            "ignore_eos": True,
            "stream": is_stream,
            **sampling,
        }
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        return body, self._clients[self._number % len(self._clients)]

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> int:
        response = await client.post(_COMPLETIONS, json=body)
        if response.status_code != 200:
            raise RequestFailed(f"HTTP {response.status_code}: {response.text}")
        num_tokens: int = response.json()["usage"]["completion_tokens"]
        return num_tokens

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any], aborts: bool) -> int | None:
        """The number of tokens; None if the client gave up."""
        num_left = self._noise.randint(0, body["max_tokens"] // 2) if aborts else -1
        usage: dict[str, int] | None = None
        async with client.stream("POST", _COMPLETIONS, json=body) as response:
            if response.status_code != 200:
                raise RequestFailed(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}")
            async for line in response.aiter_lines():
                if num_left == 0:
                    return None
                num_left -= 1
                if '"error"' in line:
                    raise RequestFailed(line)
                if '"usage":{' in line:
                    usage = json.loads(line.removeprefix("data: "))["usage"]
        if usage is None:
            raise RequestFailed("the stream ended without usage")
        return usage["completion_tokens"]


class RequestFailed(Exception):
    """A request that did not end well."""
