"""Protobuf messages to domain types and back; the only module here that sees both."""

from __future__ import annotations

import dataclasses
import itertools
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from tokenloom.api.v1 import common_pb2, engine_pb2, inference_pb2
from tokenloom.common.errors import InvalidArgument, from_proto, to_proto
from tokenloom.common.keys_file import Tenant
from tokenloom.common.telemetry import Context, extract, inject
from tokenloom.tokenizer import domain, events
from tokenloom.tokenizer.token_text import TokenTexts

_MAX_UINT32 = (1 << 32) - 1
_CACHED_HEADS = 65_536
_TOKEN_TAG, _TOP_TAG = b"\x0a", b"\x12"  # fields 1 and 2 of TokenLogprobs, by length
_PACK_FLOAT = struct.Struct("<f").pack
_FINISH_REASONS = {
    events.FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    events.FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


# --- requests ---------------------------------------------------------------------------------------------------------


def chat_request(
    proto: inference_pb2.ChatRequest, caller: domain.Caller, trace: domain.Trace, remaining_time_s: float | None = None
) -> domain.GenerationRequest:
    """A Chat call. `remaining_time_s` is what the call itself leaves; the shorter of it and the options' counts."""
    return domain.GenerationRequest(
        chat_input(proto), _options(proto.options), caller, trace, _remaining_time_s(proto.options, remaining_time_s)
    )


def complete_request(
    proto: inference_pb2.CompleteRequest,
    caller: domain.Caller,
    trace: domain.Trace,
    remaining_time_s: float | None = None,
) -> domain.GenerationRequest:
    """A Complete call; as `chat_request`.

    Raises: InvalidArgument if a prompt is neither text nor ids.
    """
    prompts = tuple(_prompt(prompt, i) for i, prompt in enumerate(proto.prompts))
    return domain.GenerationRequest(
        domain.CompleteInput(prompts, proto.echo),
        _options(proto.options),
        caller,
        trace,
        _remaining_time_s(proto.options, remaining_time_s),
    )


def session_start(
    start: inference_pb2.SessionStart, caller: domain.Caller, wants_ids: bool = False
) -> domain.GenerationRequest:
    """A request of a gateway's session; only here a request's age is believed, as gateways hold the cluster credential.

    A choice that is resumed was there before too, also if its gateway does not tell the age. The prompts' ids go back
    only to who asked for ids or needs them to go on elsewhere: those of all a gateway's requests share one outbox.

    Args:
        wants_ids: the gateway goes on with its requests elsewhere if this session is lost.

    Raises: InvalidArgument if it is neither Chat nor Complete.
    """
    trace = domain.Trace(start.trace.traceparent, start.trace.tracestate)
    match start.WhichOneof("request"):
        case "chat":
            request = chat_request(start.chat, caller, trace)
        case "complete":
            request = complete_request(start.complete, caller, trace)
        case _:
            raise InvalidArgument("a start needs a chat or a completion")
    is_resumed = any(request.options.resume_token_ids)
    age_s = start.age_ms / 1000 if start.HasField("age_ms") else 0.0 if is_resumed else None
    wants_prompt_ids = request.options.return_token_ids or (wants_ids and _came_as_text(request.input))
    return dataclasses.replace(request, age_s=age_s, wants_prompt_ids=wants_prompt_ids)


def _came_as_text(asked: domain.ChatInput | domain.CompleteInput) -> bool:
    """Who sent it does not know all ids of its prompts."""
    if isinstance(asked, domain.ChatInput):
        return asked.prompt_token_ids is None
    return any(isinstance(prompt, str) for prompt in asked.prompts)


def chat_input(proto: inference_pb2.ChatRequest) -> domain.ChatInput:
    """A conversation."""
    return domain.ChatInput(
        messages=tuple(_message(message) for message in proto.messages),
        tools_json=tuple(proto.tools_json),
        template_kwargs_json=proto.template_kwargs_json,
        add_generation_prompt=_optional(proto, "add_generation_prompt"),
        continue_final_message=proto.continue_final_message,
        prompt_token_ids=proto.prompt_token_ids.ids if proto.HasField("prompt_token_ids") else None,
    )


def _message(proto: inference_pb2.ChatMessage) -> domain.ChatMessage:
    calls = tuple(domain.ToolCall(call.id, call.name, call.arguments_json) for call in proto.tool_calls)
    return domain.ChatMessage(proto.role, _optional(proto, "content"), proto.name, calls, proto.tool_call_id)


def _prompt(proto: inference_pb2.Prompt, index: int) -> str | Sequence[int]:
    match proto.WhichOneof("input"):
        case "text":
            return proto.text
        case "token_ids":
            return proto.token_ids.ids  # left as they are until their number has been checked
    raise InvalidArgument("a prompt needs a text or token ids", field=f"prompt[{index}]")


def _options(proto: inference_pb2.GenerationOptions) -> domain.Options:
    return domain.Options(
        model=proto.model,
        sampling=sampling(proto.sampling),
        stop=_stop(proto.stop),
        stop_strings=tuple(proto.stop_strings),
        include_stop_string=proto.include_stop_string,
        num_choices=proto.num_choices if proto.HasField("num_choices") else 1,
        skip_special_tokens=proto.skip_special_tokens if proto.HasField("skip_special_tokens") else True,
        has_grammar=proto.grammar.kind != common_pb2.Grammar.KIND_UNSPECIFIED,
        priority_class=_optional(proto, "priority_class"),
        cache_salt=proto.cache_salt,
        request_id=proto.request_id,
        return_token_ids=proto.return_token_ids,
        resume_token_ids=tuple(choice.ids for choice in proto.resume_token_ids),
        finished_choices=frozenset(proto.finished_choices),
        num_cached_tokens=dict(proto.num_cached_tokens),
        resumable=proto.resumable,
        num_skipped_tokens=dict(proto.num_skipped_tokens),
    )


def _remaining_time_s(options: inference_pb2.GenerationOptions, call_s: float | None) -> float | None:
    asked_s = options.remaining_time_ms / 1000 if options.HasField("remaining_time_ms") else None
    return min((s for s in (asked_s, call_s) if s is not None), default=None)


def sampling(proto: common_pb2.SamplingParams) -> domain.SamplingParams:
    """Sampling as it came; what was left out is None."""
    return domain.SamplingParams(
        temperature=_optional(proto, "temperature"),
        top_p=_optional(proto, "top_p"),
        top_k=_optional(proto, "top_k"),
        min_p=_optional(proto, "min_p"),
        presence_penalty=proto.presence_penalty,
        frequency_penalty=proto.frequency_penalty,
        repetition_penalty=_optional(proto, "repetition_penalty"),
        logit_bias=dict(proto.logit_bias),
        seed=_optional(proto, "seed"),
        num_logprobs=_optional(proto, "num_logprobs"),
        num_prompt_logprobs=_optional(proto, "num_prompt_logprobs"),
    )


def _stop(proto: common_pb2.StopConditions) -> domain.StopConditions:
    return domain.StopConditions(
        _optional(proto, "max_tokens"), proto.min_tokens, tuple(proto.stop_token_ids), proto.ignore_eos
    )


def _optional(proto: Any, field: str) -> Any:
    return getattr(proto, field) if proto.HasField(field) else None


# --- traces -----------------------------------------------------------------------------------------------------------


def trace_context(trace: domain.Trace) -> Context:
    """The context in which a request's span starts."""
    return extract(common_pb2.TraceContext(traceparent=trace.traceparent, tracestate=trace.tracestate))


def trace_of(context: Context) -> domain.Trace:
    """What is passed on of a context."""
    proto = inject(context)
    return domain.Trace(proto.traceparent, proto.tracestate)


# --- events -----------------------------------------------------------------------------------------------------------


class EventConverter:
    """Events to protobuf.

    Args:
        token_texts: looks up the text of tokens in logprobs.
    """

    def __init__(self, token_texts: TokenTexts) -> None:
        self._token_texts = token_texts
        self._head_of = lru_cache(maxsize=_CACHED_HEADS)(self._encoded_head)

    def event(self, event: events.Event) -> inference_pb2.GenerationEvent:
        """An event as direct clients get it; Failed has none, it is the call's status."""
        match event:
            case events.Delta():
                return inference_pb2.GenerationEvent(delta=self._delta(event, event.text))
            case events.Accepted():
                return inference_pb2.GenerationEvent(accepted=_accepted(event))
            case events.ChoiceFinished():
                return inference_pb2.GenerationEvent(choice_finished=_choice_finished(event))
            case events.Completed():
                return inference_pb2.GenerationEvent(completed=inference_pb2.Completed(usage=_usage(event)))
            case events.Failed(error):
                raise error

    def frame(
        self, batch: Iterable[tuple[int, events.Event]], wants_ids: bool = False
    ) -> inference_pb2.SessionResponse:
        """What happened to the requests of a session, by handle, as columns.

        The events of one request come in the order in which their parts stand in the message.

        Args:
            wants_ids: the columns have the ids of all rows.
        """
        response = inference_pb2.SessionResponse()
        for handle, event in batch:
            match event:
                case events.Delta():
                    self._add_row(response.outputs, handle, event, wants_ids)
                case events.Accepted():
                    response.accepted.add(handle=handle, accepted=_accepted(event))
                case events.ChoiceFinished():
                    response.choices_finished.add(handle=handle, finished=_choice_finished(event))
                case events.Completed():
                    response.completed.add(handle=handle, usage=_usage(event))
                case events.Failed(error):
                    response.failed.add(handle=handle, error=to_proto(error))
        return response

    def _add_row(self, outputs: inference_pb2.TextOutputs, handle: int, delta: events.Delta, wants_ids: bool) -> None:
        outputs.handles.append(handle)
        outputs.choice_indexes.append(delta.choice_index)
        outputs.first_token_indexes.append(delta.first_token_index)
        outputs.num_tokens.append(delta.num_tokens)
        outputs.texts.append(delta.text)
        if wants_ids:
            outputs.token_ids.extend(delta.token_ids)
        if delta.has_extras or (wants_ids and delta.num_cached_tokens is not None):
            outputs.extras.add(handle=handle, delta=self._delta(delta, ""))

    def _delta(self, delta: events.Delta, text: str) -> inference_pb2.Delta:
        return inference_pb2.Delta(
            choice_index=delta.choice_index,
            text=text,
            first_token_index=delta.first_token_index,
            num_tokens=delta.num_tokens,
            token_ids=delta.token_ids if delta.is_ids_wanted else (),
            logprobs=map(self._position, delta.logprobs),
            prompt_logprobs=map(self._position, delta.prompt_logprobs),
            num_cached_tokens=delta.num_cached_tokens,
        )

    def _position(self, position: events.PositionLogprobs) -> inference_pb2.TokenLogprobs:
        """One position, put together from encoded pieces: making a message per entry takes ten times as long."""
        pairs = zip(position.token_ids, position.logprobs, strict=True)
        entries = [self._head_of(token_id) + _PACK_FLOAT(logprob) for token_id, logprob in pairs]
        return inference_pb2.TokenLogprobs.FromString(_TOKEN_TAG + _TOP_TAG.join(entries))

    def _encoded_head(self, token_id: int) -> bytes:
        """An entry as it stands behind its tag in TokenLogprobs, up to the logprob, its last field: four bytes."""
        text, utf8 = self._token_texts.lookup(token_id)
        entry = inference_pb2.TokenLogprob(token_id=token_id, text=text, utf8=utf8, logprob=1.0)
        return inference_pb2.TokenLogprobs(token=entry).SerializeToString()[len(_TOKEN_TAG) : -4]


def _accepted(event: events.Accepted) -> inference_pb2.Accepted:
    return inference_pb2.Accepted(
        request_id=event.request_id,
        created_s=event.created_s,
        model=event.model,
        seed=event.seed,
        prompts=[inference_pb2.TokenIds(ids=ids) for ids in event.prompts],
        sampling=sampling_proto(event.sampling),
        stop=stop_proto(event.stop),
    )


def _choice_finished(event: events.ChoiceFinished) -> inference_pb2.ChoiceFinished:
    return inference_pb2.ChoiceFinished(
        choice_index=event.choice_index,
        reason=_FINISH_REASONS[event.reason],
        stop_string=event.stop_string,
        stop_token_id=event.stop_token_id,
    )


def _usage(event: events.Completed) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        num_prompt_tokens=event.num_prompt_tokens,
        num_generated_tokens=event.num_generated_tokens,
        num_cached_tokens=event.num_cached_tokens,
    )


