"""The suite's own parts: it sees what is lost, repeated, dropped or late, and its proxy does what it says."""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.__main__ import all_cases, chosen
from tests.faults.faulty_executor import Orders
from tests.faults.grid import outcome_of
from tests.faults.load import Answer, Load, Shape, difference, incomplete, make_calls
from tests.faults.proxy import Proxy, ProxyThread
from tests.faults.site import Verdict

CHOICE: dict[str, Any] = {
    "text": "abcd",
    "token_ids": [4, 5, 6],
    "logprobs": [("a", 0, -0.5), ("bc", 1, -0.25)],
    "ends": [("length", None)],
}
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}


def answer(**changes: Any) -> dict[str, Any]:
    choice = {**copy.deepcopy(CHOICE), **changes}
    return {"choices": {0: choice}, "usage": dict(USAGE), "error": None, "is_done": True}


def test_equal_answers_have_no_difference_whatever_the_cache_held_and_how_logprobs_were_rounded() -> None:
    other = answer(logprobs=[("a", 0, -0.5004), ("bc", 1, -0.25)])
    other["usage"]["prompt_tokens_details"] = {"cached_tokens": 16}
    assert difference(answer(), other) == ""
    assert incomplete(answer()) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [4, 5, 5, 6]},  # repeated
        {"token_ids": [4, 6]},  # dropped
        {"text": "abcc"},
        {"ends": [("stop", None)]},
        {"logprobs": [("a", 0, -0.5)]},
        {"logprobs": [("a", 0, -0.6), ("bc", 1, -0.25)]},
    ],
)
def test_what_is_repeated_dropped_or_changed_is_a_difference(changes: dict[str, Any]) -> None:
    assert difference(answer(**changes), answer())


def test_an_answer_without_its_ends_is_lost() -> None:
    assert incomplete({**answer(), "is_done": False})
    assert incomplete({**answer(), "error": {"message": "gone"}})
    assert incomplete({**answer(), "usage": None})
    assert incomplete(answer(ends=[]))
    assert incomplete(answer(ends=[("stop", None), ("stop", None)]))


def test_a_pause_is_the_longest_gap_that_ends_after_the_fault() -> None:
    found = Answer(parts=[(1.0, ""), (4.0, ""), (5.0, ""), (7.0, ""), (7.5, "")])
    assert found.longest_gap_s(4.5) == 2.0
    assert found.longest_gap_s(3.5) == 3.0
    assert found.longest_gap_s(0.5) is None, "it had not begun"
    assert found.longest_gap_s(8.0) is None, "it was over"


def test_what_is_lost_wrong_or_left_behind_is_bad_and_a_long_pause_is_late() -> None:
    assert not outcome_of("x", "decode", Verdict(64, [], [], [0.1, 0.2], ""), 1.0, 0.0).is_bad
    for verdict in (
        Verdict(64, ["gone"], [], [], ""),
        Verdict(64, [], ["other"], [], ""),
        Verdict(64, [], [], [], "2 blocks"),
    ):
        assert outcome_of("x", "decode", verdict, 1.0, 0.0).is_bad
    late = outcome_of("x", "decode", Verdict(64, [], [], [0.1] * 60 + [3.0] * 4, ""), 1.0, 0.0)
    assert late.is_late
    assert not late.is_bad


def test_there_is_a_case_for_every_stage_kind_and_moment_and_words_choose_among_them() -> None:
    cases = all_cases()
    assert len({name for name, _ in cases}) == len(cases) == 3 * 6 * 5 + 10
    assert [name for name, _ in chosen(cases, ["executor kill"], is_quick=True)] == ["executor kill decode"]
    assert len(chosen(cases, ["scheduler cut", "poison"], is_quick=False)) == 6


def test_a_load_has_at_least_64_streams_of_all_kinds() -> None:
    calls = make_calls(Shape())
    assert sum(call.is_stream for call in calls) >= 64
    assert {call.path.rsplit("/", 1)[1] for call in calls} == {"completions"}
    assert {bool(call.body.get("n")) for call in calls} == {"logprobs" in call.body for call in calls} == {True, False}
    assert len(Load(calls, []).answers) == len(calls)


def test_an_order_is_taken_as_often_as_it_says(tmp_path: Path) -> None:
    orders = Orders(tmp_path)
    assert not orders.take("oom")
    orders.give("oom", 2)
    assert orders.take("oom")
    assert not orders.is_done("oom")
    assert orders.take("oom")
    assert orders.is_done("oom")
    assert not orders.take("oom")


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Proxy, socket.socket]]:
    """A proxy before a server that sends back what it gets, and a connection to the proxy."""
    with socket.socket(socket.AF_UNIX) as listener, ProxyThread() as thread:
        listener.bind(str(tmp_path / "server"))
        listener.listen()
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        proxy = thread.proxy(f"unix:{tmp_path}/proxy", f"unix:{tmp_path}/server")
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(tmp_path / "proxy"))
            assert ask(client) == b"ping"
            yield proxy, client


def echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(100):
            connection.sendall(data)


def ask(client: socket.socket) -> bytes:
    client.sendall(b"ping")
    return client.recv(100)


def test_the_proxy_cuts(proxied: tuple[Proxy, socket.socket]) -> None:
    proxy, client = proxied
    assert proxy.cut() == 1
    assert ended(client)


def test_the_proxy_truncates_an_answer_and_ends(proxied: tuple[Proxy, socket.socket]) -> None:
    proxy, client = proxied
    proxy.truncate()
    assert ask(client) == b"pi"
    assert ended(client)


def test_the_proxy_delays(proxied: tuple[Proxy, socket.socket]) -> None:
    proxy, client = proxied
    proxy.delay(0.1)
    began_s = time.monotonic()
    assert ask(client) == b"ping"
    assert time.monotonic() - began_s >= 0.2
    proxy.heal()


def test_the_proxy_swallows_and_delivers_when_it_is_healed(proxied: tuple[Proxy, socket.socket]) -> None:
    proxy, client = proxied
    proxy.blackhole()
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        ask(client)
    assert proxy.num_open == 1
    proxy.heal()
    client.settimeout(5)
    assert client.recv(100) == b"ping"


def ended(client: socket.socket) -> bool:
    try:
        return client.recv(100) == b""
    except ConnectionResetError:
        return True


def test_waiting_for_events_has_a_limit() -> None:
    async def wait() -> None:
        await Load(make_calls(Shape()), []).until(lambda load: load.num_events > 0, 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
