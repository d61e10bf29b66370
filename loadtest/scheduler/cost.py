"""What the core itself costs: schedule() and update(), and the look-up of a long prompt. No gRPC, no clock but ours.

Each row of the first table is a scheduler in a steady state: two plans in flight, every running request decodes. What
is timed is one update() and the schedule() behind it; the result in between is made outside the timed part. The
variants change one thing at 256 running requests: they show what the cost grows with (rows) and what not (blocks,
those that wait).
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from loadtest.bench.table import to_table
from loadtest.report import percentile
from tokenloom.api.v1 import common_pb2, engine_pb2
from tokenloom.scheduler import convert
from tokenloom.scheduler.capabilities import Capabilities
from tokenloom.scheduler.core.plan import ModelOutput, RowOutput, SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request
from tokenloom.scheduler.core.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 16
LONG_PROMPT_TOKENS = 32_768
_WARMUP_STEPS = 40
_VOCAB_SIZE = 50_000
_MAX_OUTPUT_TOKENS = 1 << 16


@dataclass(frozen=True)
class Load:
    """A steady state.

    Args:
        num_tenants, num_classes: over which the requests are spread evenly.
        num_waiting: requests that wait all the time.
        chunk_tokens: prompt tokens in each step beside the decoding rows; 0: none.
        is_cache_full: every block that nobody holds has a name, so that each new block evicts one.
    """

    name: str
    num_running: int
    num_blocks: int = 100_000
    num_tenants: int = 1
    num_classes: int = 1
    num_waiting: int = 0
    chunk_tokens: int = 0
    is_cache_full: bool = False
    prompt_tokens: int = 128


def loads(sizes: tuple[int, ...] = (16, 64, 256, 1024)) -> list[Load]:
    """The rows of the first table."""
    base = Load("256, a prompt's chunk of 512 tokens beside them", 256, chunk_tokens=512)
    return [
        *(Load(f"{size} decode", size) for size in sizes),
        base,
        replace(base, name="256 decode, 4 tenants x 3 classes", chunk_tokens=0, num_tenants=4, num_classes=3),
        replace(base, name="256 decode, 10,000 wait", chunk_tokens=0, num_waiting=10_000),
        replace(
            base,
            name="256 decode, 10,000 wait, 4 tenants x 3 classes",
            chunk_tokens=0,
            num_waiting=10_000,
            num_tenants=4,
            num_classes=3,
        ),
        replace(base, name="256 decode, 20,000 blocks", chunk_tokens=0, num_blocks=20_000),
        replace(base, name="256 decode, 1,000,000 blocks", chunk_tokens=0, num_blocks=1_000_000),
        replace(base, name="256 decode, every free block cached", chunk_tokens=0, is_cache_full=True),
    ]


class CoreUnderLoad:
    """A scheduler in a steady state."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._numbers = itertools.count()
        self._now_s = 0.0
        config = SchedulerConfig(
            max_num_seqs=load.num_running + (1 if load.chunk_tokens else 0),
            # A long prompt that is alone gets half of what the decoding rows leave.
            max_num_batched_tokens=load.num_running + 2 * load.chunk_tokens if load.chunk_tokens else 8192,
            max_num_waiting=load.num_waiting + load.num_running + 8,
            max_model_len=1 << 17,
            block_size=BLOCK_SIZE,
            max_num_waiting_tokens=1 << 40,
        )
        self.core = Scheduler(config, load.num_blocks + 1)
        if load.is_cache_full:
            self._fill_cache()
        for _ in range(load.num_running):
            self.add(load.prompt_tokens)
        self._begin()
        for _ in range(load.num_waiting):
            self.add(load.prompt_tokens)
        self._chunks: Request | None = None
        self._keep_a_prompt_coming()

    def add(self, num_prompt_tokens: int, max_output_tokens: int = _MAX_OUTPUT_TOKENS) -> Request:
        """Submit a request whose prompt is like no other."""
        number = next(self._numbers)
        load = self._load
        request = Request(
            f"r{number}",
            prompt_token_ids=make_prompt(number, num_prompt_tokens),
            max_output_tokens=max_output_tokens,
            tenant=f"tenant-{number % load.num_tenants}",
            priority_class=number // load.num_tenants % load.num_classes,
        )
        self.core.add_request(request, self._now_s)
        return request

    def plan(self) -> SchedulerOutput:
        """Make a plan."""
        self._now_s += 1e-3
        plan = self.core.schedule(self._now_s)
        assert plan is not None, "a steady state has rows to plan"
        return plan

    def step_s(self) -> float:
        """Seconds that update() and schedule() took together."""
        output = result_of(self.core.plans_in_flight[0])
        started_s = time.perf_counter()
        self.core.update(output)
        plan = self.core.schedule(self._now_s)
        took_s = time.perf_counter() - started_s
        self._now_s += 1e-3
        assert plan is not None
        self._keep_a_prompt_coming()
        return took_s

    def _begin(self) -> None:
        """Step until every request decodes."""
        self.plan()
        while any(request.num_plans_in_flight == 0 or not request.output_token_ids for request in self.core.running):
            if len(self.core.plans_in_flight) == 2:
                self.core.update(result_of(self.core.plans_in_flight[0]))
            self.plan()
        assert len(self.core.running) == self._load.num_running
        while len(self.core.plans_in_flight) < 2:
            self.plan()

    def _fill_cache(self) -> None:
        """Compute prompts and end them, until all blocks carry names."""
        while self.core.kv.pool.num_cached_blocks < self._load.num_blocks * 0.98:
            request = self.add(LONG_PROMPT_TOKENS, 1)
            while not request.is_finished:
                self.core.update(result_of(self.plan()))

    def _keep_a_prompt_coming(self) -> None:
        if self._load.chunk_tokens and (self._chunks is None or self._chunks.output_token_ids):
            if self._chunks is not None:
                self.core.finish(self._chunks.request_id, FinishReason.ABORTED)
            self._chunks = self.add(LONG_PROMPT_TOKENS)


