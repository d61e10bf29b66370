"""The commands of a story, on a core with a shadow executor whose model counts: after 1 2 3 comes 4.

engine KEY=VALUE ...     begin anew; keys: num_blocks, depth and the fields of SchedulerConfig
tenant NAME KEY=VALUE .. a tenant's policy; keys: the fields of TenantPolicy
add NAME KEY=VALUE ...   a request arrives; keys: prompt, resume (1..8 or 1,2,7), max_tokens, stop, class, salt, tenant,
                         deadline, logprobs=prompt
plan                     make the next plan and send it
apply                    run the oldest plan in flight and apply its result
step                     make plans until `depth` are in flight, then apply one result
run                      step until no request is alive; tells what each generated
abort NAME               the caller went away
stop NAME                the tokenizer found a stop string
time SECONDS             the clock shows so much
fail NAME                the next row of this request fails
lose-executor KEY=VALUE  the executor died with all in flight; an empty one came; key: num_blocks
executor-drains          the executor said that it is about to stop: nothing new begins there
suspects                 who is suspected of killing executors
pool                     who holds which blocks
tenants                  what each tenant has and was served
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.shadow_engine import WANTS_PROMPT_LOGPROBS, ShadowEngine
from tokenloom.scheduler.core.plan import RequestOutput, ScheduledRow, SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request, RequestRefused
from tokenloom.scheduler.core.scheduler import SchedulerConfig
from tokenloom.scheduler.core.tenants import TenantPolicy

Options = dict[str, str]


class StoryEngine:
    """Carries out commands; each answers with the lines that the story shows."""

    def __init__(self) -> None:
        self._engine = ShadowEngine(SchedulerConfig(), 16)
        self._commands: dict[str, Callable[[str, Options], list[str]]] = {
            "engine": self._begin,
            "tenant": self._set_tenant,
            "add": self._add,
            "plan": lambda _name, _options: self._plan(),
            "apply": lambda _name, _options: self._apply(),
            "step": lambda _name, _options: self._step(),
            "run": lambda _name, _options: self._run(),
            "abort": lambda name, _options: self._finish(name, FinishReason.ABORTED),
            "stop": lambda name, _options: self._finish(name, FinishReason.STOP_STRING),
            "time": lambda seconds, _options: self._pass_time(float(seconds)),
            "fail": self._fail,
            "lose-executor": self._lose_executor,
            "executor-drains": lambda _name, _options: self._let_executor_drain(),
            "suspects": lambda _name, _options: [_names(self._engine.core.suspects)],
            "pool": lambda _name, _options: self._pool(),
            "tenants": lambda _name, _options: self._tenants(),
        }

    def do(self, line: str) -> list[str]:
        """Carry out one command."""
        command, *words = line.split()
        name = words.pop(0) if words and "=" not in words[0] else ""
        options = dict(word.split("=", 1) for word in words)
        return self._commands[command](name, options)

    def _begin(self, _name: str, options: Options) -> list[str]:
        numbers: dict[str, Any] = {key: int(value) for key, value in options.items()}
        num_blocks, depth = numbers.pop("num_blocks"), numbers.pop("depth", 1)
        self._engine = ShadowEngine(SchedulerConfig(**numbers), num_blocks, depth=depth)
        return []

    def _set_tenant(self, name: str, options: Options) -> list[str]:
        weight = float(options.pop("weight", "1"))
        self._engine.core.set_tenant(name, TenantPolicy(weight, **{key: int(text) for key, text in options.items()}))
        return []

    def _add(self, name: str, options: Options) -> list[str]:
        wants_prompt_logprobs = options.get("logprobs") == "prompt"
        request = Request(
            name,
            _token_ids(options["prompt"]),
            int(options.get("max_tokens", "8")),
            stop_token_ids=frozenset(_token_ids(options.get("stop", ""))),
            output_token_ids=_token_ids(options.get("resume", "")),
            priority_class=int(options.get("class", "0")),
            tenant=options.get("tenant", ""),
            submitted_s=self._engine.now_s,
            cache_salt=options.get("salt", ""),
            reads_prefix_cache=not wants_prompt_logprobs,
            deadline_s=float(options["deadline"]) if "deadline" in options else None,
            payload=WANTS_PROMPT_LOGPROBS if wants_prompt_logprobs else None,
        )
        try:
            displaced = self._engine.add(request)
        except RequestRefused as refusal:
            return [f"{name} refused: {refusal}"]
        return _describe_news([displaced] if displaced is not None else [])

    def _plan(self) -> list[str]:
        plan = self._engine.plan()
        if plan is not None:
            return _describe_plan(plan)
        in_flight = len(self._engine.core.plans_in_flight)
        return [f"no plan: {in_flight} in flight"]

    def _apply(self) -> list[str]:
        if not self._engine.core.plans_in_flight:
            return ["nothing in flight"]
        plan = self._engine.core.plans_in_flight[0]
        thrown_away = [row.request for row in plan.rows if row.request.is_finished]
        lines = [f"result {plan.step_id}"]
        lines += _describe_news(self._engine.apply())
        lines += [f"  {request.request_id} thrown away, it has ended" for request in thrown_away]
        return lines

    def _step(self) -> list[str]:
        lines = []
        while (plan := self._engine.plan()) is not None:
            lines += _describe_plan(plan)
        return lines + self._apply()

    def _run(self) -> list[str]:
        alive = [name for name in self._engine.told if name not in self._engine.finish_reasons]
        self._engine.run_until_idle()
        return [
            f"{name}: {_numbers(self._engine.told[name])} {self._engine.finish_reasons[name].value}" for name in alive
        ]

    def _finish(self, name: str, reason: FinishReason) -> list[str]:
        self._engine.finish(name, reason)
        return []

    def _pass_time(self, now_s: float) -> list[str]:
        return _describe_news(self._engine.pass_time(now_s - self._engine.now_s))

    def _fail(self, name: str, _options: Options) -> list[str]:
        self._engine.executor.failing_request_ids.add(name)
        return []

    def _lose_executor(self, _name: str, options: Options) -> list[str]:
        return _describe_news(self._engine.lose_executor(int(options["num_blocks"])))

    def _let_executor_drain(self) -> list[str]:
        self._engine.is_executor_draining = True
        return []

    def _pool(self) -> list[str]:
        core, pool = self._engine.core, self._engine.core.kv.pool
        lines = [f"{request.request_id} holds {_numbers(request.block_ids)}" for request in core.running]
        lines += [f"{request.request_id} waits" for request in core.waiting]
        return [*lines, f"{pool.num_free_blocks} free, {pool.num_cached_blocks} of them cached"]

    def _tenants(self) -> list[str]:
        return [
            f"{name}: {tenant.num_running} run, {tenant.num_waiting} wait, {tenant.num_served_tokens} tokens served, "
            f"counter {tenant.counter:g}"
            for name, tenant in self._engine.core.tenants.items()
        ]


def _token_ids(text: str) -> list[int]:
    token_ids: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("..")
        token_ids += range(int(first), int(last or first) + 1)
    return token_ids


def _names(requests: Iterable[Request]) -> str:
    return " ".join(request.request_id for request in requests) or "nobody"


def _numbers(numbers: list[int]) -> str:
    return " ".join(map(str, numbers)) or "nothing"


def _describe_plan(plan: SchedulerOutput) -> list[str]:
    tokens = "1 token" if plan.num_scheduled_tokens == 1 else f"{plan.num_scheduled_tokens} tokens"
    lines = [f"plan {plan.step_id}, {tokens}"]
    lines += [f"  {lost.request.request_id} preempted for {lost.reason.value}" for lost in plan.preempted]
    return lines + [_describe_row(row) for row in plan.rows]


def _describe_row(row: ScheduledRow) -> str:
    start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens - 1
    words = [
        f"  {row.request.request_id} computes",
        f"position {start}" if start == end else f"positions {start}-{end}",
    ]
    if row.is_new and start:
        words.append(f"after {start} cached")
    if row.feeds_back:
        words.append("(the token in flight)")
    if row.samples:
        words.append("and samples")
    if row.new_block_ids:
        words.append(f"[blocks +{_numbers(row.new_block_ids)}]")
    return " ".join(words)


def _describe_news(news: list[RequestOutput]) -> list[str]:
    lines = []
    for told in news:
        words = [f"  {told.request.request_id}"]
        if told.prompt_logprobs is not None:
            run = told.prompt_logprobs
            words.append(f"prompt logprobs {run.first_position}-{run.end_position - 1}")
        if told.token_ids:
            words.append(f"-> {_numbers(list(told.token_ids))}")
        if told.finish_reason is not None:
            words.append(f"ends: {told.finish_reason.value}" + (f" ({told.error})" if told.error else ""))
        lines.append(" ".join(words))
    return lines
