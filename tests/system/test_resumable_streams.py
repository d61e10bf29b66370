"""Resumable streams through all stages: whoever was cut off gets exactly the rest, at another gateway.

The tiny model's choices are clear, so text is compared exactly, though its kernels depend on the batch a little.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.cut_streams import Event, events_in, told
from tests.resuming_http_client import stream
from tests.system.in_process import Stages, StagesOfModule, running_stages, stages_of_module, total
from tests.system.stack import free_port
from tokenloom.common.config import ProcessSettings
from tokenloom.gateway.config import GatewayConfig
from tokenloom.gateway.server import GatewayStage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "Write a short story about a brave little fox who wanted to learn mathematics, the moon, the stars, the sea 漢字"
MESSAGES = [{"role": "user", "content": TEXT}]
USAGE = {"stream_options": {"include_usage": True}}
KEYS = ("key-a", "key-b")
ENDLESS: dict[str, Any] = {"ignore_eos": True, "stream": True, "resumable": True}
Case = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """Stages with two gateways."""

    stages: StagesOfModule
    clients: tuple[httpx.AsyncClient, httpx.AsyncClient]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("stages")
    opened: list[Any] = []

    async def add_gateway(stages: Stages) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
        config = GatewayConfig(
            ProcessSettings(), listen="127.0.0.1:0", tokenizer=(f"unix:{folder}/tokenizer",), api_key=KEYS
        )
        gateway = GatewayStage(config)
        await gateway.start()
        other = httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=60, verify=False)
        while (await other.get("/ready")).status_code != 200:
            await asyncio.sleep(0.02)
        for client in (stages.client, other):
            client.headers["authorization"] = f"Bearer {KEYS[0]}"
        opened.extend((gateway, other))
        return stages.client, other

    async def end_gateway(_: Stages) -> None:
        await opened[1].aclose()
        await opened[0].stop()

    with stages_of_module(folder, tokenizer={"api_key": KEYS}, gateway={"api_key": KEYS}) as stages:
        yield Pair(stages, stages.run(add_gateway))
        stages.run(end_gateway)


async def events_of(client: httpx.AsyncClient, case: Case, last: Event | None = None, key: str = "") -> list[Event]:
    """A stream, or the rest of one."""
    path, body = case
    response = await client.post(path, json=body, headers=_headers(last, key))
    assert response.status_code in (200, 204), response.text
    return events_in(response.content)


async def start_of(client: httpx.AsyncClient, case: Case, last: Event | None, num_bytes: int) -> list[Event]:
    """A stream, or the rest of one, that is cut behind so many bytes."""
    path, body = case
    found = b""
    async with client.stream("POST", path, json=body, headers=_headers(last)) as response:
        assert response.status_code == 200
        async for part in response.aiter_raw():
            found += part
            if len(found) >= num_bytes:
                break
    return events_in(found[:num_bytes])


def _headers(last: Event | None, key: str = "") -> dict[str, str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if last is not None:
        assert last.id is not None
        headers["last-event-id"] = last.id
    return headers


async def cases(client: httpx.AsyncClient) -> list[Case]:
    """What a resumable stream can carry, some with an end that sets text free or cuts it."""
    greedy: Case = (COMPLETIONS, {**ENDLESS, "prompt": TEXT, "temperature": 0, "max_tokens": 60})
    text = told(await events_of(client, greedy))["choices"][0]["text"]
    at = next(i for i in range(len(text) * 2 // 3, len(text)) if text.find(text[i : i + 6]) == i)
    stop, seeded = [text[at : at + 6], text[-3:] + "never"], {"temperature": 0.7, "seed": 11}
    details = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    return [
        (COMPLETIONS, {**greedy[1], **USAGE, "stop": [stop[1]]}),
        (COMPLETIONS, {**greedy[1], "stop": stop, "include_stop_str_in_output": True}),
        (
            COMPLETIONS,
            {
                **ENDLESS,
                **USAGE,
                **seeded,
                "prompt": [TEXT, "Käse 漢"],
                "n": 2,
                "max_tokens": 14,
                "return_token_ids": True,
            },
        ),
        (CHAT, {**ENDLESS, **USAGE, **seeded, **details, "messages": MESSAGES, "n": 2, "max_tokens": 14}),
        (CHAT, {**ENDLESS, "messages": MESSAGES, "temperature": 1.0, "max_tokens": 30}),  # no seed: that of the id
        (CHAT, {**ENDLESS, **USAGE, "messages": MESSAGES, "temperature": 0, "max_tokens": 30, "ignore_eos": False}),
    ]


def test_streams_cut_behind_every_event_go_on_at_the_other_gateway_and_nothing_is_computed_again(pair: Pair) -> None:
    async def test(stages: Stages) -> None:
        for case in await cases(stages.client):
            events = await events_of(pair.clients[0], case)
            whole = told(events)
            assert whole["is_done"]
            before = total(await stages.metrics(), "tokenloom_computed_tokens_total")
            for number, event in enumerate(events, 1):
                rest = await events_of(pair.clients[number % 2], case, event)
                assert told([*events[:number], *rest]) == whole, event.id
            assert total(await stages.metrics(), "tokenloom_computed_tokens_total") == before

    pair.stages.run(test)


def test_streams_cut_anywhere_while_they_run_are_those_that_nobody_cut(pair: Pair) -> None:
    """Inside events, too, and again and again; each time at the other gateway."""
    chance = random.Random(5)

    async def cut_up(case: Case, number: int) -> dict[str, Any]:
        events: list[Event] = []
        for turn in range(300):
            last = events[-1] if events else None
            events += await start_of(pair.clients[(number + turn) % 2], case, last, chance.randrange(200, 5000))
            if events and events[-1].data == "[DONE]":
                return comparable(told(events))
        raise AssertionError("it did not end")

    async def test(stages: Stages) -> None:
        with_seed = [case for case in await cases(stages.client) if case[1]["temperature"] != 1.0]
        long = [(path, {**body, "max_tokens": body["max_tokens"] * 3}) for path, body in with_seed]
        await asyncio.gather(*(events_of(stages.client, case) for case in long))  # then all prompts are cached
        expected = [comparable(told(await events_of(stages.client, case))) for case in long]
        found = await asyncio.gather(*(cut_up(case, i) for i, case in enumerate(long)))
        for one, other in zip(found, expected, strict=True):
            assert one == other
        await until_idle(stages)

    pair.stages.run(test)


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from request to request, or by rounding in another batch."""
    del answer["heads"]
    for choice in answer["choices"].values():
        choice["logprobs"] = [entry["token"] for entry in choice["logprobs"]]
    return answer


