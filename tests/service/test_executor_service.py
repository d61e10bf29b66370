"""The executor's service over a real Unix socket, with a tiny real model behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.tiny_models import make_tiny_model, write_tiny_model
from tokenloom.api.v1 import common_pb2, executor_pb2, executor_pb2_grpc
from tokenloom.common.channel import bearer_metadata, make_channel
from tokenloom.common.config import ProcessSettings
from tokenloom.common.errors import FailedPrecondition, InvalidArgument, Unauthenticated, from_rpc_error
from tokenloom.common.telemetry import context_of, inject
from tokenloom.executor import convert, spans
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.epochs import Epochs
from tokenloom.executor.model import PagedModel
from tokenloom.executor.plan_stream import MAX_PLANS_IN_FLIGHT
from tokenloom.executor.runner import Runner
from tokenloom.executor.servicer import SERVICE_NAME
from tokenloom.executor.spans import RowSpans
from tokenloom.executor.stage import ExecutorStage

GREEDY = common_pb2.SamplingParams(temperature=0.0)
LIMIT_S = 30.0
END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama")


class Client:
    """What a scheduler does, by hand."""

    def __init__(self, address: str, token: str = "") -> None:
        self.channel: Any = make_channel(address)
        self._metadata = bearer_metadata(token)
        self.stub: Any = executor_pb2_grpc.ExecutorServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
        self.epoch = executor_pb2.Epoch()

    async def initialize(self, num_blocks: int = 50) -> None:
        request = executor_pb2.InitializeRequest(num_blocks=num_blocks)
        self.epoch = (await self.stub.Initialize(request, timeout=LIMIT_S, metadata=self._metadata)).epoch

    def plan(self, step_id: int, rows: list[tuple[int, int, int, list[int]]], **others: Any) -> Any:
        """A plan of rows (id, scheduled, computed, new blocks); single tokens after the first feed back."""
        return executor_pb2.ExecuteRequest(
            **{
                "epoch": self.epoch,
                "step_id": step_id,
                "row_ids": [row[0] for row in rows],
                "num_scheduled_tokens": [row[1] for row in rows],
                "num_computed_tokens": [row[2] for row in rows],
                "feeds_back": [row[1] == 1 and row[2] > 0 for row in rows],
                "num_new_blocks": [len(row[3]) for row in rows],
                "new_block_ids": [block for row in rows for block in row[3]],
                **others,
            }
        )

    def stream(self) -> Any:
        return self.stub.Execute(timeout=LIMIT_S)

    async def serving(self) -> int:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=LIMIT_S)
        return int(answer.status)


def new_row(row_id: int, prompt: list[int], **others: Any) -> executor_pb2.NewRow:
    return executor_pb2.NewRow(**{"row_id": row_id, "prompt_token_ids": prompt, "sampling": GREEDY, **others})


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for what nothing signals; `with_executor` bounds it."""
    while not is_so():
        await asyncio.sleep(0.01)


async def ask(call: Any, plan: Any) -> Any:
    await call.write(plan)
    return await call.read()


@asynccontextmanager
async def running_executor(folder: Path, tmp_path: Path, cluster_token: str = "") -> AsyncIterator[Client]:
    listen = f"unix:{tmp_path}/executor.sock"
    process = ProcessSettings(cluster_token=cluster_token)
    config = ExecutorConfig(
        process, listen=listen, model=str(folder), dtype="float32", kv_cache_bytes=1 << 20, num_threads=1
    )
    stage = ExecutorStage(config)
    await stage.start()
    client = Client(listen, cluster_token)
    try:
        yield client
    finally:
        await client.channel.close()
        await stage.stop()


Test = Callable[[Client], Awaitable[None]]


@pytest.fixture
def with_executor(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    """Run a test's body against a fresh executor."""
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))

    def run(test: Test) -> None:
        async def main() -> None:
            async with asyncio.timeout(LIMIT_S), running_executor(folder, tmp_path) as client:
                await test(client)

        asyncio.run(main())

    return run


def generate(prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' greedy continuation by the model of `folder`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_tiny_model("llama")
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def test_capabilities_describe_the_model(with_executor: Callable[[Test], None]) -> None:
    async def test(client: Client) -> None:
        found = await client.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(), timeout=LIMIT_S)
        assert (found.vocab_size, found.max_model_len, found.block_size) == (512, 1024, 16)
        assert found.max_num_blocks == (1 << 20) // found.block_bytes
        assert found.max_plans_in_flight >= 2
        assert list(found.eos_token_ids) == [2]
        assert found.boot_id
        assert "float32" in found.description

    with_executor(test)