# --- the engine -------------------------------------------------------------------------------------------------------


_ENGINE_FINISHES = {
    engine_pb2.ENGINE_FINISH_REASON_STOP_TOKEN: events.EngineFinishReason.STOP_TOKEN,
    engine_pb2.ENGINE_FINISH_REASON_LENGTH: events.EngineFinishReason.LENGTH,
    engine_pb2.ENGINE_FINISH_REASON_DEADLINE: events.EngineFinishReason.DEADLINE,
    engine_pb2.ENGINE_FINISH_REASON_ABORTED: events.EngineFinishReason.ABORTED,
}


def engine_info(welcome: engine_pb2.Welcome) -> domain.EngineInfo:
    """What the engine says about itself."""
    return domain.EngineInfo(
        epoch=welcome.engine_epoch,
        model_id=welcome.model_id,
        vocab_size=welcome.vocab_size,
        max_model_len=welcome.max_model_len,
        max_num_logprobs=welcome.max_num_logprobs,
        eos_token_ids=frozenset(welcome.eos_token_ids),
        default_sampling=sampling(welcome.default_sampling),
        max_num_waiting=welcome.max_num_waiting,
    )


def engine_load(load: engine_pb2.Load) -> domain.EngineLoad:
    """How busy the engine says it is."""
    return domain.EngineLoad(
        load.num_running, load.num_waiting, load.num_free_blocks, load.num_blocks, load.waits_for_executor
    )