async def until_idle(stages: Stages) -> None:
    async with asyncio.timeout(20):
        while True:
            metrics = await stages.metrics()
            names = (
                "tokenloom_num_requests_running",
                "tokenloom_num_requests_waiting",
                "tokenloom_kv_cache_usage_perc",
            )
            if not any(metrics[name] for name in names):
                return
            await asyncio.sleep(0.05)


def test_another_keys_client_reads_nothing_with_an_id_and_disturbs_nobody(pair: Pair) -> None:
    """It gets what its own request gives, which is computed for it."""

    async def test(stages: Stages) -> None:
        case: Case = (CHAT, {**ENDLESS, "messages": MESSAGES, "temperature": 0, "max_tokens": 80})
        events = await start_of(pair.clients[0], case, None, 2000)
        before = await stages.metrics()
        own: Case = (CHAT, {**case[1], "messages": [{"role": "user", "content": "Other"}], "max_tokens": 60})
        thief = events[-1]
        stolen = await events_of(pair.clients[1], own, thief, KEYS[1])
        answer = told(await events_of(pair.clients[1], own, key=KEYS[1]))["choices"][0]["text"]
        assert answer.endswith(told(stolen)["choices"][0]["text"])
        same = await events_of(pair.clients[1], case, thief, KEYS[1])  # who knows the prompt may compute it, too
        after = await stages.metrics()
        computed = "tokenloom_computed_tokens_total"
        assert total(after, computed) - total(before, computed) > 60 + 60 + 80
        rest = await events_of(pair.clients[1], case, thief)
        assert told([*events, *rest]) == told([*events, *same])
        await until_idle(stages)

    pair.stages.run(test)


def test_openais_client_takes_a_resumable_stream_as_any_other(pair: Pair) -> None:
    async def test(stages: Stages) -> None:
        asked: dict[str, Any] = {"model": "", "messages": MESSAGES, "temperature": 0, "max_tokens": 20, "stream": True}
        url = f"{stages.client.base_url}/v1"
        async with AsyncOpenAI(base_url=url, api_key=KEYS[0]) as client:
            texts = []
            for extra in ({}, {"resumable": True}):
                stream = await client.chat.completions.create(**asked, extra_body=extra)
                texts.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
            assert texts[0] == texts[1] != ""

    pair.stages.run(test)


