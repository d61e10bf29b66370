"""Every fault at every moment: what is done to a stage, and what a stream's pause may be."""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.faults.site import MOMENTS, Moment, Site, Verdict
from tests.stage_process import until

Kind = Literal["kill", "stop", "cut", "delay", "truncate", "blackhole"]
KINDS: tuple[Kind, ...] = ("kill", "stop", "cut", "delay", "truncate", "blackhole")
STAGES = ("executor", "scheduler", "tokenizer-0")
DELAY_S, DELAYED_S = 0.25, 2.0
MARGIN_S = 1.0
_RECONNECT_LIMIT_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """A row of the table.

    Args:
        fault: stage and kind, or the name of a special case.
        bound_s: what the pause may be at the 99th percentile: what the fault itself takes (a restart, or as long as
            the process stands), computing everything again, and one second. None: not judged.
        problems: what went wrong, in words.
    """

    fault: str
    moment: str
    num_requests: int
    num_lost: int
    num_wrong: int
    pause_p50_s: float | None
    pause_p99_s: float | None
    bound_s: float | None
    problems: tuple[str, ...] = ()
    took_s: float = 0.0

    @property
    def is_late(self) -> bool:
        return None not in (self.pause_p99_s, self.bound_s) and (self.pause_p99_s or 0) > (self.bound_s or 0)

    @property
    def is_bad(self) -> bool:
        """Something was lost or wrong, or left behind."""
        return bool(self.problems)


def cells() -> Iterator[tuple[str, Kind, Moment]]:
    """All of stage, kind and moment."""
    for stage in STAGES:
        for kind in KINDS:
            for moment in MOMENTS:
                yield stage, kind, moment


async def run_cell(site: Site, stage: str, kind: Kind, moment: Moment, stand_s: float) -> Outcome:
    """Do one thing to one stage at one moment.

    Args:
        stand_s: how long a stopped process, or a connection that swallows everything, stands.
    """
    began_s = time.monotonic()
    async with site.under_load(moment) as running:
        took_s = await asyncio.to_thread(strike, site, stage, kind, stand_s)
        if moment == "recovery":
            took_s += await asyncio.to_thread(strike, site, stage, kind, stand_s)
        verdict = await running.verdict()
        bound_s = took_s + running.expected.prefill_s + MARGIN_S
    return outcome_of(f"{stage} {kind}", moment, verdict, bound_s, time.monotonic() - began_s)


def strike(site: Site, stage: str, kind: Kind, stand_s: float) -> float:
    """Let a fault happen and wait until it is over, but not for what follows from it.

    Returns: how long it may keep requests from going on, in seconds.
    """
    proxy, cluster, began_s = site.proxies[stage], site.cluster, time.monotonic()
    if kind == "kill":
        killed = cluster.kill(stage)
        until(lambda: cluster.pid(stage) not in (None, killed), 30, f"{stage} was not started again")
        return site.time_until_serving(stage, began_s)
    if kind in ("stop", "blackhole"):
        if kind == "stop":
            cluster.kill(stage, signal.SIGSTOP)
            time.sleep(stand_s)
            cluster.kill(stage, signal.SIGCONT)
        else:
            proxy.blackhole()
            time.sleep(stand_s)
            proxy.heal()
        has_another = stage in cluster.tokenizers  # requests go on there once the silence was noticed
        return site.stall_s if has_another else time.monotonic() - began_s
    if kind == "delay":
        proxy.delay(DELAY_S)
        time.sleep(DELAYED_S)
        proxy.heal()
        return 2 * DELAY_S
    num_before = proxy.num_accepted
    if kind == "cut":
        proxy.cut()
    else:
        proxy.truncate()
    until(lambda: proxy.num_accepted > num_before, _RECONNECT_LIMIT_S, f"nobody came back to {stage}")
    proxy.heal()
    return time.monotonic() - began_s


def outcome_of(fault: str, moment: str, verdict: Verdict, bound_s: float | None, took_s: float) -> Outcome:
    """A verdict as a row."""
    pauses = verdict.pauses_s
    problems = [*verdict.lost, *verdict.wrong]
    if verdict.leftovers:
        problems.append(f"left behind: {verdict.leftovers}")
    return Outcome(
        fault=fault,
        moment=moment,
        num_requests=verdict.num_requests,
        num_lost=len(verdict.lost),
        num_wrong=len(verdict.wrong),
        pause_p50_s=statistics.median(pauses) if pauses else None,
        pause_p99_s=pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))] if pauses else None,
        bound_s=bound_s,
        problems=tuple(problems),
        took_s=took_s,
    )