def tenant_policy(tenant: Tenant) -> engine_pb2.TenantPolicy:
    """What a tenant may have."""
    return engine_pb2.TenantPolicy(
        tenant=tenant.name,
        weight=tenant.weight,
        max_num_running=tenant.max_running,
        max_num_waiting=tenant.max_queued,
        max_tokens_per_minute=tenant.tokens_per_minute,
    )


def submit_proto(
    handle: int,
    submission: domain.Submission,
    resume_token_ids: Sequence[int],
    is_resubmitted: bool,
    needs_prompt_logprobs: bool,
) -> engine_pb2.Submit:
    """A choice to generate.

    Args:
        resume_token_ids: ids that it has already.
        is_resubmitted: the engine had it before, so it keeps its age and is exempt from bounds.
        needs_prompt_logprobs: False once they have all arrived.
    """
    now_s = time.monotonic()
    proto = engine_pb2.Submit(
        handle=handle,
        request_id=submission.request_id,
        group_id=submission.group_id,
        choice_index=submission.choice_index,
        prompt_token_ids=submission.prompt_token_ids,
        sampling=sampling_proto(submission.sampling),
        stop=stop_proto(submission.stop),
        priority_class=submission.priority_class,
        tenant=submission.tenant,
        cache_salt=submission.cache_salt,
        resume_token_ids=resume_token_ids,
        resumable=submission.is_resumable,
    )
    if submission.trace.traceparent:
        proto.trace.traceparent = submission.trace.traceparent
        proto.trace.tracestate = submission.trace.tracestate
    if submission.deadline_s is not None:
        proto.remaining_time_ms = min(max(1, round((submission.deadline_s - now_s) * 1000)), _MAX_UINT32)
    if is_resubmitted or submission.is_resubmitted:
        proto.age_ms = min(max(0, round((now_s - submission.submitted_at_s) * 1000)), _MAX_UINT32)
    if not needs_prompt_logprobs:
        proto.sampling.ClearField("num_prompt_logprobs")
    return proto