def test_a_client_that_never_comes_back_is_waited_for_and_then_all_is_as_before(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async def scenario() -> None:
        async with running_stages(tmp_path_factory.mktemp("stages"), resumable_s=1.0) as stages:
            before = await stages.metrics()
            case: Case = (CHAT, {**ENDLESS, "messages": MESSAGES, "n": 3, "max_tokens": 900})
            events = await start_of(stages.client, case, None, 1000)
            assert events
            metrics = await stages.metrics()
            while metrics['tokenloom_gateway_requests_in_flight{route="/v1/chat/completions"}']:
                metrics = await stages.metrics()
            assert metrics["tokenloom_num_requests_running"] == 3, "it is waited for"
            await until_idle(stages)
            short = await events_of(stages.client, (CHAT, {**case[1], "max_tokens": 4}))
            assert told(short)["is_done"]
            assert (await stages.metrics())["tokenloom_num_finished_requests_kept"] == 3
            async with asyncio.timeout(10):
                while (await stages.metrics())["tokenloom_num_finished_requests_kept"]:
                    await asyncio.sleep(0.05)
            await until_idle(stages)
            after = await stages.metrics()
            assert after["tokenloom_finished_requests_kept_bytes"] == 0
            aborted = 'tokenloom_request_success_total{finished_reason="aborted"}'
            assert after[aborted] - before.get(aborted, 0) == 3

    asyncio.run(asyncio.wait_for(scenario(), 60))


@asynccontextmanager
async def process_of(stage: str, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A stage as a process that can be killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"tokenloom.{stage}", *flags, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_ready(url: str, num_tokenizers: int) -> None:
    """The gateway is there and has sessions with its tokenizers."""
    async with httpx.AsyncClient(base_url=url, verify=False) as client, asyncio.timeout(60):
        while True:
            with contextlib.suppress(httpx.TransportError):
                sessions = re.findall(r"tokenizer_session{.*} 1.0", (await client.get("/metrics")).text)
                if (await client.get("/ready")).status_code == 200 and len(sessions) >= num_tokenizers:
                    return
            await asyncio.sleep(0.05)


def test_the_example_client_goes_on_when_its_gateway_and_then_a_tokenizer_is_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("stages")
    mortal, lasting = (f"unix:{folder}/{name}" for name in ("mortal", "tokenizer"))
    sampling: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.7, "seed": 12, "n": 2}]
    bodies = [
        {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 160, "return_token_ids": True, **USAGE, **one}
        for one in (*sampling, *sampling)
    ]

    async def kill_both(stages: Stages, gateway: Any, tokenizer: Any, urls: list[str]) -> None:
        found: list[list[dict[str, Any]]] = [[] for _ in bodies]

        def read(number: int, urls: list[str], into: list[dict[str, Any]]) -> None:
            with httpx.Client(timeout=60, verify=False) as client:
                for chunk in stream(client, urls, bodies[number]):
                    into.append(chunk)  # seen by others as they come

        async def wait_for(num_chunks: int) -> None:
            async with asyncio.timeout(60):
                while any(len(chunks) < num_chunks for chunks in found):
                    await asyncio.sleep(0.005)

        expected: list[list[dict[str, Any]]] = [[], []]
        for number in (0, 1):
            await asyncio.to_thread(read, number, urls[1:], expected[number])
        readers = [asyncio.to_thread(read, number, urls, found[number]) for number in range(len(bodies))]
        reading = asyncio.gather(*readers)
        await wait_for(10)
        gateway.kill()
        await wait_for(40)
        tokenizer.kill()
        await reading
        for number, chunks in enumerate(found):
            assert whole(chunks) == whole(expected[number % 2])
            assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
        assert (await stages.metrics())["tokenloom_gateway_resubmissions_total"] > 0
        await until_idle(stages)

    async def scenario() -> None:
        dying = f"http://127.0.0.1:{free_port()}"
        tokenizers = f"--tokenizer={mortal},{lasting}"
        async with (
            running_stages(folder, gateway={"tokenizer": (mortal, lasting)}) as stages,
            process_of("gateway", f"--listen={dying.removeprefix('http://')}", tokenizers) as gateway,
            process_of(
                "tokenizer",
                f"--model={folder / 'tiny-llama'}",
                f"--listen={mortal}",
                f"--scheduler=unix:{folder}/scheduler",
            ) as tokenizer,
        ):
            urls = [dying, str(stages.client.base_url).rstrip("/")]
            for url in urls:
                await until_ready(url, num_tokenizers=2)
            await kill_both(stages, gateway, tokenizer, [url + CHAT for url in urls])

    asyncio.run(asyncio.wait_for(scenario(), 100))


def whole(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What chunks tell together, however they were cut."""
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    others: list[Any] = []
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
            if "role" in choice["delta"] or choice["finish_reason"]:
                others.append((choice["index"], choice["delta"].get("role"), choice["finish_reason"]))
    usage = chunks[-1]["usage"]
    return {"texts": texts, "ids": ids, "others": sorted(others, key=str), "tokens": usage["completion_tokens"]}
