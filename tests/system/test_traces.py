"""One trace per request across all stages, over a real request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.tiny_models import write_tiny_model
from tokenloom.common.config import ProcessSettings
from tokenloom.common.stage import Stage
from tokenloom.common.telemetry import setup_telemetry
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.stage import ExecutorStage
from tokenloom.gateway.config import GatewayConfig
from tokenloom.gateway.server import GatewayStage
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.stage import SchedulerStage
from tokenloom.tokenizer.config import TokenizerConfig
from tokenloom.tokenizer.stage import TokenizerStage

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER_SPAN_ID}-01"


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    """Receives every span of this process from here on."""
    memory = InMemorySpanExporter()
    provider = setup_telemetry("test", "", SimpleSpanProcessor(memory))
    assert provider is not None
    yield memory
    provider.shutdown()


@asynccontextmanager
async def all_stages(folder: Path) -> AsyncIterator[str]:
    """The four stages in this process, over real sockets; gives the gateway's URL."""
    model = str(write_tiny_model(folder / "tiny-llama", "llama"))
    at = {name: f"unix:{folder}/{name}" for name in ("executor", "scheduler", "tokenizer")}
    process = ProcessSettings()
    gateway = GatewayStage(GatewayConfig(process, listen="127.0.0.1:0", tokenizer=(at["tokenizer"],)))
    stages: list[Stage] = [
        ExecutorStage(ExecutorConfig(process, listen=at["executor"], model=model, dtype="float32")),
        SchedulerStage(SchedulerSettings(process, listen=at["scheduler"], executor=at["executor"])),
        TokenizerStage(TokenizerConfig(process, listen=at["tokenizer"], scheduler=at["scheduler"], model=model)),
        gateway,
    ]
    for stage in stages:
        await stage.start()
    try:
        yield f"http://127.0.0.1:{gateway.port}"
    finally:
        for stage in reversed(stages):
            await stage.stop()


async def wait_until_ready(client: httpx.AsyncClient) -> None:
    for _ in range(400):
        if (await client.get("/ready")).status_code == 200:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the stack is not ready")


def one_request(folder: Path) -> str:
    """Send one traced request through all stages; returns its id."""

    async def test() -> str:
        async with all_stages(folder) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            await wait_until_ready(client)
            body: dict[str, Any] = {"prompt": "The fox", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT})
            assert response.status_code == 200, response.text
            await asyncio.sleep(0.3)  # the executor hears of the row's end with a plan of its own
            request_id: str = response.json()["id"]
            return request_id

    return uvloop.run(asyncio.wait_for(test(), 60))


def test_one_request_is_one_trace_from_the_caller_to_the_executor(
    exporter: InMemorySpanExporter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    request_id = one_request(tmp_path)
    finished = exporter.get_finished_spans()
    spans = {span.name: span for span in finished if format(span.context.trace_id, "032x") == TRACE_ID}
    chain = ["POST /v1/completions", "tokenizer.complete", "engine.request", "executor.row"]
    assert set(chain) <= set(spans), sorted(spans)
    parents = [CALLER_SPAN_ID, *(format(spans[name].context.span_id, "016x") for name in chain)]
    for name, parent in zip(chain, parents, strict=False):
        assert format(parent_id(spans[name]), "016x") == parent, f"{name} hangs on its caller's span"
    steps = [span for span in finished if span.name == "engine.step"]
    assert len(steps) >= 5
    engine_context = spans["engine.request"].context
    linked = [step for step in steps if any(link.context.span_id == engine_context.span_id for link in step.links)]
    assert len(linked) == 5, "each of the request's steps links to it"
    assert {span.name for span in finished} >= {"executor.step"}
    texts = [str(value) for span in finished for value in (span.attributes or {}).values()]
    assert not any("fox" in text for text in texts), "no prompt stands in a span"
    digits = request_id.partition("-")[2]
    stages_that_logged = {
        record.name.split(".")[1] for record in caplog.records if digits in str(getattr(record, "request_id", ""))
    }
    assert {"gateway", "scheduler", "tokenizer"} <= stages_that_logged
    assert "fox" not in caplog.text


def parent_id(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id
