"""OpenTelemetry spans of the executor: one per row, in its request's trace, and one per plan, linked to its rows.

Plans and rows without a trace context cost nothing.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from tokenloom.api.v1 import executor_pb2
from tokenloom.common.telemetry import extract, tracer


class RowSpans:
    """Spans of an epoch's rows, from the plan that begins a row to the one that finishes it."""

    def __init__(self) -> None:
        self._spans: dict[int, trace.Span] = {}

    def follow(self, request: executor_pb2.ExecuteRequest) -> None:
        """End the spans of a plan's finished rows and start those of its new ones."""
        for row_id in request.finished_row_ids:
            if (span := self._spans.pop(row_id, None)) is not None:
                span.end()
        for new in request.new_rows:
            if new.trace.traceparent and new.row_id not in self._spans:
                attributes: dict[str, AttributeValue] = {
                    "request.id": new.request_id,
                    "prompt.tokens": len(new.prompt_token_ids),
                    "resumed.tokens": len(new.generated_token_ids),
                }
                self._spans[new.row_id] = tracer().start_span("executor.row", extract(new.trace), attributes=attributes)

    def step(self, request: executor_pb2.ExecuteRequest) -> trace.Span:
        """Start the span of a plan; one that records nothing if the plan carries no trace."""
        if not request.trace.traceparent:
            return trace.INVALID_SPAN
        links = [
            trace.Link(span.get_span_context())
            for row_id in request.row_ids
            if (span := self._spans.get(row_id)) is not None
        ]
        attributes = {
            "step.id": request.step_id,
            "step.rows": len(request.row_ids),
            "step.tokens": sum(request.num_scheduled_tokens),
        }
        return tracer().start_span("executor.step", extract(request.trace), links=links, attributes=attributes)

    def end_all(self) -> None:
        """End what is left, when an epoch ends."""
        for span in self._spans.values():
            span.end()
        self._spans.clear()
