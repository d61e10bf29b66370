"""The same questions put to a whole running stack, through its gateway."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence

from loadtest.client import Client, Outcome
from loadtest.report import percentile
from loadtest.run import make_prompt
from loadtest.settings import Settings, parse_settings

_RETRY_S = 0.25
_OVERLOAD = 10
_TICK_S = 0.01
_REFUSED = "http 429"


def http_settings(url: str, api_key: str, prompt_tokens: int, output_tokens: int) -> Settings:
    """Settings of one kind of client; ends the program with exit code 2 if the URL is not this machine's."""
    return parse_settings(
        [
            *("--url", url, "--api-key", api_key, "--timeout-s", "120"),
            *("--prompt-tokens", str(prompt_tokens), "--output-tokens", str(output_tokens)),
        ]
    )


class Crowd:
    """Clients that send one request after the other until they are told to stop.

    Args:
        settings: of each.
        name: makes the prompts unlike those of another crowd.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._numbers = itertools.count(random.Random(name).randrange(1 << 40))
        self._tasks: list[asyncio.Task[None]] = []
        self.outcomes: list[Outcome] = []

    def start(self, num_clients: int) -> None:
        """Let so many clients begin."""
        self._tasks += [asyncio.create_task(self._loop()) for _ in range(num_clients)]

    async def once(self) -> Outcome:
        """One request of a client of its own."""
        client = Client(self._settings)
        try:
            outcome = await client.complete(make_prompt(self._settings, next(self._numbers)))
        finally:
            client.close()
        self.outcomes.append(outcome)
        return outcome

    async def arrive(self, rate_per_s: float, duration_s: float) -> None:
        """Let requests come at a fixed rate, each from a client of its own; returns when the time is over."""
        started_s = time.monotonic()
        while (passed_s := time.monotonic() - started_s) < duration_s:
            while len(self._tasks) < rate_per_s * passed_s:
                self._tasks.append(asyncio.create_task(self._single()))
            await asyncio.sleep(_TICK_S)

    async def stop(self) -> None:
        """Hang up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _single(self) -> None:
        await self.once()

    async def _loop(self) -> None:
        client = Client(self._settings)
        try:
            while True:
                outcome = await client.complete(make_prompt(self._settings, next(self._numbers)))
                self.outcomes.append(outcome)
                if outcome.error:
                    await asyncio.sleep(_RETRY_S)
        finally:
            client.close()


async def measure_refusals(settings: Settings, num_clients: int, duration_s: float) -> dict[str, object]:
    """Time from a request to its 429 at ten times overload.

    First `num_clients` clients, as many as the stack takes, show in a third of the time what it can serve; they go on,
    and for the rest of the time requests come beside them at ten times that rate, whatever becomes of them.
    """
    crowd, others = Crowd(settings, "steady"), Crowd(settings, "overload")
    crowd.start(num_clients)
    await asyncio.sleep(duration_s / 3)
    rate = max(1, sum(not outcome.error for outcome in crowd.outcomes)) / (duration_s / 3)
    await others.arrive(_OVERLOAD * rate, duration_s * 2 / 3)
    await crowd.stop()
    await others.stop()
    outcomes = crowd.outcomes + others.outcomes
    refused = [o.ended_s - o.started_s for o in outcomes if o.error.startswith(_REFUSED)]
    return {
        "served_per_s": rate,
        "offered_per_s": _OVERLOAD * rate,
        "num_refused": len(refused),
        "refusal_ms_p50": 1e3 * percentile(refused, 50) if refused else None,
        "refusal_ms_p99": 1e3 * percentile(refused, 99) if refused else None,
        "other_errors": sorted({o.error for o in outcomes if o.error and not o.error.startswith(_REFUSED)}),
    }


async def measure_tenants(
    flood: Settings, light: Settings, num_flood: int, every_s: float, duration_s: float
) -> dict[str, object]:
    """The light tenant's time to first token, first alone, then beside a flood; half of the time each.

    Returns: also `flood_gap_ms_p95`, between two chunks of a flooding stream, which is what a step takes as seen from
        here, and `bound_ms`: p95 alone and three times that.
    """
    alone = await _light_ttft_s(light, "alone", every_s, duration_s / 2)
    crowd = Crowd(flood, "flood")
    crowd.start(num_flood)
    await asyncio.sleep(min(2.0, duration_s / 10))
    beside = await _light_ttft_s(light, "beside", every_s, duration_s / 2)
    await crowd.stop()
    gaps = [gap for outcome in crowd.outcomes for gap in outcome.gaps_s]
    result: dict[str, object] = {
        "light_ttft_alone_ms_p50": _ms(alone, 50),
        "light_ttft_alone_ms_p95": _ms(alone, 95),
        "light_ttft_beside_ms_p50": _ms(beside, 50),
        "light_ttft_beside_ms_p95": _ms(beside, 95),
        "flood_gap_ms_p95": _ms(gaps, 95),
        "num_light_failed": sum(not seconds for seconds in (*alone, *beside)),
        "num_flood_requests": len(crowd.outcomes),
    }
    known = [seconds for seconds in alone if seconds]
    result["bound_ms"] = 1e3 * (percentile(known, 95) + 3 * percentile(gaps, 95)) if known and gaps else None
    return result


async def _light_ttft_s(settings: Settings, name: str, every_s: float, duration_s: float) -> list[float]:
    """Time to first token of requests that come every `every_s`; 0 for those that failed."""
    crowd = Crowd(settings, name)
    tasks = []
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        tasks.append(asyncio.create_task(crowd.once()))
        await asyncio.sleep(every_s)
    outcomes = await asyncio.gather(*tasks)
    return [0.0 if outcome.error else outcome.first_chunk_s for outcome in outcomes]


def _ms(seconds: Sequence[float], percent: float) -> float | None:
    known = [value for value in seconds if value]
    return 1e3 * percentile(known, percent) if known else None
