"""The closed loop: who sends what, and when it ends."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator

from loadtest.client import Client, Outcome
from loadtest.settings import Settings

# Common English words, most of them one token in every vocabulary.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air teacher
force education
"""
WORDS = _TEXT.split()


def make_prompt(settings: Settings, number: int) -> str:
    """Prompt `number`: the same for the same seed, and unlike every other behind the shared prefix."""
    shared = random.Random(f"{settings.seed}/shared").choices(WORDS, k=settings.shared_prefix_tokens)
    own = random.Random(f"{settings.seed}/{number}").choices(
        WORDS, k=settings.prompt_tokens - settings.shared_prefix_tokens
    )
    return " ".join([*shared, *own])


async def run(settings: Settings) -> tuple[list[Outcome], float]:
    """Warm up, then measure.

    Returns: the outcomes of the measured requests, and the seconds they took together. Requests that the time limit
        left unfinished or unsent are outcomes with the error `time limit`.
    """
    numbers = itertools.count()
    clients = [Client(settings) for _ in range(settings.clients)]
    outcomes: list[Outcome] = []
    started_s = time.perf_counter()
    try:
        async with asyncio.timeout(settings.time_limit_s):
            await _send_all(settings, clients, numbers, settings.warmup, [])
            started_s = time.perf_counter()
            await _send_all(settings, clients, numbers, settings.requests, outcomes)
    except TimeoutError:
        pass
    finally:
        for client in clients:
            client.close()
    duration_s = time.perf_counter() - started_s
    missing = settings.requests - len(outcomes)
    return outcomes + [Outcome(started_s, error="time limit") for _ in range(missing)], duration_s


async def _send_all(
    settings: Settings, clients: list[Client], numbers: Iterator[int], num_requests: int, outcomes: list[Outcome]
) -> None:
    """Send `num_requests` requests, one per client at a time."""
    tickets = iter(range(num_requests))

    async def loop(client: Client) -> None:
        for _ in tickets:
            outcomes.append(await client.complete(make_prompt(settings, next(numbers))))

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(loop(client))
