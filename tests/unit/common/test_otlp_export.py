from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

EXPORTING = """
import sys
from tokenloom.common.telemetry import setup_telemetry, tracer
provider = setup_telemetry("scheduler", sys.argv[1])
tracer().start_span("engine.request").end()
provider.shutdown()
"""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.received: list[tuple[str, str]] = []

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            spans = [span.name for scope in resource.scope_spans for span in scope.spans]
            self.received += [(names["service.name"], span) for span in spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_an_otlp_collector_with_the_stages_name() -> None:
    """In a process of its own, since a process has one tracer provider for good."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    subprocess.run([sys.executable, "-c", EXPORTING, f"http://127.0.0.1:{port}"], check=True, timeout=60)
    server.stop(0).wait()
    assert collector.received == [("tokenloom-scheduler", "engine.request")]
