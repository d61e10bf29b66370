"""A cluster with a proxy before every stage, executors that take orders, and the undisturbed answers of its loads."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx

from tests.cluster import Cluster, Settings
from tests.faults.faulty_executor import VARIABLE, Orders
from tests.faults.load import COMPLETIONS, GREEDY, Answer, Call, Load, Shape, difference, make_calls, with_stops
from tests.faults.proxy import Proxy, ProxyThread
from tests.stage_process import until
from tokenloom.api.v1 import engine_pb2

Moment = Literal["queued", "prefill", "decode", "last", "recovery"]
MOMENTS: tuple[Moment, ...] = ("queued", "prefill", "decode", "last", "recovery")
MAX_NUM_SEQS = 96
MARKER = 0  # a token that is in no text: the prompts of requests that faults are meant for hold it
SHAPES: Mapping[str, Shape] = {
    "queued": Shape(num_streams=144, max_tokens=48, seed=1),  # about twice as many choices as may run
    "prefill": Shape(prompt_words=350, max_tokens=24, seed=2),
    "decode": Shape(max_tokens=80, seed=3),
}
_LOAD_OF: Mapping[Moment, str] = {"last": "decode", "recovery": "decode"}
_CALM_LIMIT_S = 15.0
_LOAD_LIMIT_S = 120.0
_BEGIN_LIMIT_S = 60.0


@dataclass(frozen=True)
class Undisturbed:
    """A load as it goes without faults.

    Args:
        answers: to each call.
        prefill_s: what computing all its prompts and outputs once takes.
    """

    calls: list[Call]
    answers: list[Answer]
    prefill_s: float


@dataclass(frozen=True)
class Verdict:
    """What a fault did to a load.

    Args:
        lost: calls without a whole answer, each with the reason.
        wrong: calls whose answer is not the undisturbed one, each with the difference.
        pauses_s: of the streams that had begun before the fault and ended after it, sorted.
        leftovers: what the stages still held when all was over; empty if nothing.
    """

    num_requests: int
    lost: list[str]
    wrong: list[str]
    pauses_s: list[float]
    leftovers: str


class Site:
    """Made by `running_site`."""

    def __init__(self, cluster: Cluster, proxies: Mapping[str, Proxy], orders: Orders, stall_s: float) -> None:
        self.cluster = cluster
        self.proxies = proxies
        self.orders = orders
        self.stall_s = stall_s
        self.clients: list[httpx.AsyncClient] = []
        self._undisturbed: dict[str, Undisturbed] = {}

    # --- loads ----------------------------------------------------------------------------------------------------

    async def undisturbed(self, moment: Moment) -> Undisturbed:
        """The load for a moment, run without faults when it is asked for first.

        Raises: AssertionError if it is not the same twice.
        """
        name = _LOAD_OF.get(moment, moment)
        if name not in self._undisturbed:
            plain = make_calls(SHAPES[name])
            calls = with_stops(plain, await self.answers_to(plain))
            first, second = await self.answers_to(calls), await self.answers_to(calls)
            assert not (bad := [a.error for a in (*first, *second) if a.error]), bad
            pairs = zip(first, second, strict=True)
            assert not (bad := [d for a, b in pairs if (d := difference(_result(a), _result(b)))]), bad
            self._undisturbed[name] = Undisturbed(calls, second, await self._prefill_time_s(second))
        return self._undisturbed[name]

    async def answers_to(self, calls: Sequence[Call]) -> list[Answer]:
        """Send calls and wait for all of them."""
        return await asyncio.wait_for(Load(calls, self.clients).run(), _LOAD_LIMIT_S)

    @contextlib.asynccontextmanager
    async def under_load(self, moment: Moment, more: Sequence[Call] = ()) -> AsyncIterator[Running]:
        """Send the load of a moment, with nothing of it cached, and begin the block when that moment has come.

        Args:
            more: calls that are sent along and judged by the caller; they come first among the answers.
        """
        expected = await self.undisturbed(moment)
        await asyncio.to_thread(self.flush)
        load = Load([*more, *expected.calls], self.clients)
        task = asyncio.create_task(load.run())
        try:
            await self._moment(moment, load, len(more), expected)
            yield Running(self, load, task, expected, time.monotonic(), len(more))
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _moment(self, moment: Moment, load: Load, num_more: int, expected: Undisturbed) -> None:
        if moment == "queued":
            await load.until(lambda load: load.num_begun() >= 1, _BEGIN_LIMIT_S)
        elif moment == "prefill":
            await load.until(lambda load: load.num_begun() >= 3, _BEGIN_LIMIT_S)
        elif moment == "last":
            ends = [answer.num_events for answer in expected.answers]
            lasting = [i for i, call in enumerate(expected.calls) if call.is_stream and "stop" not in call.body]
            found = load.answers[num_more:]
            await load.until(lambda _: any(found[i].num_events >= ends[i] - 2 for i in lasting), _BEGIN_LIMIT_S)
        else:
            num_streams = sum(call.is_stream for call in expected.calls)
            await load.until(lambda load: load.num_begun(15) >= num_streams // 2, _BEGIN_LIMIT_S)

    async def _prefill_time_s(self, answers: Sequence[Answer]) -> float:
        """Time to compute all prompts and outputs, as a recovery does."""
        calls = []
        for answer in answers:
            result = _result(answer)
            for choice in result["choices"].values():
                prompt = choice.get("prompt_token_ids") or []
                ids = [*prompt, *choice["token_ids"]] or [3]
                calls.append(Call(COMPLETIONS, {"prompt": ids, "max_tokens": 1, "stream": False, **GREEDY}))
        await asyncio.to_thread(self.flush)
        began_s = time.monotonic()
        failed = [answer.error for answer in await self.answers_to(calls) if answer.error]
        assert not failed, failed
        return time.monotonic() - began_s

    # --- stages ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Forget cached prefixes."""
        with self.cluster.engine() as engine:
            engine.FlushPrefixCache(engine_pb2.FlushPrefixCacheRequest(), metadata=self.cluster.metadata, timeout=10)

    def leftovers(self) -> str:
        """What stages hold although nobody asks for anything; waits a while for them to let go."""
        found = ""
        deadline_s = time.monotonic() + _CALM_LIMIT_S
        while time.monotonic() < deadline_s:
            if not (found := self._held()):
                return ""
            time.sleep(0.1)
        return found

    def _held(self) -> str:
        with self.cluster.engine() as engine:
            request = engine_pb2.GetLoadRequest()
            load = engine.GetLoad(request, metadata=self.cluster.metadata, timeout=10).load
        held = {
            "running": load.num_running,
            "waiting": load.num_waiting,
            "blocks": load.num_blocks - load.num_free_blocks,
        }
        for stage in (*self.cluster.tokenizers, *self.cluster.gateways):
            for name in ("tokenizer_active_requests", "tokenizer_active_choices", "gateway_requests_in_flight"):
                held[f"{name} of {stage}"] = int(self.cluster.total(stage, f"tokenloom_{name}"))
        return ", ".join(f"{value} {name}" for name, value in held.items() if value)

    def time_until_serving(self, stage: str, since_s: float, limit_s: float = 60.0) -> float:
        """Wait until a stage serves; returns the time from `since_s` on."""
        until(lambda: self.cluster.is_serving(stage), limit_s, f"{stage} does not serve")
        return time.monotonic() - since_s


