"""The life of a request: check, encode, submit one choice per (prompt, number), collect, count, end.

1. `GenerationService.run` checks the request and reserves room for its choices.
2. Prompts become ids: a conversation through the chat template, texts through the encoder.
3. All that a sending again needs is fixed: request id, seed, each choice's own seed, every default.
4. Each choice is submitted to the engine; all or none.
5. At the engine's first sign of life Accepted is told, so that a refusal before it is the call's own status.
6. Choices turn tokens into deltas (choice.py) until each has ended; then Completed is told.
7. However it ends, choices that are still open are cancelled at the engine, or detached: those of a resumable request
   whose client is gone, or reads it elsewhere, or has to go elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from tokenloom.common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    TokenloomError,
    Unavailable,
)
from tokenloom.common.telemetry import context_of, tracer
from tokenloom.tokenizer import convert
from tokenloom.tokenizer.active_request import ActiveRequest
from tokenloom.tokenizer.assets import TokenizerAssets
from tokenloom.tokenizer.chat_template import ChatTemplate
from tokenloom.tokenizer.domain import ChatInput, EngineInfo, GenerationRequest
from tokenloom.tokenizer.encoder import Encoder
from tokenloom.tokenizer.engine_client import EngineClient
from tokenloom.tokenizer.events import TIME_IS_UP, EventSink
from tokenloom.tokenizer.metrics import ACTIVE_CHOICES, ACTIVE_REQUESTS, REQUESTS
from tokenloom.tokenizer.validation import check_num_prompt_ids, check_prompt, check_request, checked_ids

log = logging.getLogger(__name__)
_DEADLINE_GRACE_S = 1.0  # the engine ends a request at its deadline; this is for an engine that does not answer
_CLOCK_MARGIN_S = 0.1  # gRPC ends a call whose time is up by itself, by the client's clock and thus a little earlier
_RETRY_AFTER_S = 1.0
_GOES_ON_ELSEWHERE = frozenset({"TAKEN_OVER", "SUPERSEDED", "DRAINING"})


class GenerationService:
    """Runs requests.

    Args:
        model_id: the model that requests may name.
        max_active_choices: bound on choices in flight.
    """

    def __init__(
        self,
        assets: TokenizerAssets,
        encoder: Encoder,
        chat_template: ChatTemplate,
        engine: EngineClient,
        *,
        model_id: str,
        max_active_choices: int,
    ) -> None:
        self._assets = assets
        self._encoder = encoder
        self._chat_template = chat_template
        self._engine = engine
        self._model_id = model_id
        self._max_active_choices = max_active_choices
        self._num_active_choices = 0
        self._active: set[ActiveRequest] = set()
        self._by_id: dict[str, ActiveRequest] = {}
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_choices(self) -> int:
        """Choices in flight."""
        return self._num_active_choices

    @property
    def num_active(self) -> int:
        """Requests in flight."""
        return len(self._active)

    async def run(self, request: GenerationRequest, sink: EventSink) -> None:
        """Serve a request; returns when Completed was told. Cancelling it cancels the request.

        Raises: TokenloomError if it failed; no event follows then.
        """
        engine = self._require_engine(request)
        active = ActiveRequest(request, sink, engine, self._engine, self._assets, self._model_id)
        with self._counted(active), _traced(active) as span:
            limit_s = request.remaining_time_s
            end_s = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
            try:
                async with asyncio.timeout_at(end_s) as timer:
                    check_request(request, engine, self._model_id)
                    self._reserve(active, engine)
                    prompts = await self.prompts_of(request, engine)
                    await active.prepare(prompts, convert.trace_of(context_of(span)))
                    active.submit(self._by_id.get(active.scoped_id))
                    self._by_id[active.scoped_id] = active
                    timer.reschedule(None if end_s is None else end_s + _DEADLINE_GRACE_S)
                    await active.done
            except TimeoutError:
                raise DeadlineExceeded(TIME_IS_UP) from None

    def abandon(self, request: GenerationRequest) -> None:
        """End what the engine may have of a request that was sent again and whose client has left meanwhile."""
        for index in range(request.num_choices):
            self._engine.abandon(f"{request.scoped_id(request.options.request_id)}:{index}", "client_disconnected")

    async def prompts_of(self, request: GenerationRequest, engine: EngineInfo) -> tuple[Sequence[int], ...]:
        """The ids of a request's prompts.

        Raises: InvalidArgument naming the prompt that is wrong.
        """
        if isinstance(request.input, ChatInput):
            if request.input.prompt_token_ids is not None:
                return (checked_ids(request.input.prompt_token_ids, engine, "prompt_token_ids"),)
            rendered = await self._chat_template.render(request.input)
            ids = await self._encoder.encode_segments(rendered.segments, max_model_len=engine.max_model_len)
            check_prompt(ids, engine, "messages")
            return (ids,)
        prompts = request.input.prompts
        check_num_prompt_ids(prompts)
        fields = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
        texts = [
            self._encoder.encode(prompt, add_special_tokens=True, field=field, max_model_len=engine.max_model_len)
            for prompt, field in zip(prompts, fields, strict=True)
            if isinstance(prompt, str)
        ]
        encoded = iter(await asyncio.gather(*texts))
        taken: list[Sequence[int]] = []
        for prompt, field in zip(prompts, fields, strict=True):
            if isinstance(prompt, str):
                taken.append(next(encoded))
            else:
                taken.append(checked_ids(prompt, engine, field))
                await asyncio.sleep(0)
            check_prompt(taken[-1], engine, field)
        check_num_prompt_ids(taken)
        return tuple(taken)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, then fail them with Unavailable."""
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._is_idle.wait()
        except TimeoutError:
            log.warning("%d requests are cut off", len(self._active))
            for active in list(self._active):
                active.fail(Unavailable("the server stops", reason="DRAINING", retry_after_s=_RETRY_AFTER_S))
            await asyncio.sleep(0)

    def _require_engine(self, request: GenerationRequest) -> EngineInfo:
        """What the engine said of itself. Raises: Unavailable if requests are not taken now."""
        try:
            if self._is_draining:
                raise Unavailable("the server is about to stop", reason="DRAINING", retry_after_s=_RETRY_AFTER_S)
            return self._engine.info
        except Unavailable as error:
            REQUESTS.labels(request.kind, error.code.name.lower()).inc()
            raise

    def _reserve(self, active: ActiveRequest, engine: EngineInfo) -> None:
        """Make room for the request's choices, or refuse it; what a gateway sends again was counted before."""
        num_choices = active.num_choices
        is_new = active.request.age_s is None
        most = min(self._max_active_choices, engine.max_num_waiting or self._max_active_choices)
        if is_new and num_choices > most:
            message = f"n times the number of prompts is {num_choices}; at most {most} are accepted"
            raise InvalidArgument(message, field="n")
        if is_new and self._num_active_choices + num_choices > self._max_active_choices:
            raise ResourceExhausted("too many requests are in flight", retry_after_s=_RETRY_AFTER_S)
        self._num_active_choices += num_choices
        active.num_reserved = num_choices
        ACTIVE_CHOICES.set(self._num_active_choices)

    @contextmanager
    def _counted(self, active: ActiveRequest) -> Iterator[None]:
        """Keep the books about a request in flight, and clean up behind it."""
        self._active.add(active)
        self._is_idle.clear()
        ACTIVE_REQUESTS.set(len(self._active))
        outcome, may_return = "completed", False
        try:
            yield
        except asyncio.CancelledError:
            outcome = "deadline_exceeded" if active.is_late(_CLOCK_MARGIN_S) else "cancelled"
            may_return = outcome == "cancelled"
            raise
        except TokenloomError as error:
            outcome, may_return = error.code.name.lower(), error.reason in _GOES_ON_ELSEWHERE
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            active.leave("client_disconnected" if outcome == "cancelled" else outcome, may_return=may_return)
            self._active.discard(active)
            if self._by_id.get(active.scoped_id) is active:
                del self._by_id[active.scoped_id]
            self._num_active_choices -= active.num_reserved
            ACTIVE_CHOICES.set(self._num_active_choices)
            ACTIVE_REQUESTS.set(len(self._active))
            REQUESTS.labels(active.request.kind, outcome).inc()
            log.info("%s %s", active.request.kind, outcome, extra=_log_fields(active))
            if not self._active:
                self._is_idle.set()


@contextmanager
def _traced(active: ActiveRequest) -> Iterator[Span]:
    """A span around a request, in its caller's trace."""
    request = active.request
    context = convert.trace_context(request.trace)
    attributes: dict[str, str | int] = {
        "tokenloom.request_id": active.request_id,
        "tokenloom.num_choices": active.num_choices,
    }
    span = tracer().start_span(f"tokenizer.{request.kind}", context, SpanKind.SERVER, attributes)
    try:
        yield span
    except BaseException as error:
        span.set_status(Status(StatusCode.ERROR, _kind_of(error)))
        raise
    finally:
        span.set_attribute("gen_ai.usage.input_tokens", active.num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", active.num_generated_tokens)
        span.end()


def _kind_of(error: BaseException) -> str:
    """What a trace says of an error: never its message, which may quote the caller's text."""
    if isinstance(error, TokenloomError):
        return error.reason or error.code.name
    return type(error).__name__


def _log_fields(active: ActiveRequest) -> dict[str, object]:
    """What a log line about a request says."""
    return {
        "request_id": active.request_id,
        "num_prompt_tokens": active.num_prompt_tokens,
        "num_generated_tokens": active.num_generated_tokens,
        "duration_s": round(active.duration_s, 3),
    }
