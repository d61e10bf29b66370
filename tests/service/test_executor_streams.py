"""Streams of plans and their epochs, over a real Unix socket: order, bounds, ends, and spans."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.service.executor_stack import (
    END_OF_STREAM,
    LIMIT_S,
    Client,
    Test,
    ask,
    generate,
    new_row,
    run_with_executor,
    until,
)
from tests.tiny_models import write_tiny_model
from tokenloom.api.v1 import common_pb2, executor_pb2
from tokenloom.common.errors import FailedPrecondition, from_rpc_error
from tokenloom.common.telemetry import context_of, inject
from tokenloom.executor import convert, spans
from tokenloom.executor.epochs import Epochs
from tokenloom.executor.plan_stream import MAX_PLANS_IN_FLIGHT
from tokenloom.executor.runner import Runner
from tokenloom.executor.spans import RowSpans


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def with_executor(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    return lambda test: run_with_executor(test, folder, tmp_path)


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


def test_a_scheduler_that_was_replaced_gets_the_executor_back_only_when_the_other_one_is_gone(
    with_executor: Callable[[Test], None],
) -> None:
    async def test(client: Client) -> None:
        await client.initialize()
        had = client.epoch
        await client.initialize()
        stream = client.stream()
        await ask(stream, client.plan(1, [(1, 3, 0, [1])], new_rows=[new_row(1, [5, 6, 7])]))
        again = executor_pb2.InitializeRequest(num_blocks=50, last_epoch=had)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.stub.Initialize(again, timeout=LIMIT_S)
        assert from_rpc_error(failure.value).reason == "EXECUTOR_IN_USE"
        response = await ask(stream, client.plan(2, [(1, 1, 3, [])]))
        assert len(response.sampled_token_ids) == 1, "the other one is not disturbed"
        stream.cancel()
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await client.stub.Initialize(again, timeout=LIMIT_S)
                    return
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)  # the end of the stream is on its way

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
    accepted: list[int] = []
    may_run: list[bool] = []
    execute, is_current, start_step = Runner.execute, Epochs.is_current, RowSpans.step

    def slow_execute(self: Runner, plan: Any) -> Any:
        ran.append(plan.step_id)
        started.set()
        go_on.wait(LIMIT_S)
        return execute(self, plan)

    def noted(self: Epochs, counter: int) -> bool:
        may_run.append(is_current(self, counter))
        return may_run[-1]

    def counted(self: RowSpans, request: Any) -> trace.Span:
        accepted.append(request.step_id)
        return start_step(self, request)

    def num_ended(name: str) -> int:
        return [span.name for span in exporter.get_finished_spans()].count(name)

    monkeypatch.setattr(Runner, "execute", slow_execute)
    monkeypatch.setattr(Epochs, "is_current", noted)
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
