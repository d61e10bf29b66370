"""Connections that take room and give nothing: late and endless heads, idle ones, too many, answers nobody reads."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.service.gateway_stack import GatewayStack, running_gateway

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD_TIMEOUT_S, KEEP_ALIVE_S, WRITE_TIMEOUT_S = 0.5, 1, 0.8


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayStack]:
    limits: dict[str, Any] = {
        "head_timeout_s": HEAD_TIMEOUT_S,
        "keep_alive_s": KEEP_ALIVE_S,
        "write_timeout_s": WRITE_TIMEOUT_S,
    }
    with running_gateway(tmp_path_factory.mktemp("gateway"), **limits) as running:
        yield running


@pytest.fixture(autouse=True)
def plain(stack: GatewayStack) -> None:
    stack.tokenizer.repeat = 1


def connect(stack: GatewayStack, sent: bytes = b"", receive_buffer: int = 0) -> socket.socket:
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(8)
    connection.connect(("127.0.0.1", stack.stage.port))
    connection.sendall(sent)
    return connection


def post(body: dict[str, Any]) -> bytes:
    data = orjson.dumps(body)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def answer_of(connection: socket.socket) -> tuple[int, Any]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, orjson.loads(answer.read())


def until_closed(connection: socket.socket) -> tuple[float, bytes]:
    """Seconds until the other side closed, and what it sent until then."""
    started_s, data = time.monotonic(), b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 20):
            data += part
    return time.monotonic() - started_s, data


def metric(stack: GatewayStack, name: str) -> float:
    page = stack.http.get("/metrics").text
    return next((float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"{name} ")), 0.0)


def num_cut(stack: GatewayStack, reason: str) -> float:
    return metric(stack, f'tokenloom_gateway_connections_cut_total{{reason="{reason}"}}')


def test_a_connection_that_sends_nothing_is_closed_in_time(stack: GatewayStack) -> None:
    before = num_cut(stack, "head_timeout")
    with connect(stack) as connection:
        elapsed_s, data = until_closed(connection)
    assert data == b""
    assert HEAD_TIMEOUT_S / 2 < elapsed_s < HEAD_TIMEOUT_S + 3
    assert num_cut(stack, "head_timeout") == before + 1


def test_a_head_that_comes_byte_by_byte_is_answered_408_in_time(stack: GatewayStack) -> None:
    with connect(stack) as connection:
        started_s = time.monotonic()
        connection.settimeout(0.05)
        data = b""
        for byte in HEALTH[:-2] + b"x-filler: " + b"x" * 1000:
            with contextlib.suppress(TimeoutError):
                connection.sendall(bytes((byte,)))
                if data := connection.recv(1 << 16):
                    break
        assert time.monotonic() - started_s < HEAD_TIMEOUT_S + 3
    assert data.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"head_timeout"' in data


def test_the_head_after_an_answer_has_its_own_time(stack: GatewayStack) -> None:
    with connect(stack, HEALTH) as connection:
        assert answer_of(connection)[0] == 200
        time.sleep(HEAD_TIMEOUT_S * 1.3)  # idle, which may take longer
        connection.sendall(HEALTH)
        assert answer_of(connection)[0] == 200
        connection.sendall(HEALTH[:10])
        elapsed_s, data = until_closed(connection)
    assert elapsed_s < HEAD_TIMEOUT_S + 3
    assert data.startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_is_closed_in_time(stack: GatewayStack) -> None:
    with connect(stack, HEALTH) as connection:
        assert answer_of(connection)[0] == 200
        elapsed_s, data = until_closed(connection)
    assert data == b""
    assert KEEP_ALIVE_S / 2 < elapsed_s < KEEP_ALIVE_S + 3


def test_a_body_that_trickles_in_behind_its_refusal_holds_nothing(stack: GatewayStack) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    with connect(stack, head) as connection:
        assert answer_of(connection)[0] == 404
        started_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - started_s < 6:
                connection.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - started_s < HEAD_TIMEOUT_S + 3


def test_an_endless_head_is_refused(stack: GatewayStack) -> None:
    with connect(stack, HEALTH[:-2]) as connection:
        with contextlib.suppress(ConnectionError):
            for number in range(100):
                connection.sendall(b"x-%d: " % number + b"y" * 2000 + b"\r\n")
                time.sleep(0.001)
        _, data = until_closed(connection)
    assert data.startswith(b"HTTP/1.1 431 ") or not data  # what it went on to send may have cost it the answer
    assert num_cut(stack, "head_too_large") == 1


def test_a_few_requests_may_wait_behind_another_and_many_may_not(stack: GatewayStack) -> None:
    with connect(stack, HEALTH * 10) as connection:
        answers = b""
        while answers.count(b"HTTP/1.1 200 OK") < 10:
            answers += connection.recv(1 << 16)
    with connect(stack, HEALTH * 5000) as connection:
        elapsed_s, data = until_closed(connection)
    assert elapsed_s < 3
    assert data.count(b"HTTP/1.1 200 OK") < 50


def test_beyond_the_limit_the_longest_idle_makes_room_and_else_503(tmp_path: Path) -> None:
    with running_gateway(tmp_path, max_connections=5) as stack, contextlib.ExitStack() as open_ones:
        idle = [open_ones.enter_context(connect(stack, HEALTH)) for _ in range(2)]
        for connection in idle:
            assert answer_of(connection)[0] == 200
        stack.http.get("/health")  # its connection is the last that became idle
        stack.do(stack.tokenizer.may_step.clear)
        for _ in range(2):
            open_ones.enter_context(connect(stack, post(BODY)))
        stack.wait_for(lambda: len(stack.tokenizer.starts) == 2)
        third = open_ones.enter_context(connect(stack, post(BODY)))
        assert until_closed(idle[0])[0] < 2
        stack.wait_for(lambda: len(stack.tokenizer.starts) == 3)
        idle[1].sendall(HEALTH)
        assert answer_of(idle[1])[0] == 200
        last = [open_ones.enter_context(connect(stack, post(BODY))) for _ in range(2)]  # two were idle
        stack.wait_for(lambda: len(stack.tokenizer.starts) == 5)
        with connect(stack, post(BODY)) as refused:
            status, body = answer_of(refused)
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        stack.do(stack.tokenizer.may_step.set)
        for connection in (third, *last):
            assert answer_of(connection)[0] == 200
        with connect(stack, post(BODY)) as connection:
            assert answer_of(connection)[0] == 200
        assert num_cut(stack, "no_room") == 1
        assert num_cut(stack, "idle") >= 2


@pytest.mark.parametrize("is_half_closed", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_ended_answer_that_nobody_reads_is_given_up_in_time(
    stack: GatewayStack, stream: bool, is_half_closed: bool
) -> None:
    reason = 'tokenloom_gateway_requests_ended_early_total{reason="slow_reader"}'
    before, cut_before = metric(stack, reason), num_cut(stack, "slow_reader")
    stack.tokenizer.repeat = 1 << 17  # no more than may wait for a busy reader
    with connect(stack, post({**BODY, "stream": stream, "max_tokens": 8}), receive_buffer=4096) as connection:
        if is_half_closed:
            num_taken = 0
            while num_taken < 20_000:  # the rest waits
                num_taken += len(connection.recv(20_000))
            connection.shutdown(socket.SHUT_WR)
        stack.wait_for(lambda: num_cut(stack, "slow_reader") == cut_before + 1)
        stack.wait_for(lambda: metric(stack, "tokenloom_gateway_connections") <= 1)
        _, data = until_closed(connection)
    assert not data.endswith(b"0\r\n\r\n")
    if stream:
        assert metric(stack, reason) >= before
    assert stack.http.get("/metrics").text.count('chat/completions"} 0.0')


def test_a_reader_that_is_slow_but_steady_gets_all(stack: GatewayStack) -> None:
    stack.tokenizer.repeat = 1 << 14
    before = num_cut(stack, "slow_reader")
    with connect(stack, post({**BODY, "max_tokens": 8}), receive_buffer=32 << 10) as connection:
        data = b""
        while b"}]" not in data[-400:] or b'"usage"' not in data[-400:]:
            data += connection.recv(32 << 10)
            time.sleep(0.01)
    assert num_cut(stack, "slow_reader") == before
    assert len(data) > 8 * (1 << 14)


def test_others_are_served_meanwhile(stack: GatewayStack) -> None:
    with contextlib.ExitStack() as open_ones:
        for number in range(60):
            open_ones.enter_context(connect(stack, (b"", HEALTH[:9], post(BODY)[:-5])[number % 3]))
        answer = httpx.post(f"{stack.url}{CHAT}", json=BODY, timeout=5)
        assert answer.status_code == 200
