"""The gateway before a fake tokenizer, through the official openai client and plain HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from tests.fakes import FAKE_MODEL, fake_tokens
from tests.service.gateway_stack import GatewayStack, running_gateway
from tokenloom.gateway import delivery, formats, logprob_formats, middleware

USER: Any = {"role": "user", "content": "hi there"}
PROMPT = "user: hi there"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayStack]:
    with running_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: GatewayStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=10) as made:
        yield made


@pytest.fixture(scope="module")
def http(stack: GatewayStack) -> httpx.Client:
    return stack.http


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a well-ended stream, without its [DONE]."""
    blocks = [block.removeprefix("data: ") for block in text.split("\n\n")]
    assert blocks[-2:] == ["[DONE]", ""]
    return [orjson.loads(block) for block in blocks[:-2]]


def test_a_chat_is_answered_with_text_finish_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=FAKE_MODEL, messages=[USER], temperature=0, max_tokens=5)
    assert answer.choices[0].message.content == "".join(fake_tokens(PROMPT, 0, 5))
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == FAKE_MODEL
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)


def test_a_streamed_chat_is_the_same_text(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=FAKE_MODEL, messages=[USER], temperature=0, max_tokens=5, stream=True
    ) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "".join(fake_tokens(PROMPT, 0, 5))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completions_take_text_and_ids_and_number_choices_prompt_by_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=FAKE_MODEL, prompt=["a b", "c"], n=2, seed=5, max_tokens=3, temperature=1)
    expected = ["".join(fake_tokens(prompt, seed, 3)) for prompt in ("a b", "c") for seed in (5, 6)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model=FAKE_MODEL, prompt=[7, 8], temperature=0, max_tokens=2)
    assert ids.choices[0].text == "".join(fake_tokens("7 8", 0, 2))


def test_the_async_client_is_served_many_streams_at_once(stack: GatewayStack) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=FAKE_MODEL, messages=[{"role": "user", "content": f"q{number}"}], temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="k", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(24)))

    assert asyncio.run(ask_all()) == ["".join(fake_tokens(f"user: q{number}", 0, 6)) for number in range(24)]


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_d03_no_usage_chunk_comes_unasked(http: httpx.Client, path: str, options: object) -> None:
    body = {"messages": [USER], "prompt": "hi", "n": 2, "stream": True, "stream_options": options}
    events = events_of(http.post(path, json=body).text)
    assert all(len(event["choices"]) >= 1 and "usage" not in event for event in events)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_d03_the_usage_chunk_is_the_last_and_equals_the_whole_answers_usage(http: httpx.Client, path: str) -> None:
    body: dict[str, Any] = {"messages": [USER], "prompt": "hi you", "n": 2, "seed": 1}
    whole = http.post(path, json=body).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *others, last = events_of(http.post(path, json=streamed).text)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    assert all(event["usage"] is None for event in others)