@dataclass
class Running:
    """A load in flight.

    Attributes:
        began_s: when its moment had come.
    """

    site: Site
    load: Load
    task: asyncio.Task[list[Answer]]
    expected: Undisturbed
    began_s: float
    num_more: int

    async def more_answers(self) -> list[Answer]:
        """The answers to the calls that were sent along."""
        return (await asyncio.wait_for(asyncio.shield(self.task), _LOAD_LIMIT_S))[: self.num_more]

    async def verdict(self) -> Verdict:
        """Wait for all answers and judge them."""
        done, _ = await asyncio.wait([self.task], timeout=_LOAD_LIMIT_S)
        self.load.read()
        lost, wrong, pauses = [], [], []
        found = self.load.answers[self.num_more :]
        for number, (answer, other) in enumerate(zip(found, self.expected.answers, strict=True)):
            if answer.error or answer.result is None:
                lost.append(f"call {number}: {answer.error or 'no answer in time'}")
            elif why := difference(answer.result, _result(other)):
                wrong.append(f"call {number}: {why}")
            if (gap := answer.longest_gap_s(self.began_s)) is not None:
                pauses.append(gap)
        if not done:
            self.task.cancel()
        await asyncio.to_thread(self.site.cluster.wait_until_ready)
        return Verdict(len(found), lost, wrong, sorted(pauses), await asyncio.to_thread(self.site.leftovers))


@contextlib.asynccontextmanager
async def running_site(
    stall_s: float, *, settings: Settings | None = None, num_gateways: int = 2
) -> AsyncIterator[Site]:
    """A site that is ready: two tokenizers, an executor in fp32, a proxy before each stage but the gateways.

    Args:
        stall_s: silence after which a neighbour counts as lost.
        settings: more of them, by stage.
    """
    limits = {"max_num_seqs": MAX_NUM_SEQS, "log_level": "warning"}
    stall = {"stall_timeout_s": stall_s}
    own: dict[str, dict[str, object]] = {
        "executor": {**limits},
        "scheduler": {**limits, **stall, "heartbeat_s": stall_s / 4},
        "tokenizer": {"log_level": "warning", **stall, "heartbeat_s": stall_s / 4},
        "gateway": {"log_level": "warning", **stall},
    }
    for stage, values in (settings or {}).items():
        own[stage] = {**own.get(stage, {}), **values}
    with tempfile.TemporaryDirectory(prefix="tokenloom-faults-") as folder, ProxyThread() as thread:
        cluster = Cluster(
            num_tokenizers=2,
            num_gateways=num_gateways,
            settings=own,
            programs={"executor": ["-m", "tests.faults.faulty_executor"]},
            environ={VARIABLE: folder},
        )
        proxies = {}
        for client, stages in (
            ("scheduler", ["executor"]),
            ("tokenizer", ["scheduler"]),
            ("gateway", cluster.tokenizers),
        ):
            for stage in stages:
                proxies[stage] = thread.proxy(f"unix:{cluster.folder}/{stage}.proxy", cluster.address(stage))
                cluster.link(client, stage, proxies[stage].address)
        async with cluster, contextlib.AsyncExitStack() as stack:
            site = Site(cluster, proxies, Orders(Path(folder)), stall_s)
            for i in range(num_gateways):
                site.clients.append(await stack.enter_async_context(cluster.async_client(i, timeout=_LOAD_LIMIT_S)))
            yield site


def marked(call: Call, **body: Any) -> Call:
    """A completion that the orders of a faulty executor are meant for."""
    return replace(call, path=COMPLETIONS, body={**call.body, "prompt": [MARKER, 5, 6, 7], **body})


def _result(answer: Answer) -> dict[str, Any]:
    assert answer.result is not None, answer.error
    return answer.result