def test_plans_in_flight_are_answered_in_order_with_transformers_own_tokens(
    with_executor: Callable[[Test], None],
) -> None:
    prompt, other = [9, 8, 7, 6, 5], [3, 4]

    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        # Both rows' next plans are sent before any result is read: rows feed back what is still in flight.
        await call.write(
            client.plan(1, [(1, 5, 0, [1]), (2, 2, 0, [2])], new_rows=[new_row(1, prompt), new_row(2, other)])
        )
        await call.write(client.plan(2, [(1, 1, 5, []), (2, 1, 2, [])]))
        tokens: dict[int, list[int]] = {1: [], 2: []}
        for step_id in range(1, 11):
            if step_id + 2 <= 10:
                await call.write(client.plan(step_id + 2, [(1, 1, 5 + step_id, []), (2, 1, 2 + step_id, [])]))
            result = await call.read()
            assert result.step_id == step_id
            for row_id, token in zip(result.row_ids, result.sampled_token_ids, strict=True):
                tokens[row_id].append(token)
        await call.done_writing()
        assert await call.read() is END_OF_STREAM
        assert tokens == {1: generate(prompt, 10), 2: generate(other, 10)}

    with_executor(test)


def test_plans_of_no_epoch_or_an_old_one_end_the_stream_with_failed_precondition(
    with_executor: Callable[[Test], None],
) -> None:
    async def test(client: Client) -> None:
        await refused(client.stream(), client.plan(1, [(1, 1, 0, [1])], new_rows=[new_row(1, [5])]))
        await client.initialize()
        old = client.epoch
        await client.initialize()
        assert (old.boot_id, old.counter + 1) == (client.epoch.boot_id, client.epoch.counter)
        stale = client.plan(1, [(1, 1, 0, [1])], new_rows=[new_row(1, [5])], epoch=old)
        await refused(client.stream(), stale)
        foreign = executor_pb2.Epoch(boot_id="another", counter=client.epoch.counter)
        await refused(client.stream(), client.plan(1, [(1, 1, 0, [1])], new_rows=[new_row(1, [5])], epoch=foreign))

    async def refused(call: Any, plan: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await ask(call, plan)
        error = from_rpc_error(failure.value)
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "STALE_EPOCH"

    with_executor(test)


def test_initialize_voids_open_streams_and_rows(with_executor: Callable[[Test], None]) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        before = client.stream()
        await ask(before, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        await client.initialize()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await before.read()
        assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        after = client.stream()
        result = await ask(after, client.plan(2, [(1, 1, 3, [])]))
        assert "row 1 is unknown" in result.step_error.message

    with_executor(test)


def test_a_second_stream_of_an_epoch_is_refused_and_the_epoch_ends_with_its_first(
    with_executor: Callable[[Test], None],
) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        first = client.stream()
        await ask(first, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await ask(client.stream(), client.plan(2, [(1, 1, 3, [])]))
        assert from_rpc_error(failure.value).reason == "EPOCH_TAKEN"
        assert (await ask(first, client.plan(2, [(1, 1, 3, [])]))).row_ids == [1]
        await first.done_writing()
        assert await first.read() is END_OF_STREAM
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await ask(client.stream(), client.plan(3, [(1, 1, 4, [])]))
        assert from_rpc_error(failure.value).reason == "STALE_EPOCH"
        await client.initialize()
        again = client.plan(4, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])])
        assert (await ask(client.stream(), again)).row_ids == [1]

    with_executor(test)