def sampling_proto(params: domain.SamplingParams) -> common_pb2.SamplingParams:
    """Sampling as the engine and Accepted get it."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
        num_logprobs=params.num_logprobs,
        num_prompt_logprobs=params.num_prompt_logprobs,
    )


def stop_proto(stop: domain.StopConditions) -> common_pb2.StopConditions:
    """Ends by token as the engine and Accepted get them."""
    return common_pb2.StopConditions(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=stop.stop_token_ids,
        ignore_eos=stop.ignore_eos,
    )


def token_rows(outputs: engine_pb2.StepOutputs) -> Iterator[events.TokenRow]:
    """The rows of a step's columns, long ones in parts: those of a request that is told from its first token on."""
    ids, entry_ids, entry_values = list(outputs.token_ids), outputs.logprob_token_ids, outputs.logprobs
    widths = outputs.num_logprobs_per_token or itertools.repeat(0)
    at = entry_at = 0
    for handle, first, count, width in zip(
        outputs.handles, outputs.first_token_indexes, outputs.num_tokens, widths, strict=False
    ):
        num_at_once = max(1, events.MAX_LOGPROBS_PER_EVENT // (width or 1))
        for start in range(0, count, num_at_once):
            num_tokens = min(num_at_once, count - start)
            logprobs: list[events.PositionLogprobs] = []
            if width:
                end = entry_at + num_tokens * width
                logprobs = _positions(entry_ids[entry_at:end], entry_values[entry_at:end], width)
                entry_at = end
            yield events.TokenRow(handle, first + start, ids[at : at + num_tokens], logprobs)
            at += num_tokens


def prompt_positions(proto: engine_pb2.PromptLogprobs) -> list[events.PositionLogprobs]:
    """Logprobs of a run of prompt tokens."""
    return _positions(proto.token_ids, proto.logprobs, proto.num_per_token) if proto.num_per_token else []


def _positions(ids: Sequence[int], values: Sequence[float], width: int) -> list[events.PositionLogprobs]:
    return [events.PositionLogprobs(ids[i : i + width], values[i : i + width]) for i in range(0, len(ids), width)]


def engine_finish(finished: engine_pb2.Finished) -> events.EngineFinish:
    """How a choice ended."""
    reason = _ENGINE_FINISHES.get(finished.reason, events.EngineFinishReason.ERROR)
    return events.EngineFinish(reason, from_proto(finished.error) if finished.HasField("error") else None)
