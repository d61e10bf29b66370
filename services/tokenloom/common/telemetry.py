"""OpenTelemetry: one trace per request across all stages.

The context travels as W3C `traceparent`: in HTTP headers and call metadata where a call is one request, in frames
(`common_pb2.TraceContext`) where a stream carries many.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tokenloom import __version__
from tokenloom.api.v1 import common_pb2

_PROPAGATOR = TraceContextTextMapPropagator()
Context = otel_context.Context


def setup_telemetry(stage: str, otlp_endpoint: str, *processors: SpanProcessor) -> TracerProvider | None:
    """Export this process's spans.

    Args:
        stage: becomes the resource's service.name, `tokenloom-<stage>`.
        otlp_endpoint: collector (gRPC); empty: no export.
        processors: further receivers, for tests.

    Returns: the provider, to be shut down at exit; None if nobody receives spans (then they cost next to nothing).
    """
    if not otlp_endpoint and not processors:
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": f"tokenloom-{stage}"}))
    if otlp_endpoint:
        # Imported only if used: it costs each stage a quarter of a second.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=otlp_endpoint.startswith("http://"))
        provider.add_span_processor(BatchSpanProcessor(exporter))
    for processor in processors:
        provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    return provider


def tracer() -> trace.Tracer:
    """The tracer of this package."""
    return trace.get_tracer("tokenloom", __version__)


def extract(proto: common_pb2.TraceContext) -> Context:
    """The context that a frame carries; an empty one if it carries none."""
    if not proto.traceparent:
        return Context()
    return _PROPAGATOR.extract({"traceparent": proto.traceparent, "tracestate": proto.tracestate}, Context())


def extract_headers(headers: Mapping[str, str]) -> Context:
    """The context of HTTP headers or call metadata with lower-case names."""
    return _PROPAGATOR.extract(headers, Context())


def inject(context: Context) -> common_pb2.TraceContext:
    """The frame's form of a context; empty without a recording span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return common_pb2.TraceContext(traceparent=carrier.get("traceparent", ""), tracestate=carrier.get("tracestate", ""))


def context_of(span: trace.Span) -> Context:
    """The context in which children of `span` start."""
    return trace.set_span_in_context(span, Context())


def is_recording() -> bool:
    """Somebody receives this process's spans."""
    return isinstance(trace.get_tracer_provider(), TracerProvider)
