"""Spans of the scheduler: one per request, and one per step that links to the requests in it."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from tokenloom.common.errors import TokenloomError
from tokenloom.common.telemetry import Context, context_of, is_recording, tracer
from tokenloom.scheduler.core.plan import SchedulerOutput
from tokenloom.scheduler.sessions import Stream


class StepTracer:
    """Begins and ends the spans of steps; does nothing while nobody receives spans."""

    def __init__(self) -> None:
        self._spans: dict[int, Span] = {}

    def begin(self, plan: SchedulerOutput, streams: Mapping[str, Stream]) -> Context | None:
        """Start a step's span; returns its context for the executor, None if nobody records."""
        if not is_recording():
            return None
        contexts = (streams[row.request.request_id].span.get_span_context() for row in plan.rows)
        span = tracer().start_span(
            "engine.step",
            context=Context(),
            kind=SpanKind.PRODUCER,
            links=[Link(context) for context in contexts if context.is_valid],
            attributes={
                "tokenloom.step_id": plan.step_id,
                "tokenloom.num_rows": len(plan.rows),
                "tokenloom.num_scheduled_tokens": plan.num_scheduled_tokens,
                "tokenloom.num_preempted": len(plan.preempted),
            },
        )
        self._spans[plan.step_id] = span
        return context_of(span)

    def end(self, step_id: int, error: TokenloomError | None) -> None:
        """The step's result was applied."""
        span = self._spans.pop(step_id, None)
        if span is not None:
            if error is not None:
                span.set_status(Status(StatusCode.ERROR, error.message))
            span.end()

    def abandon(self, reason: str) -> None:
        """The steps in flight will have no result."""
        for span in self._spans.values():
            span.set_status(Status(StatusCode.ERROR, reason))
            span.end()
        self._spans.clear()


def end_request_span(stream: Stream, error: TokenloomError | None = None) -> None:
    """End a request's span with what became of it."""
    request, span = stream.request, stream.span
    span.set_attributes(
        {
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": len(request.output_token_ids),
            "tokenloom.num_cached_tokens": request.num_cached_tokens or 0,
            "tokenloom.num_preemptions": request.num_preemptions,
            "tokenloom.finish_reason": request.finish_reason.value if request.finish_reason else "",
        }
    )
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error.message))
    span.end()
