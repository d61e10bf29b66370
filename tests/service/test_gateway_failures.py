"""What happens when clients, tokenizers or the gateway itself go away."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from grpc_health.v1 import health_pb2_grpc

from tests.fakes import fake_tokens
from tests.service.gateway_stack import GatewayStack, running_gateway
from tokenloom.common.address import Address
from tokenloom.common.errors import SetupError
from tokenloom.gateway import delivery, tokenizer_pool
from tokenloom.gateway.server import listen_on
from tokenloom.gateway.tokenizer_pool import TokenizerPool

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi there"}], "temperature": 0, "max_tokens": 5}
TEXT = "".join(fake_tokens("user: hi there", 0, 5))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[GatewayStack]:
    with running_gateway(tmp_path) as running:
        yield running


def in_thread(stack: GatewayStack, body: dict[str, Any]) -> tuple[threading.Thread, list[httpx.Response]]:
    """Post a body from another thread. Returns: the thread, and a list that will hold the answer."""
    answers: list[httpx.Response] = []

    def post() -> None:
        with contextlib.suppress(httpx.TransportError):
            answers.append(stack.http.post(CHAT, json=body, timeout=20))

    thread = threading.Thread(target=post)
    thread.start()
    return thread, answers


def connect_and_post(stack: GatewayStack, body: dict[str, Any]) -> socket.socket:
    """Post a body over a plain socket with a small receive buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", stack.stage.port))
    data = orjson.dumps(body)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def in_flight(stack: GatewayStack) -> str:
    """The lines of the metrics page that count requests being answered."""
    lines = stack.http.get("/metrics").text.splitlines()
    return "\n".join(line for line in lines if line.startswith("tokenloom_gateway_requests_in_flight"))


def text_of(stream: str) -> str:
    events = [orjson.loads(event.removeprefix("data: ")) for event in stream.split("\n\n")[:-2]]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_cancelled_at_the_tokenizer(stack: GatewayStack, stream: bool) -> None:
    stack.do(stack.tokenizer.may_step.clear)
    connection = connect_and_post(stack, {**BODY, "stream": stream})
    stack.wait_for(lambda: len(stack.tokenizer.starts) == 1)
    connection.close()
    stack.wait_for(lambda: len(stack.tokenizer.cancelled) == 1)
    assert stack.tokenizer.cancelled == [stack.tokenizer.starts[0].chat.options.request_id]
    assert 'requests_ended_early_total{reason="client_disconnected"}' in stack.http.get("/metrics").text


def num_slow_readers(stack: GatewayStack) -> float:
    """Requests that slow readers lost in this process so far, those of earlier tests included."""
    name = 'tokenloom_gateway_requests_ended_early_total{reason="slow_reader"}'
    lines = stack.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_slow_reader_is_cancelled_and_cut_and_others_are_served(
    stack: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "SLOW_READER_GRACE_S", 0.2)
    num_before = num_slow_readers(stack)
    stack.tokenizer.repeat = 4096
    with connect_and_post(stack, {**BODY, "max_tokens": 5000, "stream": True}) as connection:
        stack.wait_for(lambda: len(stack.tokenizer.cancelled) == 1)
        stack.tokenizer.repeat = 1
        assert stack.http.post(CHAT, json=BODY).json()["choices"][0]["message"]["content"] == TEXT
        stack.wait_for(lambda: num_slow_readers(stack) == num_before + 1)
        threading.Event().wait(0.4)
        data = b""
        while part := connection.recv(1 << 20):
            data += part
    assert not data.endswith(b"0\r\n\r\n")  # cut in the middle, which clients tell from an end


def test_a_client_that_never_takes_its_ended_answer_is_cut_when_its_time_is_up(
    stack: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "SLOW_READER_GRACE_S", 0.1)
    monkeypatch.setattr(tokenizer_pool, "_DEADLINE_SLACK_S", 0.0)
    stack.tokenizer.repeat = 1 << 18  # more than a socket's buffers hold, less than the bound on a burst
    with connect_and_post(stack, {**BODY, "max_tokens": 8, "stream": True, "timeout": 1.0}) as connection:
        stack.wait_for(lambda: len(stack.tokenizer.starts) == 1)
        stack.wait_for(lambda: 'chat/completions"} 0.0' in in_flight(stack))
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                data += part
    assert stack.tokenizer.cancelled == []
    assert not data.endswith(b"0\r\n\r\n")