def test_d04_each_choice_of_a_stream_has_its_index_one_role_and_one_finish(http: httpx.Client) -> None:
    body = {"messages": [USER], "n": 3, "temperature": 1, "seed": 5, "max_tokens": 20}
    whole = http.post("/v1/chat/completions", json=body).json()
    text = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    events = events_of(text)
    assert text.count("[DONE]") == 1
    assert len({(event["id"], event["created"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    assert {choice["index"] for choice in choices} == {0, 1, 2}
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert ["role" in choice["delta"] for choice in own] == [True] + [False] * (len(own) - 1)
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]
        joined = "".join(choice["delta"].get("content", "") for choice in own)
        assert joined == whole["choices"][index]["message"]["content"]


def test_a_step_costs_one_write_per_client_however_many_choices_move(http: httpx.Client) -> None:
    body = {"messages": [USER], "n": 8, "max_tokens": 5, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        writes = list(answer.iter_raw())
    assert len(writes) <= 6
    assert b"".join(writes).count(b"data: ") == 8 * (1 + 5 + 1) + 1


def test_the_access_log_has_the_request_id_and_no_text(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tokenloom.gateway.middleware")
    body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-2"})
    GatewayStack.wait_for(lambda: bool(caplog.records))
    [record] = [record for record in caplog.records if record.name == "tokenloom.gateway.middleware"]
    fields = vars(record)
    assert answer.json()["id"] == "chatcmpl-" + fields["request_id"]
    assert (fields["status"], fields["client_request_id"]) == (200, "mine-2")
    assert "secret" not in str(fields)


def test_d05_text_parts_are_joined_with_a_newline(stack: GatewayStack, client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "A A"}, {"type": "text", "text": "B"}]
    for role in ("user", "system", "assistant"):
        message: Any = {"role": role, "content": parts}
        client.chat.completions.create(model=FAKE_MODEL, messages=[message], max_tokens=1)
        assert stack.tokenizer.starts[-1].chat.messages[0].content == "A A\nB"


def test_d12_zeros_reach_the_tokenizer_as_zeros(stack: GatewayStack, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=FAKE_MODEL, messages=[USER], top_p=0, temperature=1.5, seed=0)
    sampling = stack.tokenizer.starts[-1].chat.options.sampling
    assert sampling.HasField("top_p")
    assert (sampling.top_p, sampling.seed) == (0, 0)


def test_each_request_without_a_seed_gets_its_own(stack: GatewayStack, http: httpx.Client) -> None:
    for _ in range(2):
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    first, second = (start.complete.options.sampling.seed for start in stack.tokenizer.starts[-2:])
    assert first != second
    assert 0 <= first < 2**63


def test_logprobs_and_ids_have_openais_and_vllms_form(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=FAKE_MODEL,
        messages=[USER],
        max_tokens=2,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True, "prompt_logprobs": 1},
    )
    ChatCompletion.model_validate(chat.model_dump(), strict=True)
    assert chat.choices[0].logprobs is not None
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content or ()] == [2, 2]
    assert chat.choices[0].model_extra == {"stop_reason": None, "token_ids": [1000, 1001]}
    assert chat.model_extra is not None
    assert chat.model_extra["prompt_token_ids"] == [0, 1, 2]
    assert chat.model_extra["prompt_logprobs"][0] is None
    text = client.completions.create(model=FAKE_MODEL, prompt="a b", max_tokens=2, logprobs=1)
    Completion.model_validate(text.model_dump(), strict=True)
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.tokens is not None
    assert "".join(text.choices[0].logprobs.tokens) == text.choices[0].text


def test_echo_with_logprobs_begins_with_the_prompt(http: httpx.Client) -> None:
    body = {"prompt": "a b c", "max_tokens": 1, "echo": True, "logprobs": 1}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"].startswith("a b c")
    assert choice["logprobs"]["tokens"][:3] == ["a", " b", " c"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 3]


def test_each_choice_of_a_stream_echoes_the_prompts_logprobs(http: httpx.Client) -> None:
    body = {"prompt": ["a b c", "d"], "n": 2, "max_tokens": 2, "echo": True, "logprobs": 1, "seed": 1}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    streamed: list[list[str]] = [[], [], [], []]
    for event in events_of(http.post("/v1/completions", json={**body, "stream": True}).text):
        for choice in event["choices"]:
            streamed[choice["index"]] += (choice["logprobs"] or {}).get("tokens", [])
            assert "prompt_token_ids" not in choice
    assert [tokens[:-2] for tokens in streamed] == [["a", " b", " c"]] * 2 + [["d"]] * 2
    assert streamed == [choice["logprobs"]["tokens"] for choice in whole]


@pytest.mark.parametrize("stream", [False, True])
def test_large_answers_are_written_outside_the_loops_thread(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    names: list[str] = []
    write = logprob_formats.chat_logprobs

    def noting(positions: Any) -> Any:
        names.append(threading.current_thread().name)
        return write(positions)

    monkeypatch.setattr(formats, "chat_logprobs", noting)
    body = {"messages": [USER], "max_tokens": 4, "logprobs": True, "top_logprobs": 3, "stream": stream}
    http.post("/v1/chat/completions", json=body)
    assert not any(name.startswith("large-work") for name in names)
    names.clear()
    monkeypatch.setattr(delivery, "MAX_LOOP_ENTRIES", 3)
    http.post("/v1/chat/completions", json=body)
    assert names
    assert all(name.startswith("large-work") for name in names)


def test_128_choices_are_answered(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [USER], "n": 128, "max_tokens": 1}).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(128))


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [FAKE_MODEL]
    assert client.models.retrieve(FAKE_MODEL).created == 1_700_000_000
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_a_model_that_is_not_served_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=[USER])
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_the_openapi_document_describes_both_endpoints(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert set(document["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"}
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "max_completion_tokens", "top_k"} <= set(fields)


def test_the_request_id_comes_back_and_is_the_callers_own_if_it_sent_one(
    stack: GatewayStack, http: httpx.Client
) -> None:
    body = {"messages": [USER], "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.json()["id"] == "chatcmpl-" + answer.headers["x-request-id"]
    assert stack.tokenizer.starts[-1].chat.options.request_id == answer.json()["id"]
    own = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
    assert own.headers["x-request-id"] == "mine-1"
    assert http.get("/nowhere").headers["x-request-id"]


def test_metrics_count_requests_and_tokens_and_append_other_stages(http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 3, "stream": True})
    page = http.get("/metrics").text
    assert 'tokenloom_gateway_requests_total{route="/v1/chat/completions",status="200"}' in page
    assert 'tokenloom_gateway_time_to_first_token_seconds_count{route="/v1/chat/completions"}' in page
    assert 'tokenloom_gateway_requests_in_flight{route="/v1/chat/completions"} 0.0' in page


def test_metrics_say_which_stage_does_not_answer(tmp_path: Path) -> None:
    with running_gateway(tmp_path, metrics_from=(f"unix:{tmp_path}/nobody.sock",)) as stack:
        page = stack.http.get("/metrics")
    assert page.status_code == 200
    assert f"# no metrics from unix:{tmp_path}/nobody.sock" in page.text


def test_one_trace_runs_from_the_caller_into_the_frame(
    stack: GatewayStack, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(middleware, "tracer", lambda: provider.get_tracer("test"))
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 2, "temperature": 0.5}
    http.post("/v1/chat/completions", json=body, headers={"traceparent": caller})
    stack.wait_for(lambda: bool(exporter.get_finished_spans()))
    [span] = exporter.get_finished_spans()
    assert span.kind is SpanKind.SERVER
    assert span.context is not None
    assert trace.format_trace_id(span.context.trace_id) == caller.split("-")[1]
    assert span.parent is not None
    assert trace.format_span_id(span.parent.span_id) == caller.split("-")[2]
    sent = stack.tokenizer.starts[-1].trace.traceparent
    assert sent.split("-")[1:3] == [caller.split("-")[1], trace.format_span_id(span.context.span_id)]
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["http.response.status_code"] == 200
    assert "secret" not in str(attributes)
