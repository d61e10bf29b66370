"""What the gateway refuses, and that the others do not notice."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from tests.fakes import FAKE_MODEL, fake_tokens
from tests.service.gateway_stack import GatewayStack, running_gateway
from tokenloom.common import errors
from tokenloom.common.auth import digest_of
from tokenloom.gateway import json_route

CHAT = "/v1/chat/completions"
USER: Any = {"role": "user", "content": "hi there"}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayStack]:
    with running_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest.fixture(scope="module")
def http(stack: GatewayStack) -> httpx.Client:
    return stack.http


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer in OpenAI's form."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [USER], "n": 10**18}, "n"),
        (CHAT, {"messages": [USER], "n": "2"}, "n"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [USER], "top_p": 1.0001}, "top_p"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ("/v1/completions", {"prompt": [[-1]]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt"),
        ("/v1/completions", {}, "prompt"),
    ],
)
def test_bad_fields_are_400_with_the_parameter_named(
    stack: GatewayStack, http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    num_starts = len(stack.tokenizer.starts)
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert len(stack.tokenizer.starts) == num_starts


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[1]", b'"x"', b'{"n": NaN}', b"\xff\xfe", b'{"a":"\\ud800"}', b"[" * 5000]
)
def test_malformed_json_is_400(http: httpx.Client, body: bytes) -> None:
    answer = http.post(CHAT, content=body, headers=JSON)
    assert answer.status_code == 400
    error_of(answer)


def test_a_body_that_is_not_json_is_415(http: httpx.Client) -> None:
    answer = http.post(CHAT, content=b'{"messages":[]}', headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    error_of(answer)


def test_unknown_paths_are_404_and_wrong_methods_405(http: httpx.Client) -> None:
    for answer, status in ((http.get("/v2/chat"), 404), (http.post("/v1/models/"), 405), (http.get(CHAT), 405)):
        assert answer.status_code == status
        error_of(answer)
    assert http.get(CHAT).headers["allow"] == "POST"


def test_a_body_over_the_limit_is_413_by_its_declared_length(http: httpx.Client) -> None:
    answer = http.post(CHAT, content=b"x" * ((16 << 20) + 1), headers=JSON)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "body_too_large"
    assert http.get("/health").status_code == 200


def test_a_body_over_the_limit_is_413_by_counting_when_no_length_is_declared(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * 1024

    with running_gateway(tmp_path, max_body_bytes=32 << 10) as stack:
        answer = stack.http.post(CHAT, content=parts(), headers=JSON)
        assert answer.status_code == 413
        error_of(answer)
        fitting = {"messages": [{"role": "user", "content": "x" * (31 << 10)}], "max_tokens": 1}
        assert stack.http.post(CHAT, json=fitting).status_code == 200


def test_bodies_in_flight_have_a_bound_together_and_ended_ones_do_not_count(tmp_path: Path) -> None:
    large = {"messages": [{"role": "user", "content": "x" * (40 << 10)}], "max_tokens": 1, "stream": True}
    with running_gateway(tmp_path, max_total_body_bytes=64 << 10) as stack:
        for _ in range(3):
            assert stack.http.post(CHAT, json=large).status_code == 200
        stack.do(stack.tokenizer.may_step.clear)
        with stack.http.stream("POST", CHAT, json=large) as first:
            assert first.status_code == 200
            refused = stack.http.post(CHAT, json=large)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert error_of(refused)["type"] == "rate_limit_error"
            stack.do(stack.tokenizer.may_step.set)
            assert first.read().endswith(b"data: [DONE]\n\n")
        stack.wait_for(lambda: stack.http.post(CHAT, json=large).status_code == 200)


def test_large_bodies_are_read_outside_the_loops_thread(
    stack: GatewayStack, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    read = json_route.read_body

    def noting(model: Any, body: bytes) -> Any:
        names.append(threading.current_thread().name)
        return read(model, body)

    monkeypatch.setattr(json_route, "read_body", noting)
    for size in (1, 300 << 10):
        body = {"messages": [{"role": "user", "content": "x" * size}], "max_tokens": 1}
        assert http.post(CHAT, json=body).status_code == 200
    assert not names[0].startswith("large-work")
    assert names[1].startswith("large-work")


def test_a_body_that_does_not_arrive_is_408(tmp_path: Path) -> None:
    with (
        running_gateway(tmp_path, body_timeout_s=0.1) as stack,
        socket.create_connection(("127.0.0.1", stack.stage.port), timeout=5) as connection,
    ):
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (errors.InvalidArgument("too long", field="messages"), 400),
        (errors.PermissionDenied("class"), 403),
        (errors.ResourceExhausted("full", retry_after_s=7), 429),
        (errors.Unavailable("starting", retry_after_s=2), 503),
        (errors.DeadlineExceeded("late"), 504),
        (errors.Internal("broken"), 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_before_acceptance_is_an_http_status_also_for_streams(
    stack: GatewayStack, http: httpx.Client, refusal: errors.TokenloomError, status: int, stream: bool
) -> None:
    stack.tokenizer.refusal = refusal
    try:
        answer = http.post(CHAT, json={"messages": [USER], "stream": stream})
    finally:
        stack.tokenizer.refusal = None
    assert answer.status_code == status
    assert error_of(answer)["message"] == refusal.message
    if refusal.retry_after_s is not None:
        assert answer.headers["retry-after"] == str(int(refusal.retry_after_s))


def test_a_failure_in_a_stream_is_its_last_event_and_not_done(stack: GatewayStack, http: httpx.Client) -> None:
    stack.tokenizer.failure = errors.DeadlineExceeded("out of time")
    try:
        answer = http.post(CHAT, json={"messages": [USER], "stream": True})
    finally:
        stack.tokenizer.failure = None
    assert answer.status_code == 200
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert orjson.loads(events[-1].removeprefix("data: "))["error"]["type"] == "timeout_error"
    assert "[DONE]" not in answer.text
    assert any('"content":" ' in event for event in events)


def test_the_openai_client_raises_the_error_of_a_broken_stream(stack: GatewayStack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="k", max_retries=0)
    stack.tokenizer.failure = errors.Internal("it broke")
    try:
        with pytest.raises(openai.APIError, match="it broke"), client:
            list(client.chat.completions.create(model=FAKE_MODEL, messages=[USER], stream=True))
    finally:
        stack.tokenizer.failure = None


def test_bad_requests_do_not_disturb_a_running_stream(stack: GatewayStack, http: httpx.Client) -> None:
    texts: list[str] = []

    def stream() -> None:
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="k", max_retries=0)
        with client:
            chunks = client.chat.completions.create(
                model=FAKE_MODEL, messages=[USER], max_tokens=150, temperature=0, stream=True
            )
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))

    thread = threading.Thread(target=stream)
    thread.start()
    bad: list[Any] = [{"messages": 5}, {"messages": [USER], "n": 10**18}, [1], {"messages": [USER], "model": "other"}]
    while thread.is_alive():
        for body in bad:
            assert http.post(CHAT, json=body).status_code in (400, 404)
    thread.join()
    assert texts == ["".join(fake_tokens("user: hi there", 0, 150))]


def test_keys_are_checked_before_the_body_and_sent_on_as_digests(tmp_path: Path) -> None:
    with running_gateway(tmp_path, keys=("right", "other"), api_key=("right", "other")) as stack:
        body = {"messages": [USER], "max_tokens": 1}
        for key in ("right", "other"):
            answer = stack.http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            assert stack.tokenizer.starts[-1].key_digest == digest_of(key)
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}):
            answer = stack.http.post(CHAT, content=b"{", headers={**JSON, **headers})
            assert answer.status_code == 401
            assert error_of(answer)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/v1/models/x", "/nowhere"):
            assert stack.http.get(path).status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert stack.http.get(path).status_code == 200


def test_the_tokenizer_is_the_authority_when_the_gateway_has_no_keys(tmp_path: Path) -> None:
    with running_gateway(tmp_path, keys=("right",)) as stack:
        body = {"messages": [USER], "max_tokens": 1, "stream": True}
        refused = stack.http.post(CHAT, json=body)
        assert refused.status_code == 401
        error_of(refused)
        taken = stack.http.post(CHAT, json=body, headers={"authorization": "Bearer right"})
        assert taken.status_code == 200


def test_requests_beyond_the_bound_are_429(tmp_path: Path) -> None:
    with running_gateway(tmp_path, max_num_requests=1) as stack:
        stack.do(stack.tokenizer.may_step.clear)
        with stack.http.stream("POST", CHAT, json={"messages": [USER], "stream": True}) as first:
            assert first.status_code == 200
            second = stack.http.post(CHAT, json={"messages": [USER]})
            assert second.status_code == 429
            assert second.headers["retry-after"] == "1"
            stack.do(stack.tokenizer.may_step.set)
            assert first.read().endswith(b"data: [DONE]\n\n")
        assert stack.http.post(CHAT, json={"messages": [USER]}).status_code == 200
