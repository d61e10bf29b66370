"""Overload seen from outside, with real processes: crowds of connections, slow readers, storms of aborts.

What each test finds is printed (`pytest -s`), the full sizes run with `-m slow`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.cluster import Cluster
from tests.system.crowds import (
    ABORTED,
    ENDED_EARLY,
    FULL,
    HEALTH,
    RUNNING,
    SIZES,
    USAGE,
    WAITING,
    Clients,
    Size,
    completion,
    drip,
    logs_clean,
    metrics_of,
    num_held,
    num_open_files,
    read_all,
    resident_mb,
    until,
    until_idle,
    wait_for_answers,
)
from tests.system.in_process import total
from tokenloom.api.v1 import common_pb2, engine_pb2, engine_pb2_grpc, inference_pb2, inference_pb2_grpc
from tokenloom.common.channel import PUBLIC_MESSAGE_BYTES, bearer_metadata, make_channel
from tokenloom.common.open_files import raise_open_file_limit

TOKEN = secrets.token_hex(16)
ENVIRON = {"TOKENLOOM_CLUSTER_TOKEN": TOKEN, "TOKENLOOM_LOG_LEVEL": "warning"}
MAX_NUM_SEQS = 64
HEAD_TIMEOUT_S, WRITE_TIMEOUT_S = 4.0, 5.0
LAST_CLASS = 3  # crowds wait behind others, as a good neighbour's jobs do
SETTINGS: dict[str, dict[str, object]] = {
    "executor": {"kv_cache_bytes": "24MiB"},  # its pages become resident when they are first written
    "scheduler": {"max_num_seqs": MAX_NUM_SEQS, "max_num_waiting": 4096, "ageing_s": 0},
    "gateway": {
        "head_timeout_s": HEAD_TIMEOUT_S,
        "body_timeout_s": HEAD_TIMEOUT_S,
        "keep_alive_s": 6,
        "write_timeout_s": WRITE_TIMEOUT_S,
        "max_buffered_bytes": "64KiB",
    },
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    raise_open_file_limit()
    with Cluster(settings=SETTINGS, environ=ENVIRON) as running:
        complete(running, 8)
        yield running


def complete(cluster: Cluster, num_tokens: int, **body: Any) -> float:
    """A greedy completion of its own prompt; returns the seconds that it took."""
    body = {"prompt": f"The fox {secrets.token_hex(2)}", "temperature": 0, "ignore_eos": True, **body}
    started_s = time.monotonic()
    with cluster.client() as client:
        answer = client.post("/v1/completions", json={**body, "max_tokens": num_tokens})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == num_tokens
    return time.monotonic() - started_s


def health_s(cluster: Cluster) -> float:
    started_s = time.monotonic()
    assert httpx.get(f"{cluster.url()}/health", timeout=20, trust_env=False).status_code == 200
    return time.monotonic() - started_s


def open_crowd(cluster: Cluster, clients: Clients, num_connections: int) -> int:
    """A fifth each: idle after an answer, silent, half a head, half a body, a stream that runs or waits.

    Returns: the streams.
    """
    fifth = num_connections // 5
    idle = [clients.open(HEALTH) for _ in range(fifth)]
    streams = [
        clients.open(completion(prompt=[5, 6, number % 500], max_tokens=1000, stream=True, priority=LAST_CLASS))
        for number in range(fifth)
    ]
    for sent in (b"", HEALTH[:20], completion(prompt="The fox")[:-4]):
        for _ in range(fifth):
            clients.open(sent)
    wait_for_answers(idle, 30)
    assert len(streams) == fifth
    return fifth


def check_connections(cluster: Cluster, num_connections: int) -> dict[str, float]:
    """Open a crowd, be served beside it, see that what gives nothing is closed. Returns what was measured."""
    idle_files = num_open_files(cluster.pid("gateway"))
    alone = statistics.median(complete(cluster, 8) for _ in range(5))
    with Clients(cluster) as clients:
        opened_s = time.monotonic()
        num_streams = open_crowd(cluster, clients, num_connections)
        opened_s = time.monotonic() - opened_s
        beside = [complete(cluster, 8, priority=0) for _ in range(8)]
        health = [health_s(cluster) for _ in range(8)]
        most_files = num_open_files(cluster.pid("gateway"))
        closed_s, _ = until(
            cluster, lambda m: total(m, "tokenloom_gateway_connections") <= num_streams + 2, HEAD_TIMEOUT_S + 20
        )
    idle_s, after = until_idle(cluster, 10)
    until(cluster, lambda m: total(m, "tokenloom_gateway_connections") <= 1, 5)
    assert num_open_files(cluster.pid("gateway")) <= idle_files + 3
    assert max(beside) < 15
    assert max(health) < 2
    assert total(after, "tokenloom_gateway_requests_in_flight") <= 1
    return {
        "connections": num_connections,
        "open_s": opened_s,
        "8_tokens_alone_s": alone,
        "8_tokens_p50_s": statistics.median(beside),
        "8_tokens_max_s": max(beside),
        "health_max_s": max(health),
        "files": most_files,
        "silent_closed_s": closed_s,
        "streams_aborted_s": idle_s,
    }


@pytest.mark.parametrize("size", SIZES)
def test_new_requests_are_served_beside_a_crowd_of_connections(cluster: Cluster, size: Size) -> None:
    with logs_clean(cluster):
        show(check_connections(cluster, size.num_connections))


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_at_the_limit_of_open_files_new_connections_are_closed_and_the_gateway_goes_on(cluster: Cluster) -> None:
    pid = cluster.pid("gateway")
    assert pid is not None
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft == hard, "raised at start"
    with Clients(cluster) as clients:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open_files(pid) + 20, hard))
        try:
            answered = 0
            for connection in [clients.open() for _ in range(100)]:
                with contextlib.suppress(ConnectionError):  # it may have been closed already
                    connection.sendall(HEALTH)
                    answered += bool(connection.recv(1000))
            assert 1 <= answered <= 25
            used_s = cpu_s(pid)
            time.sleep(0.5)
            assert cpu_s(pid) - used_s < 0.25, "it spins"
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    complete(cluster, 8)


def open_readers(clients: Clients, num_readers: int, **options: Any) -> None:
    """Streams with much to read: a kilobyte and more per token."""
    for number in range(num_readers):
        prompt = [7, 8, number % 500, number // 500]
        body = {"prompt": prompt, "logprobs": 20, "max_tokens": 1000, "stream": True, "priority": LAST_CLASS}
        clients.open(completion(**body), **options)


def tokens_per_s(cluster: Cluster, num_tokens: int = 150) -> float:
    return num_tokens / complete(cluster, num_tokens, priority=0)


def rate_beside_quick_readers(cluster: Cluster) -> float:
    """Tokens per second of a client while the other rows are those of readers that take all at once."""
    with Clients(cluster) as clients:
        open_readers(clients, MAX_NUM_SEQS - 1)
        wait_for_answers(clients.sockets, 60)
        with read_all(clients.sockets):
            return statistics.median(tokens_per_s(cluster, 50) for _ in range(3))


def check_slow_readers(cluster: Cluster, num_slow: int, *, compares: bool) -> dict[str, float]:
    """A client beside slow readers is as fast as beside quick ones; each slow one loses its request."""
    alone = statistics.median(tokens_per_s(cluster) for _ in range(3))
    beside_quick = rate_beside_quick_readers(cluster) if compares else alone / 20
    _, before = until_idle(cluster, 10)
    memory = resident_mb(cluster)
    most, rates, opened_s = dict(memory), [], time.monotonic()
    slow_reader = f'{ENDED_EARLY}{{reason="slow_reader"}}'
    with Clients(cluster) as clients:
        open_readers(clients, num_slow, receive_buffer=4096)
        while (ended := metrics_of(cluster).get(slow_reader, 0) - before.get(slow_reader, 0)) < num_slow:
            assert time.monotonic() < opened_s + 400, f"{ended} of {num_slow} lost their requests"
            rates.append(tokens_per_s(cluster))
            drip(clients.sockets[::2], 16)  # half of them read a few bytes now and then
            most = {stage: max(most[stage], now) for stage, now in resident_mb(cluster).items()}
        ended_s = time.monotonic() - opened_s
        until_idle(cluster, 10)  # although their connections are still open, or are cut just now
        cut_s, _ = until(cluster, lambda m: total(m, "tokenloom_gateway_connections") <= 1, 30)
        after_all = statistics.median(tokens_per_s(cluster) for _ in range(3))
    _, after = until_idle(cluster, 10)
    assert after[slow_reader] - before.get(slow_reader, 0) == num_slow
    grown = {f"{stage}_grew_mb": most[stage] - memory[stage] for stage in most}
    assert grown["gateway_grew_mb"] < 60 + num_slow * 0.8  # 64 KiB of logprobs, as objects, and an event being written
    assert max(grown["scheduler_grew_mb"], grown["tokenizer_grew_mb"]) < 100  # the recorder's ring is 32 MiB of it
    assert statistics.median(rates) > beside_quick / 2
    return {
        "readers": num_slow,
        "alone_tok_s": alone,
        "beside_63_quick": beside_quick,
        "beside_slow_p50": statistics.median(rates),
        "beside_slow_min": min(rates),
        "all_ended_s": ended_s,
        "connections_gone_s": cut_s,
        "afterwards": after_all,
        **grown,
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SIZES)
def test_slow_readers_hold_nobody_and_lose_their_requests(cluster: Cluster, size: Size) -> None:
    with logs_clean(cluster):
        show(check_slow_readers(cluster, size.num_slow, compares=size is FULL))


NUM_ALIVE = (RUNNING, WAITING)
CANCELLED = 'tokenloom_tokenizer_requests_total{kind="complete",outcome="cancelled"}'


def storm_prompt(number: int) -> list[int]:
    """Every eighth is long, so that some prompts are half computed when the storm comes."""
    return [9, 10, number % 500, number // 500, *([40, 41, 42] * (200 if number % 8 == 0 else 5))]


def num_choices_of(number: int) -> int:
    return 2 if number % 4 == 0 else 1


def wait_until_all_are_in(cluster: Cluster, num_calls: int) -> dict[str, float]:
    """Wait until the engine has every choice, most of them in the queue."""
    num_choices = sum(map(num_choices_of, range(num_calls)))
    _, full = until(cluster, lambda m: sum(total(m, name) for name in NUM_ALIVE) == num_choices, 60)
    assert total(full, RUNNING) > MAX_NUM_SEQS // 2  # second choices wait until the first has their prompt
    assert total(full, USAGE) > 0
    return full


def check_after_storm(cluster: Cluster, num_calls: int, before: dict[str, float]) -> tuple[float, dict[str, float]]:
    """All is at zero within 5 s, and each choice was counted once."""
    seconds, after = until_idle(cluster, 5)
    num_choices = sum(map(num_choices_of, range(num_calls)))
    assert after[ABORTED] - before.get(ABORTED, 0) == num_choices
    assert total(after, USAGE) == total(before, USAGE) == 0
    return seconds, after


def storm_over_http(cluster: Cluster, num_calls: int) -> float:
    _, before = until_idle(cluster, 10)
    with Clients(cluster) as clients:
        for number in range(num_calls):
            clients.open(completion(prompt=storm_prompt(number), n=num_choices_of(number), max_tokens=400, stream=True))
        wait_until_all_are_in(cluster, num_calls)
        clients.close()
        seconds, after = check_after_storm(cluster, num_calls, before)
    left = f'{ENDED_EARLY}{{reason="client_disconnected"}}'
    assert after[left] - before.get(left, 0) == num_calls
    assert after[CANCELLED] - before.get(CANCELLED, 0) == num_calls
    return seconds


def complete_request(number: int) -> inference_pb2.CompleteRequest:
    stop = common_pb2.StopConditions(max_tokens=400, ignore_eos=True)
    options = inference_pb2.GenerationOptions(
        num_choices=num_choices_of(number), stop=stop, request_id=f"storm-{number}"
    )
    prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=storm_prompt(number)))
    return inference_pb2.CompleteRequest(prompts=[prompt], options=options)


async def storm_over_grpc(cluster: Cluster, num_calls: int, *, by_abort: bool) -> float:
    """Calls are cancelled by their client, or aborted at the engine by whoever knows their ids."""
    _, before = await asyncio.to_thread(until_idle, cluster, 10)
    credential = bearer_metadata(TOKEN)
    async with (
        make_channel(cluster.address("tokenizer"), max_message_bytes=PUBLIC_MESSAGE_BYTES) as public,
        make_channel(cluster.address("scheduler")) as internal,
    ):
        stub: Any = inference_pb2_grpc.InferenceServiceStub(public)
        engine: Any = engine_pb2_grpc.EngineServiceStub(internal)
        calls = [stub.Complete(complete_request(number)) for number in range(num_calls)]
        reads = [asyncio.ensure_future(read(call)) for call in calls]
        await asyncio.to_thread(wait_until_all_are_in, cluster, num_calls)
        if by_abort:
            requests = [engine_pb2.AbortRequest(request_id=f"storm-{number}") for number in range(num_calls)]
            answers = await asyncio.gather(*(engine.Abort(request, metadata=credential) for request in requests))
            assert {answer.outcome for answer in answers} == {engine_pb2.AbortResponse.OUTCOME_ABORTED}
        else:
            for call in calls:
                call.cancel()
        seconds, _ = await asyncio.to_thread(check_after_storm, cluster, num_calls, before)
        assert set(await asyncio.gather(*reads)) == {grpc.StatusCode.CANCELLED}
    return seconds


async def read(call: Any) -> grpc.StatusCode | None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            pass
    code: grpc.StatusCode = await call.code()
    return code


@pytest.mark.parametrize("size", SIZES)
def test_a_storm_of_aborts_leaves_nothing_and_is_counted(cluster: Cluster, size: Size) -> None:
    num_calls = size.num_aborted
    with logs_clean(cluster):
        measured = {
            "http_s": storm_over_http(cluster, num_calls),
            "grpc_s": asyncio.run(storm_over_grpc(cluster, num_calls, by_abort=False)),
            "abort_rpc_s": asyncio.run(storm_over_grpc(cluster, num_calls, by_abort=True)),
        }
        show({"calls": num_calls, **measured})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_flat_over_rounds_of_all_of_it(cluster: Cluster) -> None:
    """The first rounds leave buffers that grew, the recorder's ring and holes in the heap; later ones add none."""
    rounds = []
    for _ in range(5):
        check_connections(cluster, 500)
        check_slow_readers(cluster, 40, compares=False)
        storm_over_http(cluster, 300)
        asyncio.run(storm_over_grpc(cluster, 300, by_abort=False))
        asyncio.run(storm_over_grpc(cluster, 300, by_abort=True))
        time.sleep(1)
        rounds.append(resident_mb(cluster))
        show(rounds[-1])
    # It goes up and down by what malloc has not given back yet, so that the lower of two rounds counts.
    first, last = rounds[:2], rounds[-2:]
    grown = {stage: min(found[stage] for found in last) - max(found[stage] for found in first) for stage in rounds[0]}
    assert max(grown.values()) < 10, rounds


