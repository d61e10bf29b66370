"""Faults that are no cell of the grid: several at once, the executor's own, a full disk, a stale scheduler."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from tests.faults.grid import MARGIN_S, Outcome, outcome_of, strike
from tests.faults.load import COMPLETIONS, GREEDY, Answer, Call
from tests.faults.site import MARKER, Running, Site
from tests.stage_process import until

Special = Callable[[Site], Awaitable[Outcome]]
_MARKED = {"prompt": [MARKER, 5, 6, 7], "max_tokens": 90, "ignore_eos": True, **GREEDY}
_USAGE = {"stream_options": {"include_usage": True}}
MARKED_STREAM = Call(COMPLETIONS, {**_MARKED, "stream": True, "return_token_ids": True, **_USAGE})
MARKED_WHOLE = Call(COMPLETIONS, {**_MARKED, "stream": False})
_FILE_BYTES = 8 << 10
# The scheduler's files may not grow beyond so many bytes; as on a full disk, writing fails then.
_ON_A_FULL_DISK = (
    "import resource, runpy; "
    f"resource.setrlimit(resource.RLIMIT_FSIZE, ({_FILE_BYTES}, {_FILE_BYTES})); "
    "runpy.run_module('tokenloom.scheduler', run_name='__main__', alter_sys=True)"
)


async def memory_exhausted(site: Site) -> Outcome:
    """Steps fail for lack of memory, Python's and a GPU's, while the process lives."""
    began_s = time.monotonic()
    async with site.under_load("decode") as running:
        for order, count in (("oom", 1), ("cuda", 2)):
            site.orders.give(order, count)
            await asyncio.to_thread(until, partial(site.orders.is_done, order), 20, "no step failed")
        return await _outcome(running, "executor out of memory", "decode", began_s, 0.0)


async def logits_are_nan(site: Site) -> Outcome:
    """Two requests of the batch get NaN in the middle, one from its first token on: they fail, and nobody else."""
    began_s = time.monotonic()
    try:
        async with site.under_load("decode", [MARKED_STREAM, MARKED_WHOLE]) as running:
            site.orders.give("nan", MARKER)
            failed = await running.more_answers()
            failed += await site.answers_to([MARKED_STREAM])
            outcome = await _outcome(running, "NaN logits of some rows", "decode", began_s, 0.0)
    finally:
        site.orders.withdraw()
    running_stream, whole, new_stream = failed
    problems = (
        [] if running_stream.num_events and _says(running_stream, "logits_not_finite") else [running_stream.error]
    )
    problems += [] if _says(whole, "logits_not_finite") and whole.error.startswith("HTTP 500") else [whole.error]
    problems += [] if _says(new_stream, "logits_not_finite") else [new_stream.error]
    problems = [f"marked call: {problem or 'no error'}" for problem in problems]
    return _with(outcome, problems)


async def slow_steps(site: Site) -> Outcome:
    """Steps that take a second are no hang."""
    began_s = time.monotonic()
    try:
        async with site.under_load("decode") as running:
            site.orders.give("slow", 1.0)
            await asyncio.sleep(4)
            site.orders.withdraw()
            return await _outcome(running, "executor steps of 1 s", "decode", began_s, 2.0)
    finally:
        site.orders.withdraw()


async def poison(site: Site) -> Outcome:
    """A request that kills the executor whenever it is computed fails alone."""
    began_s = time.monotonic()
    num_before = site.cluster.num_starts("executor")
    try:
        async with site.under_load("decode", [MARKED_STREAM]) as running:
            site.orders.give("poison", MARKER)
            [answer] = await running.more_answers()
            num_crashes = site.cluster.num_starts("executor") - num_before
            outcome = await _outcome(running, f"poison request, {num_crashes} crashes", "decode", began_s, None)
    finally:
        site.orders.withdraw()
    is_told = _says(answer, "executor_crash")
    return _with(outcome, [] if is_told else [f"the poison request: {answer.error or 'no error'}"])


async def five_kills_of_the_executor(site: Site) -> Outcome:
    """One every two seconds, whatever it is doing."""
    return await _five_kills(site, ["executor"] * 5, "executor kill, 5 in 10 s")


async def five_kills_all_over(site: Site) -> Outcome:
    """Each stage in turn."""
    stages = ["executor", "scheduler", "tokenizer-0", "scheduler", "tokenizer-1"]
    return await _five_kills(site, stages, "kill of stages in turn, 5 in 10 s")


async def all_at_once(site: Site) -> Outcome:
    """Executor, scheduler and both tokenizers are killed in the same moment."""
    began_s = time.monotonic()
    async with site.under_load("decode") as running:
        struck_s = time.monotonic()
        for stage in ("executor", "scheduler", "tokenizer-0", "tokenizer-1"):
            site.cluster.kill(stage)
        await asyncio.sleep(0.5)
        took_s = await asyncio.to_thread(_all_serve, site, struck_s)
        return await _outcome(running, "all but gateways kill, at once", "decode", began_s, took_s)


async def scheduler_while_executor_starts(site: Site) -> Outcome:
    """The executor is killed, and while it starts the scheduler, and then both tokenizers."""
    began_s = time.monotonic()
    async with site.under_load("decode") as running:
        struck_s = time.monotonic()
        for stage in ("executor", "scheduler", "tokenizer-0", "tokenizer-1"):
            await asyncio.to_thread(site.cluster.kill, stage)
            await asyncio.sleep(1.0)
        took_s = await asyncio.to_thread(_all_serve, site, struck_s)
        return await _outcome(running, "all but gateways kill, 1 s apart", "recovery", began_s, took_s)


async def full_disk(site: Site) -> Outcome:
    """Neither the recorder's file nor its folder can be written; the executor is lost, which makes it save."""
    began_s = time.monotonic()
    cluster = site.cluster
    recording: dict[str, object] = {
        "record_file": f"{cluster.folder}/all.tlrec",
        "record_dir": f"{cluster.folder}/rings",
    }
    try:
        await asyncio.to_thread(_restart_scheduler, site, ["-c", _ON_A_FULL_DISK], recording)
        async with site.under_load("decode") as running:
            took_s = await asyncio.to_thread(strike, site, "executor", "cut", 0.0)
            outcome = await _outcome(running, "full disk for the recorder, executor cut", "decode", began_s, took_s)
        told = cluster.log("scheduler")
    finally:
        await asyncio.to_thread(_restart_scheduler, site, None, {})
    lacks = [text for text in ("all.tlrec stops", "cannot be written") if text not in told]
    return _with(outcome, [f"the scheduler's log does not say: {text}" for text in lacks])


