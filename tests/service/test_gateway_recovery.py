"""The gateway when a tokenizer dies: clients see a pause, and nothing is lost, repeated or made twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.openai_streams import events_of, joined
from tests.service.gateway_stack import GatewayStack, running_gateway
from tokenloom.common.errors import Unavailable

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi there"}], "temperature": 0, "max_tokens": 12}
DETAILS: dict[str, Any] = {
    "n": 2,
    "seed": 3,
    "temperature": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}
COMPLETION: dict[str, Any] = {
    "prompt": ["the quick brown fox", "jumps"],
    "n": 2,
    "seed": 3,
    "max_tokens": 5,
    "echo": True,
    "logprobs": 1,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[GatewayStack]:
    with running_gateway(tmp_path) as running:
        yield running


def post(stack: GatewayStack, path: str, body: dict[str, Any]) -> httpx.Response:
    return stack.http.post(path, json=body, timeout=20)


def in_thread(
    stack: GatewayStack, body: dict[str, Any], path: str = CHAT
) -> tuple[threading.Thread, list[httpx.Response]]:
    """Post a body from another thread. Returns: the thread, and a list that will hold the answer."""
    answers: list[httpx.Response] = []

    def work() -> None:
        with contextlib.suppress(httpx.TransportError):
            answers.append(post(stack, path, body))

    thread = threading.Thread(target=work)
    thread.start()
    return thread, answers


@pytest.mark.parametrize(("path", "body"), [(CHAT, {**BODY, **DETAILS}), (COMPLETIONS, COMPLETION)])
def test_a_stream_cut_at_any_frame_is_the_undisturbed_one(stack: GatewayStack, path: str, body: dict[str, Any]) -> None:
    stack.tokenizer.tail = " ...and"
    stack.tokenizer.lengths = {1: 4}
    body = {**body, "stream": True}
    undisturbed = joined(post(stack, path, body).text)
    assert undisturbed["is_done"]
    assert [choice["ends"] for choice in undisturbed["choices"].values()] == [[("length", None)]] * len(
        undisturbed["choices"]
    )
    for num_frames in range(15):
        stack.tokenizer.drops = [num_frames]
        stack.do(stack.tokenizer.drop_sessions)  # the next session has so many frames
        stack.wait_for(lambda: not stack.tokenizer.drops)
        stack.wait_for(lambda: stack.http.get("/ready").status_code == 200)
        found = joined(post(stack, path, body).text)
        if num_frames < 2:  # an engine that gets it again finds more in its cache, and the first one told nothing
            found["usage"]["prompt_tokens_details"] = undisturbed["usage"]["prompt_tokens_details"]
        assert found == undisturbed, num_frames


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_and_a_third_loss_in_the_middle_of_a_recovery_change_nothing(
    stack: GatewayStack, stream: bool
) -> None:
    body = {**BODY, **DETAILS, "stream": stream}
    if not stream:
        del body["stream_options"]
    undisturbed = post(stack, CHAT, body)
    stack.tokenizer.drops = [3, 0, 1, 2, 4]
    stack.do(stack.tokenizer.drop_sessions)
    stack.wait_for(lambda: len(stack.tokenizer.drops) < 5)
    found = post(stack, CHAT, body)
    assert not stack.tokenizer.drops, found.text
    if stream:
        assert joined(found.text) == joined(undisturbed.text)
    else:
        for part in ("choices", "usage", "prompt_token_ids"):
            assert found.json()[part] == undisturbed.json()[part]


def test_a_choice_that_had_ended_is_not_asked_for_again_and_ids_go_instead_of_text(stack: GatewayStack) -> None:
    stack.tokenizer.lengths = {0: 2}
    with stack.http.stream("POST", CHAT, json={**BODY, **DETAILS, "stream": True, "max_tokens": 400}) as answer:
        lines = answer.iter_lines()
        while '"finish_reason":"length"' not in next(lines):
            pass
        stack.do(stack.tokenizer.drop_sessions)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    first, again = stack.tokenizer.starts
    assert again.age_ms >= 0
    assert again.HasField("age_ms")
    assert not again.chat.messages
    assert again.chat.prompt_token_ids.ids == [0, 1, 2]
    options = again.chat.options
    assert (options.request_id, options.sampling) == (first.chat.options.request_id, first.chat.options.sampling)
    assert options.finished_choices == [0]
    assert options.resume_token_ids[0].ids == [1000, 1001]
    assert len(options.resume_token_ids[1].ids) >= 2
    assert options.num_cached_tokens == {0: 1, 1: 1}
    assert 0 < options.remaining_time_ms <= first.chat.options.remaining_time_ms


@pytest.mark.parametrize("holds_ends", [False, True])
def test_what_an_end_sets_free_is_told_once_whether_or_not_the_end_was_lost(
    stack: GatewayStack, holds_ends: bool
) -> None:
    stack.tokenizer.tail = " tail"
    stack.tokenizer.holds_ends = holds_ends
    thread, answers = in_thread(stack, {**BODY, "stream": True})
    stack.wait_for(lambda: len(stack.tokenizer.starts) == 1)
    if holds_ends:
        threading.Event().wait(0.2)  # by then the tail was told

        def lose_the_end() -> None:
            stack.tokenizer.drop_sessions()
            stack.tokenizer.holds_ends = False

        stack.do(lose_the_end)
    thread.join()
    [choice] = joined(answers[0].text)["choices"].values()
    assert choice["text"].endswith(" tail")
    assert choice["text"].count("tail") == 1
    assert choice["ends"] == [("length", None)]
    assert len(stack.tokenizer.starts) == 1 + holds_ends


def test_a_killed_tokenizer_that_comes_back_costs_no_request_and_new_ones_wait_for_it(stack: GatewayStack) -> None:
    long = {**BODY, "max_tokens": 400}
    expected = post(stack, CHAT, long).json()["choices"]
    running = [in_thread(stack, {**long, "stream": stream}) for stream in (False, True)]
    stack.wait_for(lambda: len(stack.tokenizer.starts) == 3)
    stack.run(stack.tokenizer.stop())
    stack.wait_for(lambda: stack.http.get("/ready").status_code == 503)
    late = in_thread(stack, long)
    threading.Event().wait(0.1)
    stack.run(stack.restart_tokenizer())
    for thread, _ in (*running, late):
        thread.join()
    assert late[1][0].json()["choices"] == expected
    assert running[0][1][0].json()["choices"] == expected
    assert joined(running[1][1][0].text)["choices"][0]["text"] == expected[0]["message"]["content"]
    assert sorted(start.HasField("age_ms") for start in stack.tokenizer.starts) == [False, True, True]


def test_with_two_tokenizers_requests_go_on_through_the_other_at_once(tmp_path: Path) -> None:
    with running_gateway(tmp_path, num_tokenizers=2) as stack:
        stack.wait_for(lambda: '1.sock"} 1.0' in stack.http.get("/metrics").text)
        long = {**BODY, **DETAILS, "max_tokens": 300, "stream": True}
        undisturbed = joined(post(stack, CHAT, long).text)
        for tokenizer in stack.tokenizers:
            tokenizer.starts.clear()
        running = [in_thread(stack, long) for _ in range(6)]
        stack.wait_for(lambda: [len(tokenizer.starts) for tokenizer in stack.tokenizers] == [3, 3])
        stack.run(stack.tokenizers[0].stop())
        for thread, _ in running:
            thread.join()
        assert [joined(answers[0].text) for _, answers in running] == [undisturbed] * 6
        assert len(stack.tokenizers[1].starts) == 6


def test_a_client_that_goes_away_in_a_recovery_is_cancelled(stack: GatewayStack) -> None:
    def connect() -> Any:
        return stack.http.stream("POST", CHAT, json={**BODY, "max_tokens": 100_000, "stream": True})

    with connect() as answer:
        lines = answer.iter_lines()
        next(lines)
        stack.run(stack.tokenizer.stop())
        stack.wait_for(lambda: not stack.stage._pool._clients[0].is_up)
    stack.wait_for(lambda: stack.stage._pool.num_in_flight == 0)  # it left while nobody could be told
    stack.run(stack.restart_tokenizer())
    stack.wait_for(lambda: len(stack.tokenizer.cancelled) == 1)  # now somebody can
    stack.wait_for(lambda: stack.http.get("/ready").status_code == 200)
    with connect() as answer:
        lines = answer.iter_lines()
        next(lines)
        stack.do(stack.tokenizer.drop_sessions)
        stack.wait_for(lambda: len(stack.tokenizer.starts) == 3)
    stack.wait_for(lambda: len(stack.tokenizer.cancelled) == 2)


def test_what_waits_for_a_slow_client_outlives_its_tokenizer(stack: GatewayStack) -> None:
    stack.tokenizer.repeat = 512
    body = {**BODY, "max_tokens": 300, "stream": True}
    undisturbed = joined(post(stack, CHAT, body).text)
    with stack.http.stream("POST", CHAT, json=body) as answer:
        for _ in range(3):  # more than the sockets hold waits in the gateway by then
            threading.Event().wait(0.15)
            stack.do(stack.tokenizer.drop_sessions)
        assert joined(answer.read().decode()) == undisturbed
    assert len(stack.tokenizer.starts) >= 4


def test_requests_wait_for_a_tokenizer_only_so_long(tmp_path: Path) -> None:
    with running_gateway(tmp_path, takeover_limit_s=0.4) as stack:
        begun = in_thread(stack, {**BODY, "max_tokens": 100_000, "stream": True})
        stack.wait_for(lambda: "time_to_first_token_seconds_count" in stack.http.get("/metrics").text)
        stack.do(stack.tokenizer.may_step.clear)
        waiting = in_thread(stack, BODY)
        stack.wait_for(lambda: len(stack.tokenizer.starts) == 2)
        stack.run(stack.tokenizer.stop())
        new = post(stack, CHAT, BODY)
        for thread, _ in (begun, waiting):
            thread.join()
        last = events_of(begun[1][0].text)[-1]
        assert last["error"]["code"] == "session_lost"
        assert (waiting[1][0].status_code, waiting[1][0].json()["error"]["code"]) == (503, "session_lost")
        assert (new.status_code, new.json()["error"]["code"]) == (503, "no_tokenizer")
        assert new.headers["retry-after"] == "1"
        refused = post(stack, CHAT, BODY)  # at once now
        assert (refused.status_code, refused.elapsed.total_seconds() < 0.3) == (503, True)
        assert stack.http.get("/v1/models").status_code == 503


def test_a_request_whose_time_is_up_in_a_recovery_is_answered_504(stack: GatewayStack) -> None:
    stack.do(stack.tokenizer.may_step.clear)
    thread, answers = in_thread(stack, {**BODY, "timeout": 0.5})
    stack.wait_for(lambda: len(stack.tokenizer.starts) == 1)
    stack.run(stack.tokenizer.stop())
    thread.join()
    assert answers[0].status_code == 504


def test_requests_go_on_only_through_a_healthy_tokenizer(stack: GatewayStack) -> None:
    stack.do(stack.tokenizer.may_step.clear)
    thread, answers = in_thread(stack, BODY)
    stack.wait_for(lambda: len(stack.tokenizer.starts) == 1)
    stack.run(stack.tokenizer.set_serving(False))
    stack.wait_for(lambda: stack.http.get("/ready").status_code == 503)
    stack.do(stack.tokenizer.may_step.set)
    stack.do(stack.tokenizer.drop_sessions)
    stack.wait_for(lambda: 'tokenizer0.sock"} 1.0' in stack.http.get("/metrics").text)
    threading.Event().wait(0.1)
    assert len(stack.tokenizer.starts) == 1
    stack.run(stack.tokenizer.set_serving(True))
    thread.join()
    assert answers[0].status_code == 200
    assert len(stack.tokenizer.starts) == 2


def test_a_tokenizer_that_stops_gives_its_requests_back(tmp_path: Path) -> None:
    with running_gateway(tmp_path, num_tokenizers=2) as stack:
        stack.wait_for(lambda: '1.sock"} 1.0' in stack.http.get("/metrics").text)
        undisturbed = joined(post(stack, CHAT, {**BODY, **DETAILS, "stream": True}).text)
        first = next(tokenizer for tokenizer in stack.tokenizers if tokenizer.starts)
        first.may_step.clear()
        thread, answers = in_thread(stack, {**BODY, **DETAILS, "stream": True})
        stack.wait_for(lambda: len(first.starts) == 2)
        stack.do(first.ask_for_no_more)
        first.failure = Unavailable("the server stops", reason="DRAINING")
        stack.do(first.may_step.set)
        thread.join()
        assert joined(answers[0].text) == undisturbed
        assert len(first.starts) == 2