SLOW_SIZES = [pytest.param(100, id="short"), pytest.param(500, id="full", marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_requests", SLOW_SIZES)
def test_a_gateway_that_stops_reading_costs_the_stages_behind_it_little_and_not_for_long(
    cluster: Cluster, num_requests: int
) -> None:
    until_idle(cluster, 10)
    memory = resident_mb(cluster)
    with Clients(cluster) as clients:
        open_readers(clients, num_requests)
        until(cluster, lambda m: total(m, RUNNING) + total(m, WAITING) == num_requests, 30)
        stopped_s = time.monotonic()
        cluster.kill("gateway", signal.SIGSTOP)
        try:
            most = dict(memory)
            while held := num_held({**cluster.metrics("tokenizer"), **cluster.metrics("scheduler")}):
                assert time.monotonic() < stopped_s + 60, held
                most = {stage: max(most[stage], now) for stage, now in resident_mb(cluster).items()}
                time.sleep(0.1)
            ended_s = time.monotonic() - stopped_s
        finally:
            cluster.kill("gateway", signal.SIGCONT)
    cluster.wait_until_ready(30)
    until_idle(cluster, 30)
    complete(cluster, 8)
    grown = {f"{stage}_grew_mb": most[stage] - memory[stage] for stage in ("tokenizer", "scheduler")}
    assert max(grown.values()) < 100  # two outboxes of 16 MiB as objects, the recorder's ring
    show({"requests": num_requests, "ended_s": ended_s, **grown})


def show(measured: dict[str, float]) -> None:
    sys.stdout.write(f"\n{ {name: round(value, 3) for name, value in measured.items()} }\n")
