"""Resumable streams whose connections are cut all the time while stages are killed: `python -m tests.faults.returning`.

Each stream is read from a gateway chosen by chance, cut behind a number of bytes chosen by chance, and taken up again,
until it is whole; it must be the undisturbed one. Error events and refusals are counted, and the client comes back.
Exit code 1 if a stream is lost or wrong, or the engine holds anything at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx

from tests.cluster import Cluster
from tests.cut_streams import Event, events_in, told

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "Write a short story about a brave little fox who wanted to learn mathematics, the moon, the stars 漢字"
STREAM_LIMIT_S = 120.0
MAX_BYTES = 4500
_COMMON: dict[str, Any] = {
    "ignore_eos": True,
    "stream": True,
    "resumable": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
}
_CHAT: dict[str, Any] = {**_COMMON, "messages": [{"role": "user", "content": TEXT}]}
_SEEDED: dict[str, Any] = {"temperature": 0.7, "seed": 3, "n": 2}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {**_CHAT, "temperature": 0, "max_tokens": 200}),
    (CHAT, {**_CHAT, **_SEEDED, "max_tokens": 150, "logprobs": True, "top_logprobs": 1}),
    (COMPLETIONS, {**_COMMON, **_SEEDED, "prompt": [TEXT, "Käse"], "max_tokens": 100}),
    (COMPLETIONS, {**_COMMON, "prompt": TEXT, "temperature": 0, "max_tokens": 250}),
)


def comparable(events: list[Event]) -> dict[str, Any]:
    """What events tell, without what differs from request to request, by rounding or after an engine's death."""
    answer = told(events)
    del answer["heads"]
    answer["usage"] = answer["usage"] and answer["usage"]["completion_tokens"]
    for choice in answer["choices"].values():
        choice["logprobs"] = [entry["token"] for entry in choice["logprobs"]]
    return answer


async def part_of(client: httpx.AsyncClient, number: int, last: Event | None, counts: Counter[str]) -> list[Event]:
    """The complete events of a stream, or of its rest, up to a cut."""
    path, body = CASES[number]
    headers = {} if last is None or last.id is None else {"last-event-id": last.id}
    limit, found = random.randrange(300, MAX_BYTES), b""
    try:
        async with client.stream("POST", path, json=body, headers=headers) as response:
            if response.status_code != 200:
                counts[f"refused {response.status_code}"] += 1
                await asyncio.sleep(0.3)
                return []
            async for part in response.aiter_raw():
                found += part
                if len(found) >= limit:
                    break
    except httpx.TransportError:
        await asyncio.sleep(0.1)
    counts["cuts"] += 1
    events = events_in(found[:limit])
    for event in events:
        if event.id is None:
            counts[f"error {event.chunk['error']['code']}"] += 1
    return [event for event in events if event.id is not None]


async def run_one(
    clients: list[httpx.AsyncClient], number: int, expected: dict[str, Any], counts: Counter[str]
) -> None:
    """One stream from its begin to its end."""
    events: list[Event] = []
    began_s = time.monotonic()
    while not events or events[-1].data != "[DONE]":
        if time.monotonic() - began_s > STREAM_LIMIT_S:
            counts["lost"] += 1
            return
        events += await part_of(random.choice(clients), number, events[-1] if events else None, counts)
    counts["done" if comparable(events) == expected else "wrong"] += 1


async def run(cluster: Cluster, seconds: float, num_streams: int, stages: list[str]) -> bool:
    """Streams and kills for a time. Returns: all is well."""
    clients = [cluster.async_client(number) for number in range(len(cluster.gateways))]
    whole = [await clients[0].post(path, json=body) for path, body in CASES]
    expected = [comparable(events_in(response.content)) for response in whole]
    counts, end_s = Counter[str](), time.monotonic() + seconds

    async def read() -> None:
        while time.monotonic() < end_s:
            number = random.randrange(len(CASES))
            await run_one(clients, number, expected[number], counts)

    async def kill() -> None:
        while stages and time.monotonic() < end_s - 5:
            await asyncio.sleep(random.uniform(3, 6))
            await asyncio.to_thread(cluster.kill, stage := random.choice(stages))
            counts[f"killed {stage}"] += 1

    await asyncio.gather(kill(), *(read() for _ in range(num_streams)))
    await asyncio.to_thread(cluster.wait_until_ready)
    metrics = await asyncio.to_thread(cluster.metrics, "scheduler")
    names = ("tokenloom_num_requests_running", "tokenloom_num_requests_waiting", "tokenloom_kv_cache_usage_perc")
    held = {name: metrics[name] for name in names if metrics[name]}
    line = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
    sys.stdout.write(f"{line}; held: {held or 'nothing'}\n")
    for client in clients:
        await client.aclose()
    return bool(counts["done"]) and not counts["lost"] and not counts["wrong"] and not held


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--kill", default="gateway-0,gateway-1,tokenizer-0,tokenizer-1,scheduler,executor")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random.seed(options.seed)
    with Cluster(num_tokenizers=2, num_gateways=2) as cluster:
        stages = list(filter(None, options.kill.split(",")))
        return 0 if asyncio.run(run(cluster, options.seconds, options.streams, stages)) else 1


if __name__ == "__main__":
    sys.exit(main())
