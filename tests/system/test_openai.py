"""The running stack, used with the official openai client."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest

from tests.system.stack import Stack

MODEL = "SmolLM2-135M-Instruct"
CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_streamed_chat_names_the_capital_of_france(stack: Stack) -> None:
    chunks = list(
        stack.client().chat.completions.create(
            model=MODEL, messages=CAPITAL, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 3
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    whole = stack.client().chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0)
    assert whole.choices[0].message.content == text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_stop_strings_length_and_logprobs_hold_on_a_real_model(stack: Stack) -> None:
    client = stack.client()
    free = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=24, temperature=0)
    text = free.choices[0].text
    assert free.choices[0].finish_reason == "length"
    assert free.usage is not None
    assert free.usage.completion_tokens == 24
    stop = text[7:13]
    stopped = client.completions.create(
        model=MODEL, prompt="One, two, three,", max_tokens=24, temperature=0, stop=stop, stream=True
    )
    pieces = [chunk.choices[0] for chunk in stopped]
    assert "".join(piece.text for piece in pieces) == text[: text.find(stop)]
    assert pieces[-1].finish_reason == "stop"
    chat = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.token == token.top_logprobs[0].token, "greedy takes the most likely token"
    assert "".join(token.token for token in logprobs.content) == chat.choices[0].message.content


def test_choices_are_numbered_seeded_and_equal_streamed_or_not(stack: Stack) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "temperature": 1,
        "seed": 5,
        "n": 3,
        "max_tokens": 20,
    }
    whole = stack.client().chat.completions.create(**options)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert set(texts) == {0, 1, 2}
    assert len(set(texts.values())) == 3
    streamed = dict.fromkeys(texts, "")
    for chunk in stack.client().chat.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_a_prompt_over_the_context_is_refused_with_both_numbers(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        stack.client().completions.create(model=MODEL, prompt=[5] * 9000, max_tokens=4)
    assert "9000" in str(caught.value)
    assert "8192" in str(caught.value)


BAD_BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, "prompt"),
    ("/v1/completions", {"prompt": [49152]}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/completions", {"prompt": [2**63]}, "prompt"),
    ("/v1/completions", {"prompt": [1.5]}, "prompt"),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, "temperature"),
    ("/v1/completions", {"prompt": "x", "top_p": 1.0001}, "top_p"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "n": 10**18}, "n"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": CAPITAL, "n": 0}, "n"),
    ("/v1/chat/completions", {"messages": CAPITAL, "top_logprobs": 30, "logprobs": True}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": CAPITAL, "seed": "x"}, "seed"),
]


def test_bad_input_is_named_and_the_streams_beside_it_run_on_undisturbed(stack: Stack) -> None:
    async def stream(client: openai.AsyncOpenAI, prompt: str) -> str:
        chunks = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def test() -> None:
        async with stack.async_client() as client, httpx.AsyncClient(base_url=stack.url, timeout=30) as http:
            prompts = ["The river", "The moon", "A fox"]
            alone = [await stream(client, prompt) for prompt in prompts]
            beside = [asyncio.create_task(stream(client, prompt)) for prompt in prompts]
            for path, body, field in BAD_BODIES:
                response = await http.post(path, json={"model": MODEL, **body})
                assert response.status_code == 400, (body, response.text)
                error = response.json()["error"]
                assert str(error["param"]).split(".")[0].split("[")[0] == field, (body, error)
                assert error["message"]
            ignored = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "no_such_field": 1})
            assert ignored.status_code == 200
            big = await http.post("/v1/completions", content=b'{"prompt": "' + b"x" * (17 << 20) + b'"}')
            assert big.status_code == 413
            assert [await task for task in beside] == alone

    asyncio.run(test())


def test_32_streams_at_once_say_what_each_says_alone(stack: Stack) -> None:
    async def stream(client: openai.AsyncOpenAI, prompt: str) -> str:
        chunks = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def test() -> None:
        prompts = [f"Number {i} is followed by" for i in range(32)]
        async with stack.async_client() as client:
            alone = [await stream(client, prompt) for prompt in prompts]
            together = await asyncio.gather(*(stream(client, prompt) for prompt in prompts))
        differing = [i for i in range(32) if alone[i] != together[i]]
        assert not differing, [(alone[i], together[i]) for i in differing]

    asyncio.run(test())


def test_a_client_that_goes_away_frees_its_blocks(stack: Stack) -> None:
    with stack.client().completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=2000,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        next(iter(stream))
        assert stack.metrics()["tokenloom_num_requests_running"] >= 1
    deadline = time.monotonic() + 5
    while stack.metrics()["tokenloom_num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.1)
    metrics = stack.metrics()
    assert metrics["tokenloom_num_requests_running"] == metrics["tokenloom_num_requests_waiting"] == 0
    assert metrics["tokenloom_kv_cache_usage_perc"] == 0
    assert metrics['tokenloom_request_success_total{finished_reason="aborted"}'] >= 1


def test_health_models_and_metrics_of_every_stage_are_there(stack: Stack) -> None:
    assert httpx.get(f"{stack.url}/health").status_code == 200
    assert httpx.get(f"{stack.url}/ready").status_code == 200
    assert [model.id for model in stack.client().models.list()] == [MODEL]
    metrics = stack.metrics()
    for stage in ("gateway", "tokenizer", "scheduler", "executor"):
        assert metrics[f"tokenloom_{stage}_process_resident_memory_bytes"] > 1e6
    assert metrics["tokenloom_prefix_cache_hits_total"] > 0
