"""Resumable streams over HTTP: whoever was cut off gets the rest, from any gateway, and nothing twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cut_streams import Event, events_in, told
from tests.resuming_http_client import stream
from tests.service.gateway_stack import GatewayStack, running_gateway
from tokenloom.common.errors import Internal, Unavailable
from tokenloom.gateway import delivery, generation
from tokenloom.gateway.request_info import created_s_of, seed_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi there"}]
RESUMABLE: dict[str, Any] = {"stream": True, "resumable": True, "max_tokens": 5, "n": 2}
USAGE = {"include_usage": True}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES}),
    (CHAT, {"messages": MESSAGES, "temperature": 0, "n": 1, "stream_options": USAGE}),
    (
        CHAT,
        {
            "messages": MESSAGES,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            "stream_options": USAGE,
            "seed": 7,
        },
    ),
    (COMPLETIONS, {"prompt": ["the quick brown fox", "jumps"], "return_token_ids": True, "stream_options": USAGE}),
]


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GatewayStack, GatewayStack]]:
    """Two, with tokenizers of their own."""
    with (
        running_gateway(tmp_path_factory.mktemp("one")) as one,
        running_gateway(tmp_path_factory.mktemp("other")) as other,
    ):
        yield one, other


@pytest.fixture
def pair(gateways: tuple[GatewayStack, GatewayStack]) -> Iterator[tuple[GatewayStack, GatewayStack]]:
    yield gateways
    for stack in gateways:
        fake = stack.tokenizer
        fake.tail, fake.lengths, fake.failure, fake.repeat = "", {}, None, 1
        stack.do(fake.may_step.set)
        fake.starts.clear()
        fake.cancelled.clear()
        fake.detached.clear()


def post(stack: GatewayStack, path: str, body: dict[str, Any], last_event_id: str | None = None) -> httpx.Response:
    headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
    return stack.http.post(path, json={**RESUMABLE, **body}, headers=headers)


def events_of(stack: GatewayStack, path: str, body: dict[str, Any], last_event_id: str | None = None) -> list[Event]:
    response = post(stack, path, body, last_event_id)
    assert response.status_code in (200, 204), response.text
    return events_in(response.content)


@pytest.mark.parametrize("tail", ["", " ...and"])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_cut_behind_any_event_goes_on_at_another_gateway(
    pair: tuple[GatewayStack, GatewayStack], path: str, body: dict[str, Any], tail: str
) -> None:
    for stack in pair:
        stack.tokenizer.tail, stack.tokenizer.lengths = tail, {1: 3}
    events = events_of(pair[0], path, body)
    whole = told(events)
    assert whole["is_done"]
    for num_events, event in enumerate(events, 1):
        assert event.id is not None
        rest = events_of(pair[num_events % 2], path, body, event.id)
        assert told([*events[:num_events], *rest]) == whole, event.id
        assert [one.id for one in rest[-2:]] in ([one.id for one in events[-2:]], [events[-1].id], [])
    for start in pair[1].tokenizer.starts:
        options = start.chat.options if start.HasField("chat") else start.complete.options
        assert options.resumable
        assert options.num_skipped_tokens
        assert not start.HasField("age_ms"), "bounds on what is new hold"


def test_request_id_seed_and_time_come_from_the_id(pair: tuple[GatewayStack, GatewayStack]) -> None:
    events = events_of(pair[0], CHAT, {"messages": MESSAGES})
    request_id = events[0].chunk["id"]
    assert events[0].id == f"{request_id}:0:0+1", "what was found in the cache is known by then"
    assert events[-1].id == f"{request_id}:end"
    assert events[0].chunk["created"] == created_s_of(request_id.removeprefix("chatcmpl-"))
    events_of(pair[1], CHAT, {"messages": MESSAGES}, events[3].id)
    (first,), (second,) = (stack.tokenizer.starts for stack in pair)
    assert first.chat.options.request_id == second.chat.options.request_id == request_id
    assert first.chat.options.sampling.seed == second.chat.options.sampling.seed == seed_of(request_id)


def test_behind_the_usage_only_the_end_mark_is_missing_and_behind_that_nothing(
    pair: tuple[GatewayStack, GatewayStack],
) -> None:
    body = {"messages": MESSAGES, "stream_options": USAGE}
    events = events_of(pair[0], CHAT, body)
    response = post(pair[1], CHAT, body, events[-2].id)
    assert response.text == f"retry: 1000\nid: {events[-1].id}\ndata: [DONE]\n\n"
    assert response.headers["content-type"].startswith("text/event-stream")
    response = post(pair[1], CHAT, body, events[-1].id)
    assert (response.status_code, response.content) == (204, b"")
    assert not pair[1].tokenizer.starts


def test_a_stream_that_is_not_resumable_has_no_ids(pair: tuple[GatewayStack, GatewayStack]) -> None:
    response = pair[0].http.post(CHAT, json={"messages": MESSAGES, "stream": True})
    assert all(line.startswith("data: ") for line in response.text.split("\n\n")[:-1])


HEX = "019b0a5b3c4d7e8f9a0b1c2d3e4f5061"


@pytest.mark.parametrize(
    ("path", "body", "last_event_id", "param"),
    [
        (CHAT, {"messages": MESSAGES, "stream": False}, None, "resumable"),
        (CHAT, {"messages": MESSAGES, "stream": None}, None, "resumable"),
        (COMPLETIONS, {"prompt": "a", "stream": False}, None, "resumable"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, None, "echo"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0}, None, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 0}, None, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": ["a"] * 65}, None, "n"),
        (CHAT, {"messages": MESSAGES, "resumable": "yes"}, None, "resumable"),
        (CHAT, {"messages": MESSAGES, "resumable": False}, f"chatcmpl-{HEX}:0:1", "resumable"),
        (CHAT, {"messages": MESSAGES, "resumable": None}, f"chatcmpl-{HEX}:0:1", "resumable"),
        (CHAT, {"messages": MESSAGES}, f"cmpl-{HEX}:0:1", "last-event-id"),
        (CHAT, {"messages": MESSAGES}, f"chatcmpl-{HEX}:2:1", "last-event-id"),
        (COMPLETIONS, {"prompt": "a"}, f"chatcmpl-{HEX}:0:1", "last-event-id"),
        (COMPLETIONS, {"prompt": "a"}, "what?", "last-event-id"),
        (COMPLETIONS, {"prompt": "a"}, "", "last-event-id"),
    ],
)
def test_what_cannot_be_is_refused_and_named(
    pair: tuple[GatewayStack, GatewayStack],
    path: str,
    body: dict[str, Any],
    last_event_id: str | None,
    param: str,
) -> None:
    response = post(pair[0], path, body, last_event_id)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not pair[0].tokenizer.starts


def test_a_tokenizers_refusal_of_a_number_of_tokens_names_the_header(pair: tuple[GatewayStack, GatewayStack]) -> None:
    response = post(pair[0], CHAT, {"messages": MESSAGES}, f"chatcmpl-{HEX}:0:6")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "last-event-id"), response.text


def test_a_client_that_goes_away_is_waited_for_only_if_its_stream_is_resumable(
    pair: tuple[GatewayStack, GatewayStack],
) -> None:
    stack = pair[0]
    stack.tokenizer.lengths = {0: 100_000}
    for resumable in (True, False):
        body = {**RESUMABLE, "messages": MESSAGES, "max_tokens": 100_000, "n": 1, "resumable": resumable}
        with stack.http.stream("POST", CHAT, json=body) as response:
            next(response.iter_bytes())
        stack.wait_for(lambda: bool(stack.tokenizer.cancelled if not resumable else stack.tokenizer.detached))  # noqa: B023
    assert len(stack.tokenizer.detached) == len(stack.tokenizer.cancelled) == 1
    stack.wait_for(lambda: stack.stage._pool.num_in_flight == 0)


def test_a_slow_reader_can_come_back(pair: tuple[GatewayStack, GatewayStack], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "SLOW_READER_PATIENCE_S", 0.05)
    monkeypatch.setattr(delivery, "SLOW_READER_GRACE_S", 0.05)
    stack = pair[0]
    stack.tokenizer.repeat = 20_000
    body = {**RESUMABLE, "messages": MESSAGES, "max_tokens": 1000, "n": 1}
    with stack.http.stream("POST", CHAT, json=body) as response:
        stack.wait_for(lambda: bool(stack.tokenizer.detached))
        assert response.status_code == 200
    assert not stack.tokenizer.cancelled


def test_one_whose_time_is_up_is_cancelled(pair: tuple[GatewayStack, GatewayStack]) -> None:
    stack = pair[0]
    stack.do(stack.tokenizer.may_step.clear)
    response = post(stack, CHAT, {"messages": MESSAGES, "timeout": 0.1})
    assert '"code":"deadline_exceeded"' in response.text.lower() or response.status_code == 504
    stack.wait_for(lambda: bool(stack.tokenizer.cancelled))
    assert not stack.tokenizer.detached


def test_a_client_may_be_back_before_it_is_missed(pair: tuple[GatewayStack, GatewayStack]) -> None:
    """Both have the same id at one gateway; neither's end is the other's."""
    stack = pair[0]
    body = {**RESUMABLE, "messages": MESSAGES, "n": 1, "max_tokens": 400}
    with stack.http.stream("POST", CHAT, json=body) as response:
        stack.do(stack.tokenizer.may_step.clear)
        first, parts = b"", response.iter_bytes()  # an iterator that is dropped closes the connection
        while not events_in(first):
            first += next(parts)
        event = events_in(first)[-1]
        again = stack.begin(_post_async(stack.url + CHAT, body, str(event.id)))
        stack.wait_for(lambda: len(stack.tokenizer.starts) == 2)
        assert stack.stage._pool.num_in_flight == 2
        stack.do(stack.tokenizer.may_step.set)
        rest = events_in(again.result(10).content)
        assert told([*events_in(first), *rest])["is_done"]
    stack.wait_for(lambda: stack.stage._pool.num_in_flight == 0)


async def _post_async(url: str, body: dict[str, Any], last_event_id: str) -> httpx.Response:
    async with httpx.AsyncClient(verify=False) as client:
        return await client.post(url, json=body, headers={"Last-Event-ID": last_event_id})


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_that_was_taken_up_goes_on_when_its_tokenizer_dies(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "max_tokens": 12}
    with running_gateway(tmp_path) as stack:
        stack.tokenizer.tail = " ...and"
        events = events_of(stack, path, body)
        whole = told(events)
        for num_frames in (1, 2, 4, 7):
            at = next(i for i, event in enumerate(events, 1) if re.search(r":0:3(\+\d+)?(,|$)", str(event.id)))
            stack.tokenizer.drops = [num_frames]
            stack.do(stack.tokenizer.drop_sessions)
            stack.wait_for(lambda: not stack.tokenizer.drops)
            stack.wait_for(lambda: stack.http.get("/ready").status_code == 200)
            stack.tokenizer.starts.clear()
            rest = events_of(stack, path, body, events[at - 1].id)
            assert told([*events[:at], *rest]) == whole
            assert len(stack.tokenizer.starts) == 2
            assert stack.tokenizer.starts[1].HasField("age_ms")


def test_errors_have_no_id_and_the_example_client_goes_on_after_one(
    pair: tuple[GatewayStack, GatewayStack],
) -> None:
    body = {**RESUMABLE, "messages": MESSAGES, "n": 1, "temperature": 0}
    one, other = pair
    one.tokenizer.failure = Unavailable("the tokenizer stops", reason="STOPPED")
    chunks = list(stream(one.http, [one.url + CHAT, other.url + CHAT], body))
    (error,) = [chunk for chunk in chunks if "error" in chunk]
    assert error["error"]["code"] == "stopped"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk is not error)
    whole = "".join(
        chunk["choices"][0]["delta"].get("content", "") for chunk in stream(other.http, [other.url + CHAT], body)
    )
    assert text == whole
    one.tokenizer.failure = Internal("broken")
    with pytest.raises(ConnectionError):
        list(stream(one.http, [one.url + CHAT], body))


def test_the_document_tells_of_the_field_and_the_header(pair: tuple[GatewayStack, GatewayStack]) -> None:
    document = pair[0].http.get("/openapi.json").json()
    for path, name in ((CHAT, "ChatBody"), (COMPLETIONS, "CompletionBody")):
        names = [parameter["name"] for parameter in document["paths"][path]["post"]["parameters"]]
        assert "Last-Event-ID" in names
        assert "Last-Event-ID" in document["components"]["schemas"][name]["properties"]["resumable"]["description"]