async def stale_scheduler(site: Site) -> Outcome:
    """A scheduler is stopped, another one takes its executor and its tokenizers over, and then it goes on."""
    began_s = time.monotonic()
    cluster, proxy = site.cluster, site.proxies["scheduler"]
    try:
        async with site.under_load("decode") as running:
            struck_s = time.monotonic()
            cluster.kill("scheduler", signal.SIGSTOP)
            await asyncio.to_thread(cluster.add_stage, "scheduler-1")
            proxy.retarget(cluster.address("scheduler-1"))
            took_s = time.monotonic() - struck_s
            num_events = running.load.num_events + 200
            await running.load.until(lambda load: load.num_events > num_events, 30)  # the new one's tokens come
            cluster.kill("scheduler", signal.SIGCONT)
            done, _ = await asyncio.wait([running.task], timeout=60)
            problems = [] if done else ["the streams did not end within 60 s"]
            problems += [] if cluster.is_serving("scheduler-1") else ["the new scheduler does not serve"]
            await asyncio.to_thread(cluster.stop_stage, "scheduler-1", signal.SIGKILL)
            proxy.retarget(cluster.address("scheduler"))
            outcome = await _outcome(running, "stale scheduler comes back", "decode", began_s, took_s)
    finally:
        cluster.kill("scheduler", signal.SIGCONT)
        await asyncio.to_thread(cluster.stop_stage, "scheduler-1", signal.SIGKILL)
        proxy.retarget(cluster.address("scheduler"))
        await asyncio.to_thread(cluster.wait_until_ready)
    return _with(outcome, problems)


SPECIALS: tuple[Special, ...] = (
    memory_exhausted,
    logits_are_nan,
    slow_steps,
    full_disk,
    stale_scheduler,
    all_at_once,
    scheduler_while_executor_starts,
    five_kills_of_the_executor,
    five_kills_all_over,
    poison,
)


async def _five_kills(site: Site, stages: list[str], name: str) -> Outcome:
    began_s = time.monotonic()
    async with site.under_load("decode") as running:
        struck_s = time.monotonic()
        for number, stage in enumerate(stages):
            await asyncio.sleep(max(0.0, struck_s + 2.0 * number - time.monotonic()))
            await asyncio.to_thread(site.cluster.kill, stage)
        await asyncio.sleep(0.5)
        took_s = await asyncio.to_thread(_all_serve, site, struck_s)
        return await _outcome(running, name, "decode", began_s, took_s)


async def _outcome(running: Running, name: str, moment: str, began_s: float, took_s: float | None) -> Outcome:
    verdict = await running.verdict()
    bound_s = None if took_s is None else took_s + running.expected.prefill_s + MARGIN_S
    return outcome_of(name, moment, verdict, bound_s, time.monotonic() - began_s)


def _with(outcome: Outcome, problems: list[str]) -> Outcome:
    return replace(outcome, problems=(*outcome.problems, *problems))


def _says(answer: Answer, code: str) -> bool:
    return code in answer.error


def _all_serve(site: Site, since_s: float) -> float:
    return max(site.time_until_serving(stage, since_s) for stage in site.proxies)


def _restart_scheduler(site: Site, program: list[str] | None, flags: dict[str, object]) -> None:
    site.cluster.stop_stage("scheduler")
    site.cluster.configure("scheduler", program, **flags)
    site.cluster.clear_log("scheduler")  # the limit holds for it, too
    site.cluster.start_stage("scheduler")
    site.cluster.wait_until_ready()
