"""A soak: steady load with aborts, a kill now and then, and what the stages hold when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.cluster import Cluster
from tests.soak.load import SteadyLoad, Tally
from tests.soak.memory import MemoryLog
from tokenloom.api.v1 import engine_pb2

KILLED_IN_TURN = ("executor", "scheduler", "tokenizer-0", "tokenizer-1")
MAX_SLOPE_MIB = 1.0
_NUM_BLOCKS = 2048  # so few that all were used, and the prefix cache is full, when a process is warm
_NUM_CLIENTS = 48
_FINISH_LIMIT_S = 120.0
_CALM_LIMIT_S = 20.0


@dataclass(frozen=True)
class Plan:
    """How long each part takes, in seconds.

    Args:
        load_s: under load.
        kill_every_s: between kills; the first one comes after half of it.
        capacity_s: measuring how much the stack can do.
        share: of that, offered.
        abort_share: of the requests, given up by their clients.
        warm_up_s: of each process's life, left out of the slope of its memory: KV memory is touched for the first time,
            caches fill. On a machine with much else to do that takes longer.
        least_life_s: shorter lives, without the warm-up, have no slope.
    """

    load_s: float
    kill_every_s: float
    capacity_s: float = 15.0
    share: float = 0.8
    abort_share: float = 0.1
    warm_up_s: float = 90.0
    least_life_s: float = 60.0


@dataclass(frozen=True)
class Report:
    """What a soak found.

    Args:
        capacity: requests per second that a closed loop got.
        kills: of each stage.
        slopes: of resident memory by stage: MiB per minute, over how many seconds, last size in MiB.
        held: what stages hold at the end, by name; all should be 0.
    """

    capacity: float
    tally: Tally
    kills: dict[str, int]
    slopes: dict[str, tuple[float, float, float]]
    held: dict[str, int]

    def problems(self, max_slope_mib: float | None) -> list[str]:
        """What is not as promised; `max_slope_mib` None: memory is not judged."""
        found = [f"{count} x {why}" for why, count in self.tally.failures.items()]
        found += [f"{self.tally.num_late} requests were not sent"] if self.tally.num_late else []
        found += [f"at the end {name}: {value}" for name, value in self.held.items() if value]
        if max_slope_mib is not None:
            growing = {stage: slope for stage, (slope, *_) in self.slopes.items() if slope > max_slope_mib}
            found += [f"{stage} grows by {slope:.2f} MiB per minute" for stage, slope in growing.items()]
        return found


async def soak(plan: Plan) -> Report:
    """Run it on a cluster of its own: two gateways, two tokenizers, the tiny model."""
    settings: dict[str, dict[str, object]] = {
        "executor": {"log_level": "warning", "max_num_seqs": 64},
        "scheduler": {"log_level": "error", "num_blocks": _NUM_BLOCKS, "max_num_seqs": 64},
        "tokenizer": {"log_level": "error", "encoding_cache_bytes": 1 << 20},
        "gateway": {"log_level": "error"},
    }
    async with (
        Cluster(num_tokenizers=2, num_gateways=2, settings=settings) as cluster,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(cluster.async_client(i, timeout=120)) for i in range(2)]
        await SteadyLoad(clients, abort_share=0, seed=1).capacity(_NUM_CLIENTS, min(3.0, plan.capacity_s))  # warm
        capacity = await SteadyLoad(clients, abort_share=0, seed=2).capacity(_NUM_CLIENTS, plan.capacity_s)
        load = SteadyLoad(clients, abort_share=plan.abort_share, seed=3)
        memory = MemoryLog(cluster)
        memory.start()
        try:
            killer = asyncio.create_task(_kill_now_and_then(cluster, plan))
            await load.offer(plan.share * capacity, plan.load_s)
            kills = await killer
            await load.finish(_FINISH_LIMIT_S)
        finally:
            await asyncio.to_thread(memory.stop)
        await asyncio.to_thread(cluster.wait_until_ready)
        held = await asyncio.to_thread(held_at_rest, cluster)
        return Report(capacity, load.tally, kills, memory.slopes(plan.warm_up_s, plan.least_life_s), held)


async def _kill_now_and_then(cluster: Cluster, plan: Plan) -> dict[str, int]:
    kills = dict.fromkeys(KILLED_IN_TURN, 0)
    for number, stage in zip(
        range(int(plan.load_s / plan.kill_every_s)), itertools.cycle(KILLED_IN_TURN), strict=False
    ):
        await asyncio.sleep(plan.kill_every_s if number else plan.kill_every_s / 2)
        await asyncio.to_thread(cluster.kill, stage)
        kills[stage] += 1
    return kills


def held_at_rest(cluster: Cluster) -> dict[str, int]:
    """What the stages hold when nobody asks for anything; waits a while for zero."""
    deadline_s = time.monotonic() + _CALM_LIMIT_S
    while any((held := dict(_held(cluster))).values()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return held


def _held(cluster: Cluster) -> Iterator[tuple[str, int]]:
    with cluster.engine() as engine:
        load = engine.GetLoad(engine_pb2.GetLoadRequest(), metadata=cluster.metadata, timeout=10).load
    yield "blocks that are neither free nor cached", load.num_blocks - load.num_free_blocks
    yield "running requests", load.num_running
    yield "waiting requests", load.num_waiting
    gauges: dict[str, Any] = {
        "scheduler": ("num_requests_running", "num_requests_waiting", "num_waiting_tokens", "num_suspects"),
        "tokenizer": ("tokenizer_active_requests", "tokenizer_active_choices"),
        "gateway": ("gateway_requests_in_flight",),
    }
    for stage in cluster.names[1:]:
        for name in gauges[stage.partition("-")[0]]:
            yield f"{name} of {stage}", int(cluster.total(stage, f"tokenloom_{name}"))
    for stage in cluster.gateways:
        num_sessions = int(cluster.total(stage, "tokenloom_gateway_tokenizer_session"))
        yield f"sessions that {stage} lacks", len(cluster.tokenizers) - num_sessions
