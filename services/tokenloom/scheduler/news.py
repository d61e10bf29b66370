"""Tells readers what became of their requests, and counts it.

One call tells all news of a step: what every row needs is done per row, everything else once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from tokenloom.common.errors import DeadlineExceeded, Internal, ResourceExhausted, TokenloomError
from tokenloom.scheduler import metrics
from tokenloom.scheduler.core.plan import RequestOutput
from tokenloom.scheduler.core.request import FinishReason, RequestRefused
from tokenloom.scheduler.core.suspects import ExecutorCrash
from tokenloom.scheduler.frames import FinishedRow, TokenRow
from tokenloom.scheduler.registry import Registry
from tokenloom.scheduler.sessions import Stream
from tokenloom.scheduler.tracing import end_request_span

log = logging.getLogger(__name__)
OVERLOAD_RETRY_S = 1.0


class NewsTeller:
    """Fills the outboxes of the sessions.

    Args:
        on_resumable_end: told the end of each resumable request.
    """

    def __init__(
        self, registry: Registry, on_resumable_end: Callable[[Stream, FinishReason, TokenloomError | None], None]
    ) -> None:
        self._registry = registry
        self._on_resumable_end = on_resumable_end

    def tell_begin(self, stream: Stream, now_s: float) -> None:
        """A request is in a plan for the first time."""
        stream.has_begun = True
        num_cached = stream.request.num_cached_tokens or 0
        metrics.QUEUE_TIME.observe(now_s - stream.taken_s)
        metrics.PROMPT_TOKENS.inc(stream.request.num_prompt_tokens)
        stream.span.add_event("scheduled", {"num_cached_tokens": num_cached})
        if stream.session is not None:
            stream.session.outbox.accept(stream.handle, num_cached)

    def tell(self, news: Iterable[RequestOutput], now_s: float) -> None:
        """What a step, or an event between steps, brought."""
        streams = self._registry.streams
        num_tokens = 0
        num_since: dict[float, int] = {}  # rows by when their request's token before was known
        for output in news:
            stream = streams[output.request.request_id]
            if output.prompt_logprobs is not None:
                self._tell_prompt_logprobs(stream, output)
            if output.token_ids:
                num_tokens += len(output.token_ids)
                if stream.last_token_s is None:
                    self._note_first_token(stream, now_s)
                else:
                    num_since[stream.last_token_s] = num_since.get(stream.last_token_s, 0) + 1
                stream.last_token_s = now_s
                if output.logprobs is not None:
                    stream.told.append(TokenRow(output.first_token_index, output.token_ids, output.logprobs))
                if stream.session is not None:
                    stream.session.outbox.add_tokens(
                        stream.handle, output.first_token_index, output.token_ids, output.logprobs
                    )
            if output.finish_reason is not None:
                self._tell_end(stream, output, output.finish_reason, now_s)
        if num_tokens:
            metrics.GENERATION_TOKENS.inc(num_tokens)
        for last_s, count in num_since.items():
            metrics.INTER_TOKEN_LATENCY.observe(now_s - last_s, count)

    def _tell_prompt_logprobs(self, stream: Stream, output: RequestOutput) -> None:
        assert output.prompt_logprobs is not None
        stream.told_prompt.append(output.prompt_logprobs)
        if stream.session is not None:
            stream.session.outbox.add_prompt_logprobs(stream.handle, output.prompt_logprobs)

    def _note_first_token(self, stream: Stream, now_s: float) -> None:
        stream.first_token_s = now_s
        if not stream.num_resumed_tokens:
            metrics.TIME_TO_FIRST_TOKEN.observe(now_s - stream.request.submitted_s)
        stream.span.add_event("first_token")

    def _tell_end(self, stream: Stream, output: RequestOutput, reason: FinishReason, now_s: float) -> None:
        """The last news of a request. One that failed before it ever ran is refused: its caller gets a plain status."""
        error = error_of(output)
        if (session := stream.session) is not None:
            if error is not None and not stream.has_begun:
                session.outbox.reject(stream.handle, error)
            else:
                num_generated = len(output.request.output_token_ids)
                session.outbox.finish(FinishedRow(stream.handle, reason, num_generated, error))
        self._registry.remove(stream)
        if stream.is_resumable:
            self._on_resumable_end(stream, reason, error)
        if isinstance(output.error, ExecutorCrash):
            log.error("request ended: %s", error, extra={"request_id": output.request.request_id})
        metrics.FINISHED.labels("displaced" if _is_displaced(output) else reason.value).inc()
        _observe_times(stream, now_s)
        end_request_span(stream, DeadlineExceeded("its time was up") if reason is FinishReason.DEADLINE else error)
        if log.isEnabledFor(logging.INFO):
            _log_end(stream, reason)


def _is_displaced(output: RequestOutput) -> bool:
    """The request gave its place in a full queue to another one."""
    return isinstance(output.error, RequestRefused) and output.error.is_overload


def _observe_times(stream: Stream, now_s: float) -> None:
    metrics.REQUEST_TIME.observe(now_s - stream.request.submitted_s)
    num_tokens = len(stream.request.output_token_ids) - stream.num_resumed_tokens
    if num_tokens > 1 and stream.first_token_s is not None and stream.last_token_s is not None:
        metrics.TIME_PER_OUTPUT_TOKEN.observe((stream.last_token_s - stream.first_token_s) / (num_tokens - 1))


def _log_end(stream: Stream, reason: FinishReason) -> None:
    request = stream.request
    fields = {
        "request_id": request.request_id,
        "reason": reason.value,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens or 0,
        "num_generated_tokens": len(request.output_token_ids),
        "num_preemptions": request.num_preemptions,
    }
    log.info("request ended", extra=fields)


def error_of(output: RequestOutput) -> TokenloomError | None:
    """What went wrong with a request that failed, as its caller is told."""
    error = output.error
    if error is None or isinstance(error, TokenloomError):
        return error
    if _is_displaced(output):
        return overload_of(error)
    if isinstance(error, ExecutorCrash):
        return Internal(str(error), reason="EXECUTOR_CRASH")
    return Internal(str(error))


def overload_of(refusal: RequestRefused) -> ResourceExhausted:
    """A refusal for now, as callers are told of it."""
    retry_after_s = OVERLOAD_RETRY_S if refusal.retry_after_s is None else refusal.retry_after_s
    return ResourceExhausted(str(refusal), reason=refusal.reason, retry_after_s=retry_after_s)
