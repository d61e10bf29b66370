"""One trace per request across all stages, over a real request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.system.in_process import all_stages
from tokenloom.common.telemetry import setup_telemetry

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


def one_request(folder: Path) -> str:
    """Send one traced request through all stages; returns its id."""

    async def test() -> str:
        async with all_stages(folder) as client:
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