def test_malformed_plans_are_step_errors_and_the_stream_goes_on(with_executor: Callable[[Test], None]) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        await ask(call, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        bad = [
            client.plan(2, [(99, 1, 3, [])]),
            client.plan(3, [(1, 1, 3, [50])]),
            client.plan(4, [(1, 1, 3, [])], num_computed_tokens=[]),
            client.plan(5, [(1, 513, 3, [])]),
            client.plan(9, [(1, 1, 3, [])]),
        ]
        for plan in bad:
            result = await ask(call, plan)
            assert result.step_id == plan.step_id
            assert result.step_error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert result.step_error.reason == "MALFORMED_PLAN"
        good = await ask(call, client.plan(10, [(1, 1, 3, [])]))
        assert list(good.sampled_token_ids) == generate([5, 6, 7], 2)[1:]

    with_executor(test)


def test_a_bad_new_row_fails_alone_beside_a_running_one(with_executor: Callable[[Test], None]) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        await ask(call, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        unseeded = new_row(3, [5], sampling=common_pb2.SamplingParams(temperature=1.0))
        rows = [(1, 1, 3, []), (2, 2, 0, [2]), (3, 1, 0, [3])]
        result = await ask(call, client.plan(2, rows, new_rows=[new_row(2, [5, 512]), unseeded]))
        assert {row.row_id: row.error.field for row in result.row_errors} == {2: "prompt_token_ids", 3: "seed"}
        assert list(result.row_ids) == [1]
        assert list(result.sampled_token_ids) == generate([5, 6, 7], 2)[1:]

    with_executor(test)


def test_a_forward_pass_that_raises_is_a_step_error_and_the_process_goes_on(
    with_executor: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        with monkeypatch.context() as patch:
            patch.setattr(PagedModel, "hidden_states", lambda *_: 1 / 0)
            failed = await ask(call, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        assert failed.step_error.code == grpc.StatusCode.INTERNAL.value[0]
        in_flight = await ask(call, client.plan(2, [(1, 1, 3, []), (2, 2, 0, [2])], new_rows=[new_row(2, [8, 9])]))
        assert [row.row_id for row in in_flight.row_errors] == [1]
        assert list(in_flight.sampled_token_ids) == generate([8, 9], 1)

    with_executor(test)


def test_plans_beyond_the_bound_wait_in_the_scheduler_and_the_event_loop_stays_free(
    with_executor: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, taken = threading.Event(), []
    execute, unpack = Runner.execute, convert.plan_from_proto

    def slow_execute(self: Runner, plan: Any) -> Any:
        go_on.wait(LIMIT_S)
        return execute(self, plan)

    def counted(request: Any, defaults: Any) -> Any:
        taken.append(request.step_id)
        return unpack(request, defaults)

    monkeypatch.setattr(Runner, "execute", slow_execute)
    monkeypatch.setattr(convert, "plan_from_proto", counted)

    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        await call.write(client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        for step_id in range(2, 11):
            await call.write(client.plan(step_id, [(1, 1, step_id + 1, [])]))
        await until(lambda: len(taken) >= MAX_PLANS_IN_FLIGHT)
        # Health answers while the model's thread is held, and no more plans are taken meanwhile.
        for _ in range(5):
            assert await client.serving() == health_pb2.HealthCheckResponse.SERVING
            await asyncio.sleep(0.05)
        assert taken == list(range(1, MAX_PLANS_IN_FLIGHT + 1))
        go_on.set()
        assert [(await call.read()).step_id for _ in range(10)] == list(range(1, 11))

    with_executor(test)


def test_initialize_during_queued_plans_never_runs_them(
    with_executor: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on, ran = threading.Event(), threading.Event(), []
    execute = Runner.execute

    def slow_execute(self: Runner, plan: Any) -> Any:
        ran.append(plan.step_id)
        started.set()
        go_on.wait(LIMIT_S)
        return execute(self, plan)

    monkeypatch.setattr(Runner, "execute", slow_execute)

    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        await call.write(client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        await call.write(client.plan(2, [(1, 1, 3, [])]))
        await asyncio.to_thread(started.wait, LIMIT_S)
        taking_over = asyncio.create_task(client.initialize())
        await asyncio.sleep(0.1)
        assert not taking_over.done(), "it waits for the plan that runs"
        go_on.set()
        await taking_over
        assert (await call.read()).step_id == 1
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert ran == [1]

    with_executor(test)


def test_a_client_that_goes_away_leaves_the_executor_ready_for_the_next(with_executor: Callable[[Test], None]) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        await call.write(client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        call.cancel()
        await client.initialize()
        result = await ask(client.stream(), client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        assert list(result.sampled_token_ids) == generate([5, 6, 7], 1)

    with_executor(test)


@pytest.mark.parametrize("num_blocks", [0, 1, 1 << 20])
def test_kv_memory_that_does_not_fit_is_invalid_and_leaves_the_epoch(
    with_executor: Callable[[Test], None], num_blocks: int
) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        await ask(call, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.stub.Initialize(executor_pb2.InitializeRequest(num_blocks=num_blocks), timeout=LIMIT_S)
        error = from_rpc_error(failure.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == "num_blocks"
        assert (await ask(call, client.plan(2, [(1, 1, 3, [])]))).row_ids == [1]

    with_executor(test)


def test_callers_need_the_cluster_credential(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))

    async def main() -> None:
        async with running_executor(folder, tmp_path, cluster_token="secret") as client:
            await client.initialize()
            stranger = Client(f"unix:{tmp_path}/executor.sock")
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stranger.initialize()
            await stranger.channel.close()
            assert isinstance(from_rpc_error(failure.value), Unauthenticated)

    asyncio.run(main())


def recorded_spans(monkeypatch: pytest.MonkeyPatch) -> tuple[trace.Tracer, InMemorySpanExporter]:
    """Record the executor's spans; gives a tracer for the callers' and where all go when they end."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    monkeypatch.setattr(spans, "tracer", lambda: tracer)
    return tracer, exporter


def carried(span: trace.Span) -> common_pb2.TraceContext:
    return inject(context_of(span))


def test_plans_behind_the_one_that_runs_are_void_when_the_stream_ends_and_all_spans_end(
    with_executor: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer, exporter = recorded_spans(monkeypatch)
    of_request, of_plan = tracer.start_span("request"), tracer.start_span("plan")
    started, go_on, ran = threading.Event(), threading.Event(), []
    may_run: list[bool] = []
    execute, is_current = Runner.execute, Epochs.is_current

    def slow_execute(self: Runner, plan: Any) -> Any:
        ran.append(plan.step_id)
        started.set()
        go_on.wait(LIMIT_S)
        return execute(self, plan)

    def noted(self: Epochs, counter: int) -> bool:
        may_run.append(is_current(self, counter))
        return may_run[-1]

    monkeypatch.setattr(Runner, "execute", slow_execute)
    monkeypatch.setattr(Epochs, "is_current", noted)

    def num_ended(name: str) -> int:
        return [span.name for span in exporter.get_finished_spans()].count(name)

    accepted: list[int] = []
    start_step = RowSpans.step

    def counted(self: RowSpans, request: Any) -> trace.Span:
        accepted.append(request.step_id)
        return start_step(self, request)

    monkeypatch.setattr(RowSpans, "step", counted)

    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        row = new_row(1, [5, 6, 7], trace=carried(of_request))
        await call.write(client.plan(1, [(1, 3, 0, [1])], new_rows=[row], trace=carried(of_plan)))
        await call.write(client.plan(2, [(1, 1, 3, [])], trace=carried(of_plan)))
        await call.write(client.plan(3, [(1, 1, 4, [])], trace=carried(of_plan)))
        await asyncio.to_thread(started.wait, LIMIT_S)
        await until(lambda: len(accepted) == 3)
        call.cancel()
        await until(lambda: num_ended("executor.step") == 3 and num_ended("executor.row") == 1)
        go_on.set()
        await until(lambda: len(may_run) == 3)
        assert may_run == [True, False, False]
        await client.initialize()  # behind everything that was queued
        assert ran == [1]

    with_executor(test)


def test_row_and_step_spans_join_the_traces_that_the_plan_carries(
    with_executor: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer, exporter = recorded_spans(monkeypatch)
    of_request, of_plan = tracer.start_span("request"), tracer.start_span("plan")

    async def test(client: Client) -> None:
        await client.initialize()
        call = client.stream()
        row = new_row(1, [5, 6, 7], request_id="r-1", trace=carried(of_request))
        await ask(call, client.plan(1, [(1, 3, 0, [1])], new_rows=[row], trace=carried(of_plan)))
        await ask(call, client.plan(2, [], finished_row_ids=[1]))
        ended = {span.name: span for span in exporter.get_finished_spans()}
        assert ended["executor.row"].context.trace_id == of_request.get_span_context().trace_id
        assert dict(ended["executor.row"].attributes or {})["request.id"] == "r-1"
        assert ended["executor.step"].context.trace_id == of_plan.get_span_context().trace_id
        assert ended["executor.step"].links[0].context.span_id == ended["executor.row"].context.span_id

    with_executor(test)
