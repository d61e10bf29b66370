from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from loadtest.client import Outcome
from loadtest.report import percentile, summarise, to_text
from loadtest.run import make_prompt, run
from loadtest.settings import Settings, parse_settings

SETTINGS = parse_settings(["--clients", "2", "--requests", "4", "--warmup", "1", "--prompt-tokens", "8"])
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def event(text: str = "", **fields: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}], **fields}).encode() + b"\n\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


ERROR_EVENT = b'data: {"error":{"code":"session_lost","type":"x"}}\n\n'
REFUSAL = b'{"error":{"code":"full","type":""}}'
WHOLE = HEAD + chunked(event("a"), event("b"), event(choices=[], usage=USAGE), b"data: [DONE]\n\n") + b"0\r\n\r\n"


def run_against(answer: Callable[[bytes], bytes], settings: Settings = SETTINGS) -> list[Outcome]:
    """Run the load client against a server that answers each request's bytes; empty: it hangs up."""

    handlers: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        while head := await _head(reader):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            data = answer(head + await reader.readexactly(length))
            writer.write(data)
            if not data:
                break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def both() -> list[Outcome]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        outcomes, _ = await run(replace(settings, url=f"http://127.0.0.1:{port}"))
        server.close()
        await server.wait_closed()
        await asyncio.gather(*(handler for handler in handlers if handler is not None))
        return outcomes

    return asyncio.run(both())


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def test_only_requests_after_the_warm_up_are_counted_and_prompts_are_unique() -> None:
    prompts: list[str] = []

    def answer(request: bytes) -> bytes:
        body = json.loads(request.partition(b"\r\n\r\n")[2])
        assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0, True, True)
        prompts.append(body["prompt"])
        return WHOLE

    outcomes = run_against(answer)
    assert len(outcomes) == 4
    assert len(set(prompts)) == 5
    assert [outcome.error for outcome in outcomes] == [""] * 4
    assert {(o.num_prompt_tokens, o.num_output_tokens, o.num_cached_tokens) for o in outcomes} == {(9, 2, 4)}
    assert all(outcome.first_chunk_s > 0 for outcome in outcomes)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (HEAD + chunked(event("a")) + b"0\r\n\r\n", "stream cut short"),
        (HEAD + chunked(ERROR_EVENT) + b"0\r\n\r\n", "stream error session_lost"),
        (HEAD + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n", "no text"),
        (b"HTTP/1.1 429 x\r\ncontent-length: %d\r\n\r\n%s" % (len(REFUSAL), REFUSAL), "http 429 full"),
        (b"HTTP/1.1 500 x\r\ncontent-length: 3\r\n\r\nbad", "http 500"),
        (HEAD + b"zz\r\n", "malformed answer"),
        (b"", "connection lost"),
    ],
)
def test_errors_are_counted_by_kind(answer: bytes, kind: str) -> None:
    assert {outcome.error for outcome in run_against(lambda _: answer)} == {kind}


def test_a_server_that_is_not_there_is_no_connection() -> None:
    outcomes, _ = asyncio.run(run(replace(SETTINGS, url="http://127.0.0.1:1")))
    assert {outcome.error for outcome in outcomes} == {"no connection"}


def test_the_time_limit_ends_the_test_and_the_rest_is_counted() -> None:
    settings = replace(SETTINGS, warmup=0, time_limit_s=0.2)
    outcomes = run_against(lambda _: HEAD, settings)
    assert [outcome.error for outcome in outcomes] == ["time limit"] * 4


def test_a_request_has_a_time_limit_of_its_own() -> None:
    outcomes = run_against(lambda _: HEAD, replace(SETTINGS, warmup=0, requests=2, timeout_s=0.1))
    assert [outcome.error for outcome in outcomes] == ["timeout"] * 2


def test_prompts_are_the_same_for_a_seed_and_share_only_the_prefix() -> None:
    settings = replace(SETTINGS, prompt_tokens=20, shared_prefix_tokens=12)
    first, second = make_prompt(settings, 0).split(), make_prompt(settings, 1).split()
    assert make_prompt(settings, 0).split() == first
    assert make_prompt(replace(settings, seed=1), 0).split() != first
    assert len(first) == 20
    assert first[:12] == second[:12]
    assert first[12:] != second[12:]


def test_percentiles_are_nearest_ranks() -> None:
    values = list(range(1, 101))
    assert [percentile(values, percent) for percent in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([7.0], 50) == 7.0


def test_figures_count_good_requests_only() -> None:
    good = Outcome(10.0, 12.0, [10.5, 10.6, 11.0], num_prompt_tokens=8, num_output_tokens=4, num_cached_tokens=2)
    figures = summarise(SETTINGS, [good, Outcome(10.0, 99.0, error="timeout")], 2.0)
    assert (figures["num_ok"], figures["errors"]) == (1, {"timeout": 1})
    assert (figures["output_tokens_per_s"], figures["total_tokens_per_s"]) == (2.0, 6.0)
    assert figures["time_to_first_token_ms"]["p50"] == pytest.approx(500)
    assert figures["gap_between_chunks_ms"]["p50"] == pytest.approx(100)
    assert figures["gap_between_chunks_ms"]["p99"] == pytest.approx(400)
    text = to_text(figures)
    assert "1 x timeout" in text
    assert "output tokens/s  2.0" in text
    assert "api_key" not in json.dumps(figures)


def test_figures_of_nothing_are_still_a_report() -> None:
    assert "error            4 x no connection" in to_text(
        summarise(SETTINGS, [Outcome(0.0, error="no connection")] * 4, 1.0)
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--url", "http://example.org"],
        ["--url", "ftp://127.0.0.1"],
        ["--clients", "0"],
        ["--timeout-s", "nan"],
        ["--prompt-tokens", "5", "--shared-prefix-tokens", "5"],
    ],
)
def test_wrong_settings_end_with_exit_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(argv)
    assert caught.value.code == 2


def test_another_machine_is_allowed_only_when_asked_for() -> None:
    assert parse_settings(["--url", "https://example.org", "--allow-remote"]).port == 443
