"""Case D21: health and readiness tell the truth of stages that are dead or stopped, and nothing is lost by it.

Real processes of a tiny model; the limits are shorter than the defaults so that the file is quick.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster
from tests.faults.faulty_executor import VARIABLE, Orders
from tests.openai_streams import joined
from tests.stage_process import until

STALL_S = 1.5
RED_LIMIT_S = 5.0
LIMIT_S = 150  # an executor's restart takes half a minute on a very busy machine
SLOW_S = 0.01
BODY: dict[str, Any] = {
    "model": "tiny-llama",
    "prompt": "The fox",
    "max_tokens": 60,
    "temperature": 0,
    "stream": True,
    "ignore_eos": True,
}


class Site:
    """The cluster, and its executor's orders."""

    def __init__(self, cluster: Cluster, orders: Orders) -> None:
        self.cluster = cluster
        self.orders = orders
        self.undisturbed = self.post(BODY)

    def post(self, body: dict[str, Any]) -> Any:
        """The joined answer of a stream."""
        with self.cluster.client(timeout=LIMIT_S) as client:
            answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return joined(answer.text)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """A stream that has begun, and must be the undisturbed one at the end of the block."""
        text: list[str] = []
        has_begun = threading.Event()

        def read() -> None:
            with (
                self.cluster.client(timeout=LIMIT_S) as client,
                client.stream("POST", "/v1/completions", json=BODY) as answer,
            ):
                for line in answer.iter_lines():
                    text.append(f"{line}\n")
                    if len(text) > 20:
                        has_begun.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert has_begun.wait(20)
        try:
            yield
        finally:
            thread.join(LIMIT_S)
        assert joined("".join(text)) == self.undisturbed

    def waits_for(self) -> str:
        """What /ready says the gateway waits for, nothing if it is ready; it is alive in any case."""
        with httpx.Client(base_url=self.cluster.url(), trust_env=False, timeout=2) as client:
            assert client.get("/health").status_code == 200
            answer = client.get("/ready")
        status: str = answer.json()["status"]
        assert (answer.status_code == 200) == (status == "ready")
        return "" if status == "ready" else status.removeprefix("waiting for the ")

    def seconds_until_red(self, limit_s: float) -> float:
        """Wait until /ready is red."""
        began_s = time.monotonic()
        until(self.waits_for, limit_s, "/ready stays green")
        return time.monotonic() - began_s


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    limits = {"heartbeat_s": STALL_S / 5, "stall_timeout_s": STALL_S}
    settings: dict[str, dict[str, object]] = {
        "scheduler": {**limits, "step_timeout_s": STALL_S, "executor_wait_s": LIMIT_S},
        "tokenizer": dict(limits),
        "gateway": {"stall_timeout_s": STALL_S},
    }
    folder: Path = tmp_path_factory.mktemp("orders")
    orders = Orders(folder)
    programs = {"executor": ["-m", "tests.faults.faulty_executor"]}
    with Cluster(settings=settings, programs=programs, environ={VARIABLE: str(folder)}) as cluster:
        orders.give("slow", SLOW_S)
        yield Site(cluster, orders)


@pytest.mark.parametrize("stage", ["executor", "scheduler"])
def test_a_killed_stage_turns_readiness_red_within_5_s_and_all_come_back(site: Site, stage: str) -> None:
    cluster = site.cluster
    with cluster.logs_on_failure(), site.streaming():
        cluster.kill(stage, signal.SIGKILL)
        assert site.seconds_until_red(RED_LIMIT_S) < RED_LIMIT_S
        until(lambda: not cluster.is_serving("tokenizer"), RED_LIMIT_S, "the tokenizer's health stays green")
        assert site.post(BODY) == site.undisturbed, "a request that comes now waits for the stage"
        cluster.wait_until_ready()
    assert not site.waits_for()


@pytest.mark.parametrize("stage", ["scheduler", "tokenizer"])
def test_a_stopped_stage_is_found_within_the_stall_limit_and_all_is_well_when_it_goes_on(
    site: Site, stage: str
) -> None:
    cluster = site.cluster
    with cluster.logs_on_failure(), site.streaming():
        cluster.kill(stage, signal.SIGSTOP)
        try:
            assert site.seconds_until_red(STALL_S + RED_LIMIT_S) > STALL_S / 5
            assert site.waits_for() == stage, "it says what is missing"
            if stage == "scheduler":
                assert not cluster.is_serving("tokenizer")
        finally:
            cluster.kill(stage, signal.SIGCONT)
        assert site.post(BODY) == site.undisturbed
        cluster.wait_until_ready()
    assert not site.waits_for()


def test_a_long_prefill_never_turns_red(site: Site) -> None:
    """Steps that take longer than the stall limit, as those of a long prompt on a slow machine, but move."""
    seen: set[str] = set()
    body = {**BODY, "prompt": "The fox " * 120, "max_tokens": 1}
    num_starts = site.cluster.num_starts("executor")
    site.orders.give("crawl", 0.6 * STALL_S)  # two layers
    try:
        with site.cluster.logs_on_failure():
            answers: list[Any] = []
            thread = threading.Thread(target=lambda: answers.append(site.post(body)))
            began_s = time.monotonic()
            thread.start()
            while thread.is_alive():
                seen.add(site.waits_for())
                thread.join(0.1)
            assert time.monotonic() - began_s > STALL_S
            assert seen == {""}
            assert answers
            assert answers[0]["is_done"]
            assert site.cluster.num_starts("executor") == num_starts
            assert "executor lost" not in site.cluster.log("scheduler").rpartition("executor ready")[2]
    finally:
        site.orders.withdraw()


def test_a_stopped_executor_is_found_and_when_it_stays_away_requests_fail_with_503(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run, one with an error event, and new ones at once; when it goes on all is well."""
    cluster = site.cluster
    cluster.stop_stage("scheduler")
    monkeypatch.setitem(cluster._settings["scheduler"], "executor_wait_s", 1.0)
    cluster.start_stage("scheduler")
    cluster.wait_until_ready()
    answers: list[httpx.Response] = []

    def post(**changes: Any) -> None:
        with cluster.client() as client:
            answers.append(client.post("/v1/completions", json={**BODY, "max_tokens": 900, **changes}))

    with cluster.logs_on_failure():
        threads = [threading.Thread(target=post, kwargs={"stream": is_stream}) for is_stream in (True, False)]
        site.orders.give("slow", 0.02)
        for thread in threads:
            thread.start()
        until(lambda: cluster.metrics("scheduler")["tokenloom_num_requests_running"] == 2, 10, "they do not run")
        cluster.kill("executor", signal.SIGSTOP)
        try:
            assert site.seconds_until_red(STALL_S + RED_LIMIT_S) > STALL_S / 5
            assert site.waits_for() == "executor"
            assert not cluster.is_serving("tokenizer")
            for thread in threads:
                thread.join(20)
            began_s = time.monotonic()
            post()
            assert time.monotonic() - began_s < 1.0, "refused at once"
        finally:
            cluster.kill("executor", signal.SIGCONT)
        assert sorted(answer.status_code for answer in answers) == [200, 503, 503]
        assert all("executor_lost" in answer.text for answer in answers), "the stream has an error event"
        site.orders.withdraw()
        until(lambda: not site.waits_for(), 20, "it does not come back")
        assert site.post(BODY) == site.undisturbed
