"""Keys, deadlines and refusals for want of room, as HTTP callers see them."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.service.gateway_stack import GatewayStack, running_gateway
from tokenloom.common import errors
from tokenloom.common.config import ProcessSettings
from tokenloom.common.errors import SetupError
from tokenloom.gateway import tokenizer_pool
from tokenloom.gateway.config import GatewayConfig
from tokenloom.gateway.server import GatewayStage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {CHAT: BODY, COMPLETIONS: {"prompt": "hi"}}
LATE = {"message": "the request's time was up", "type": "timeout_error", "param": None, "code": "deadline_exceeded"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayStack]:
    with running_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


@contextlib.contextmanager
def refusing(stack: GatewayStack, error: errors.TokenloomError) -> Iterator[None]:
    """The tokenizer refuses everything for a while."""
    stack.tokenizer.refusal = error
    try:
        yield
    finally:
        stack.tokenizer.refusal = None


def write_keys(folder: Path) -> str:
    path = folder / "keys.toml"
    digest = hashlib.sha256(b"listed").hexdigest()
    path.write_text(f'[[key]]\nsha256 = "{digest}"\ntenant = "t"\n')
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_of_flag_and_file_open_and_others_are_refused_before_the_body(tmp_path: Path) -> None:
    with running_gateway(tmp_path, keys=("plain",), api_key=("plain",), keys_file=write_keys(tmp_path)) as stack:
        for key in ("plain", "listed"):
            assert stack.http.post(CHAT, json=BODY, headers=bearer(key)).status_code == 200
            assert stack.http.get("/v1/models", headers=bearer(key)).status_code == 200
        assert [start.key_digest for start in stack.tokenizer.starts] == [
            hashlib.sha256(key).digest() for key in (b"plain", b"listed")
        ]
        for path in ("/health", "/ready", "/metrics"):
            assert stack.http.get(path).status_code == 200
        with socket.create_connection(("127.0.0.1", stack.stage.port), timeout=5) as connection:
            head = (
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {hashlib.sha256(b'listed').hexdigest()}\r\n"
            )
            connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n".encode())
            answer = http.client.HTTPResponse(connection)
            answer.begin()  # no byte of the body was sent
            assert answer.status == 401
            assert orjson.loads(answer.read())["error"]["code"] == "invalid_api_key"
        assert len(stack.tokenizer.starts) == 2


def test_a_keys_file_with_a_fault_is_a_setup_error(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("[[key]]\n")
    config = GatewayConfig(ProcessSettings(), keys_file=str(tmp_path / "keys.toml"))
    with pytest.raises(SetupError, match=r"keys\.toml: key 1: sha256 is missing"):
        GatewayStage(config)


def test_a_class_that_the_key_may_not_have_is_403_and_names_priority(stack: GatewayStack) -> None:
    denied = errors.PermissionDenied("priority is 0", field="priority", reason="PRIORITY_TOO_HIGH")
    with refusing(stack, denied):
        answer = stack.http.post(CHAT, json={**BODY, "priority": 0})
    assert answer.status_code == 403
    error = {"message": "priority is 0", "type": "invalid_request_error", "param": "priority"}
    assert answer.json() == {"error": {**error, "code": "priority_too_high"}}
    assert stack.tokenizer.starts[-1].chat.options.priority_class == 0
    assert stack.tokenizer.starts[-1].chat.options.HasField("priority_class")
    stack.http.post(CHAT, json=BODY)
    assert not stack.tokenizer.starts[-1].chat.options.HasField("priority_class")


@pytest.mark.parametrize(
    ("reason", "retry_after_s", "header"),
    [("QUEUE_FULL", 0.2, "1"), ("TENANT_QUEUE_FULL", 2.1, "3"), ("TOKEN_RATE", 41.0, "41"), ("QUEUE_FULL", None, "1")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_no_room_is_429_with_reason_and_time_to_wait(
    stack: GatewayStack, reason: str, retry_after_s: float | None, header: str, stream: bool
) -> None:
    with refusing(stack, errors.ResourceExhausted("no room", reason=reason, retry_after_s=retry_after_s)):
        for path, body in BODIES.items():
            answer = stack.http.post(path, json={**body, "stream": stream, "n": 3})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == header
            assert answer.headers["content-type"] == "application/json"
            expected = {"message": "no room", "type": "rate_limit_error", "param": None, "code": reason.lower()}
            assert answer.json() == {"error": expected}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_smaller_of_body_and_header_goes_on_as_time_left(stack: GatewayStack, path: str) -> None:
    for timeout, header, at_most_ms in (
        (50, None, 50_000),
        (None, "40.5", 40_500),
        (50, "40", 40_000),
        (30, "40", 30_000),
    ):
        headers = {} if header is None else {"X-Request-Timeout": header}
        body = {**BODIES[path], "timeout": timeout}
        assert stack.http.post(path, json=body, headers=headers).status_code == 200
        start = stack.tokenizer.starts[-1]
        options = start.chat.options if path == CHAT else start.complete.options
        assert at_most_ms - 10_000 < options.remaining_time_ms <= at_most_ms
    assert stack.http.post(path, json=BODIES[path]).status_code == 200
    start = stack.tokenizer.starts[-1]
    options = start.chat.options if path == CHAT else start.complete.options
    assert 3_500_000 < options.remaining_time_ms <= 3_600_000  # the gateway's own limit


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("body", "header", "param"),
    [({}, "soon", "x-request-timeout"), ({}, "0", "x-request-timeout"), ({}, "-2", "x-request-timeout")]
    + [({}, "nan", "x-request-timeout")]
    + [({"timeout": value}, "5", "timeout") for value in (0, -1, "5", True, 86_401, [1])],
)
def test_what_is_no_time_is_400_and_named(
    stack: GatewayStack, path: str, body: dict[str, Any], header: str, param: str
) -> None:
    num_starts = len(stack.tokenizer.starts)
    answer = stack.http.post(path, json={**BODIES[path], **body}, headers={"x-request-timeout": header})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")
    assert len(stack.tokenizer.starts) == num_starts


def test_nan_in_a_body_is_no_json(stack: GatewayStack) -> None:
    body = b'{"prompt": "hi", "timeout": NaN}'
    answer = stack.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("stream", [False, True])
def test_time_that_is_up_before_the_first_byte_is_504(stack: GatewayStack, stream: bool) -> None:
    with refusing(stack, errors.DeadlineExceeded("the request's time was up")):
        answer = stack.http.post(CHAT, json={**BODY, "stream": stream, "n": 2, "timeout": 5})
    assert answer.status_code == 504
    assert "retry-after" not in answer.headers
    assert answer.json() == {"error": LATE}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_time_that_is_up_in_a_stream_is_one_error_event_and_the_end(stack: GatewayStack, path: str) -> None:
    stack.tokenizer.failure = errors.DeadlineExceeded("the request's time was up")
    try:
        answer = stack.http.post(path, json={**BODIES[path], "stream": True, "n": 3, "timeout": 5})
        whole = stack.http.post(path, json={**BODIES[path], "n": 3, "timeout": 5})
    finally:
        stack.tokenizer.failure = None
    assert answer.status_code == 200
    events = [orjson.loads(event.removeprefix("data: ")) for event in answer.text.removesuffix("\n\n").split("\n\n")]
    assert [event for event in events if "error" in event] == [{"error": LATE}]
    assert events[-1] == {"error": LATE}
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    assert {choice["index"] for choice in choices} == {0, 1, 2}
    assert {choice.get("finish_reason") for choice in choices} == {None}
    assert "[DONE]" not in answer.text
    assert (whole.status_code, whole.json()) == (504, {"error": LATE})


def test_the_time_that_a_body_takes_to_arrive_counts(stack: GatewayStack) -> None:
    body = orjson.dumps({**BODY, "timeout": 0.2})
    with socket.create_connection(("127.0.0.1", stack.stage.port), timeout=5) as connection:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body[:-1])
        threading.Event().wait(0.4)
        num_starts = len(stack.tokenizer.starts)
        connection.sendall(body[-1:])
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, orjson.loads(answer.read())) == (504, {"error": LATE})
    assert len(stack.tokenizer.starts) == num_starts


def test_time_goes_on_while_a_request_changes_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_pool, "_DEADLINE_SLACK_S", 60.0)  # that is for a tokenizer alone
    with running_gateway(tmp_path) as stack:
        stack.do(stack.tokenizer.may_step.clear)
        answers: list[httpx.Response] = []
        body = {**BODY, "timeout": 3}
        thread = threading.Thread(target=lambda: answers.append(stack.http.post(CHAT, json=body)))
        thread.start()
        stack.wait_for(lambda: len(stack.tokenizer.starts) == 1)
        threading.Event().wait(0.2)
        stack.do(stack.tokenizer.drop_sessions)
        stack.wait_for(lambda: len(stack.tokenizer.starts) == 2)
        first, again = stack.tokenizer.starts
        passed_ms = first.chat.options.remaining_time_ms - again.chat.options.remaining_time_ms
        assert 200 <= passed_ms <= again.age_ms + 1
        # No tokenizer is left to end it, so the gateway does, and in time.
        stack.run(stack.tokenizer.stop())
        thread.join(8)
        assert (answers[0].status_code, answers[0].json()) == (504, {"error": LATE})


def test_the_header_is_documented(stack: GatewayStack) -> None:
    paths = stack.http.get("/openapi.json").json()["paths"]
    for path in (CHAT, COMPLETIONS):
        assert "x-request-timeout" in [parameter["name"] for parameter in paths[path]["post"]["parameters"]]