def make_prompt(number: int, num_tokens: int) -> list[int]:
    """Prompt `number`; no two begin alike."""
    return [number % _VOCAB_SIZE, number // _VOCAB_SIZE, *(i % 1000 for i in range(2, num_tokens))]


def result_of(plan: SchedulerOutput) -> ModelOutput:
    """A step in which all went well."""
    return ModelOutput(plan.step_id, {row.row_id: RowOutput([7]) for row in plan.rows if row.samples})


@contextmanager
def _frozen_gc() -> Iterator[None]:
    """As in the stage after its start: what is there is never walked through again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure_load(load: Load, num_steps: int) -> dict[str, object]:
    """Time of one schedule and update, in ms."""
    core = CoreUnderLoad(load)
    with _frozen_gc():
        for _ in range(_WARMUP_STEPS):
            core.step_s()
        times_ms = [1e3 * core.step_s() for _ in range(num_steps)]
    return {
        "name": load.name,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_blocks": load.num_blocks,
        "p50_ms": percentile(times_ms, 50),
        "p99_ms": percentile(times_ms, 99),
        "num_preemptions": core.core.stats.num_preemptions,
    }


def measure_long_prompt(num_repeats: int) -> list[dict[str, object]]:
    """What a prompt of 32k tokens costs on each occasion that it passes, in ms."""
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=1 << 17, block_size=BLOCK_SIZE)
    core = Scheduler(config, 100_001)
    numbers = itertools.count()

    def request(prompt_number: int) -> Request:
        return Request(f"long-{next(numbers)}", make_prompt(prompt_number, LONG_PROMPT_TOKENS), 1)

    def run_to_end(one: Request) -> None:
        while not one.is_finished:
            plan = core.schedule(0.0)
            assert plan is not None
            core.update(result_of(plan))

    run_to_end(_added(core, request(0)))  # from now on prompt 0 is cached
    times: dict[str, list[float]] = {name: [] for name in _LONG_PROMPT_ROWS}
    with _frozen_gc():
        for repeat in range(num_repeats):
            times["convert"].append(_ms(_submit_to_request()))
            warm, blocked, cold = request(0), request(1000 + repeat), request(1000 + repeat)
            times["add_cold"].append(_ms(core.add_request, cold, 0.0))
            plan = core.schedule(0.0)
            assert plan is not None
            core.add_request(blocked, 0.0)
            assert core.kv.find_prefix(blocked) is None, "the other request computes its prefix"
            times["find_blocked"].append(_ms(core.kv.find_prefix, blocked))
            core.finish(blocked.request_id, FinishReason.ABORTED)
            core.update(result_of(plan))
            core.finish(cold.request_id, FinishReason.ABORTED)
            core.add_request(warm, 0.0)
            times["find_warm"].append(_ms(core.kv.find_prefix, warm))
            times["schedule_warm"].append(_ms(core.schedule, 0.0))
            core.update(result_of(core.plans_in_flight[0]))
            assert warm.is_finished
    return [
        {"name": label, "p50_ms": percentile(times[name], 50), "max_ms": max(times[name])}
        for name, label in _LONG_PROMPT_ROWS.items()
    ]


_LONG_PROMPT_ROWS = {
    "convert": "Submit message to Request (parse, check ids)",
    "add_cold": "add_request, prompt unknown (hashes all blocks)",
    "find_warm": "prefix look-up, all blocks cached",
    "schedule_warm": "schedule() that admits it, all blocks cached",
    "find_blocked": "prefix look-up, another one computes the prefix",
}


def _added(core: Scheduler, request: Request) -> Request:
    core.add_request(request, 0.0)
    return request


def _ms(act: Callable[..., object], *args: object) -> float:
    started_s = time.perf_counter()
    act(*args)
    return 1e3 * (time.perf_counter() - started_s)


def _submit_to_request() -> Callable[[], object]:
    stop = common_pb2.StopConditions(max_tokens=1)
    prompt = make_prompt(1, LONG_PROMPT_TOKENS)
    submit = engine_pb2.Submit(handle=1, request_id="long", prompt_token_ids=prompt, stop=stop)
    data = engine_pb2.EngineServiceSessionRequest(submits=[submit]).SerializeToString()
    return lambda: convert.request_of(
        engine_pb2.EngineServiceSessionRequest.FromString(data).submits[0], BENCH_CAPABILITIES, 0.0
    )


BENCH_CAPABILITIES = Capabilities(
    boot_id="bench",
    model_id="bench",
    tokenizer_fingerprint="bench",
    vocab_size=_VOCAB_SIZE,
    max_model_len=1 << 17,
    block_size=BLOCK_SIZE,
    max_num_blocks=100_001,
    max_num_seqs=1024,
    max_num_batched_tokens=8192,
    max_plans_in_flight=2,
    max_num_logprobs=20,
    batch_invariant=True,
    eos_token_ids=(1,),
    default_sampling=common_pb2.SamplingParams(),
    description="bench",
)


def cost_tables(steps: list[dict[str, object]], long_prompt: list[dict[str, object]]) -> str:
    """The figures for people."""
    first = to_table(
        ["schedule + update, running requests", "p50 ms", "p99 ms", "preemptions"],
        [[row["name"], row["p50_ms"], row["p99_ms"], row["num_preemptions"]] for row in steps],
    )
    second = to_table(
        ["a prompt of 32,768 tokens", "p50 ms", "max ms"],
        [[row["name"], row["p50_ms"], row["max_ms"]] for row in long_prompt],
    )
    return f"{first}\n\n{second}"