def test_a_slow_reader_that_wakes_up_gets_the_error(stack: GatewayStack) -> None:
    stack.tokenizer.repeat = 4096
    with connect_and_post(stack, {**BODY, "max_tokens": 5000, "stream": True}) as connection:
        stack.wait_for(lambda: len(stack.tokenizer.cancelled) == 1)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(1 << 20)
    assert b'"code":"slow_reader"' in data[-1000:]
    assert b"[DONE]" not in data


def test_the_watch_of_a_tokenizers_health_outlives_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = health_pb2_grpc.HealthStub

    def failing_once(channel: Any) -> Any:
        stub = real(channel)
        watch = stub.Watch

        def fail(request: Any) -> Any:
            stub.Watch = watch
            raise RuntimeError("a bug")

        stub.Watch = fail
        return stub

    monkeypatch.setattr(health_pb2_grpc, "HealthStub", failing_once)
    with running_gateway(tmp_path) as stack:  # becomes ready
        assert stack.http.post(CHAT, json=BODY).status_code == 200
    assert "a bug" in caplog.text


def test_an_answer_too_large_for_its_session_is_begun_anew_once_and_no_more(stack: GatewayStack) -> None:
    stack.tokenizer.repeat = 4 << 20  # times the text of a token: more than a message may hold
    answer = stack.http.post(CHAT, json={**BODY, "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "session_lost")
    assert len(stack.tokenizer.starts) == 2


def test_readiness_follows_the_tokenizers_health_and_liveness_does_not(stack: GatewayStack) -> None:
    def ready() -> int:
        return stack.http.get("/ready").status_code

    stack.run(stack.tokenizer.set_serving(False))
    stack.wait_for(lambda: ready() == 503)
    assert stack.http.get("/health").status_code == 200
    stack.run(stack.tokenizer.set_serving(True))
    stack.wait_for(lambda: ready() == 200)
    stack.run(stack.tokenizer.stop())
    stack.wait_for(lambda: ready() == 503)
    assert stack.http.get("/health").status_code == 200


def test_a_tokenizer_that_does_not_answer_does_not_hold_a_request_for_ever(
    stack: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "_DEADLINE_SLACK_S", 0.1)
    stack.do(stack.tokenizer.may_step.clear)
    answer = stack.http.post(CHAT, json={**BODY, "timeout": 0.2})
    assert answer.status_code == 504
    assert stack.tokenizer.starts[0].chat.options.remaining_time_ms <= 200
    stack.wait_for(lambda: len(stack.tokenizer.cancelled) == 1)


def test_requests_go_to_the_tokenizer_with_the_fewest_in_flight(tmp_path: Path) -> None:
    with running_gateway(tmp_path, num_tokenizers=2) as stack:
        stack.wait_for(lambda: '1.sock"} 1.0' in stack.http.get("/metrics").text)
        for tokenizer in stack.tokenizers:
            stack.do(tokenizer.may_step.clear)
        waiting = [in_thread(stack, BODY) for _ in range(6)]
        stack.wait_for(lambda: sum(len(tokenizer.starts) for tokenizer in stack.tokenizers) == 6)
        assert [len(tokenizer.starts) for tokenizer in stack.tokenizers] == [3, 3]
        stack.run(stack.tokenizers[0].stop())
        stack.wait_for(lambda: len(stack.tokenizers[1].starts) == 6)
        stack.do(stack.tokenizers[1].may_step.set)
        for thread, _ in waiting:
            thread.join()
        assert [answers[0].status_code for _, answers in waiting] == [200] * 6


def test_a_draining_tokenizer_ends_its_own_requests_and_new_ones_wait_for_the_next(tmp_path: Path) -> None:
    with running_gateway(tmp_path, takeover_limit_s=0.3) as stack:
        draining = stack.tokenizer
        stack.do(draining.may_step.clear)
        old, old_answers = in_thread(stack, BODY)
        stack.wait_for(lambda: len(draining.starts) == 1)
        stack.do(draining.ask_for_no_more)
        stack.wait_for(lambda: stack.http.get("/ready").status_code == 503)
        new, new_answers = in_thread(stack, BODY)
        old.join(0.5)  # longer than the limit, which begins with the end of the drain
        stack.do(draining.may_step.set)
        old.join()
        assert old_answers[0].status_code == 200
        stack.run(stack.restart_tokenizer())
        new.join()
        assert new_answers[0].status_code == 200
        assert len(draining.starts) == 1


def test_a_request_that_waited_for_the_end_of_a_drain_ends_with_503_if_no_tokenizer_comes(tmp_path: Path) -> None:
    with running_gateway(tmp_path, takeover_limit_s=0.3) as stack:
        stack.do(stack.tokenizer.ask_for_no_more)
        stack.wait_for(lambda: stack.http.get("/ready").status_code == 503)
        thread, answers = in_thread(stack, BODY)
        thread.join(0.5)
        assert not answers
        stack.run(stack.tokenizer.stop())
        thread.join()
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "no_tokenizer"
        assert answers[0].headers["retry-after"] == "1"


def test_d23_a_drain_refuses_new_requests_and_lets_running_ones_end(stack: GatewayStack) -> None:
    stack.do(stack.tokenizer.may_step.clear)
    running = [in_thread(stack, {**BODY, "stream": True}) for _ in range(3)]
    stack.wait_for(lambda: len(stack.tokenizer.starts) == 3)
    assert stack.http.get("/ready").status_code == 200
    drain = stack.begin(stack.stage.drain(8.0))
    stack.wait_for(lambda: stack.http.get("/ready").status_code == 503)
    refused = stack.http.post(CHAT, json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert refused.headers["connection"] == "close"
    assert stack.http.get("/health").status_code == 200
    stack.do(stack.tokenizer.may_step.set)
    drain.result(8)
    for thread, answers in running:
        thread.join()
        assert text_of(answers[0].text) == TEXT
        assert answers[0].text.endswith("data: [DONE]\n\n")


def test_d23_past_the_grace_period_each_stream_gets_an_error_event(stack: GatewayStack) -> None:
    endless = {**BODY, "max_tokens": 100_000, "stream": True}
    running = [in_thread(stack, endless) for _ in range(2)]
    stack.wait_for(lambda: len(stack.tokenizer.starts) == 2)
    stack.wait_for(lambda: "time_to_first_token_seconds_count" in stack.http.get("/metrics").text)
    stack.run(stack.stage.drain(0.1))
    for thread, answers in running:
        thread.join()
        last = answers[0].text.removesuffix("\n\n").split("\n\n")[-1]
        assert orjson.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    stack.wait_for(lambda: len(stack.tokenizer.cancelled) == 2)


def test_a_port_in_use_is_a_setup_error_that_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=rf"127\.0\.0\.1:{port}.*--listen"):
            listen_on(Address(host="127.0.0.1", port=port))


def test_the_file_of_a_dead_process_does_not_keep_a_unix_socket_taken(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "http.sock"))
    listen_on(address).close()
    with listen_on(address), pytest.raises(SetupError, match="in use"):
        listen_on(address)


def test_an_unexpected_error_is_logged_and_answered_as_500_in_openais_form(
    stack: GatewayStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: TokenizerPool, api_key: str) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(TokenizerPool, "list_models", fail)
    answer = stack.http.get("/v1/models")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "a bug" not in answer.text
    ours = (record for record in caplog.records if record.name != "asyncio")  # grpc may log of other loops
    [record] = [record for record in ours if record.exc_info]
    assert "a bug" in str(record.exc_info[1] if record.exc_info else "")
    assert vars(record)["request_id"] == answer.headers["x-request-id"]
