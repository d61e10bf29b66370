"""Protobuf to domain types and back; only this module and watch_convert.py see both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenloom.api.v1 import common_pb2, engine_pb2, executor_pb2
from tokenloom.common.errors import InvalidArgument, TokenloomError, from_proto, to_proto
from tokenloom.common.keys_file import MAX_WEIGHT, MIN_WEIGHT
from tokenloom.common.schema import SCHEMA_REVISION
from tokenloom.scheduler.capabilities import Capabilities
from tokenloom.scheduler.core.block_hash import HASH_SCHEME
from tokenloom.scheduler.core.plan import ModelOutput, RowOutput, ScheduledRow, SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, PromptLogprobs, Request
from tokenloom.scheduler.core.tenants import TenantPolicy
from tokenloom.scheduler.frames import Frame, TokenColumns
from tokenloom.scheduler.load import LoadState

_UNLIMITED = 1 << 31
_MAX_TENANT_BYTES = 256
_REASON_TO_PROTO = {
    FinishReason.STOP_TOKEN: engine_pb2.ENGINE_FINISH_REASON_STOP_TOKEN,
    FinishReason.LENGTH: engine_pb2.ENGINE_FINISH_REASON_LENGTH,
    FinishReason.STOP_STRING: engine_pb2.ENGINE_FINISH_REASON_STOP_STRING,
    FinishReason.ABORTED: engine_pb2.ENGINE_FINISH_REASON_ABORTED,
    FinishReason.DEADLINE: engine_pb2.ENGINE_FINISH_REASON_DEADLINE,
    FinishReason.ERROR: engine_pb2.ENGINE_FINISH_REASON_ERROR,
}
_REASON_FROM_PROTO: dict[int, FinishReason] = {proto: reason for reason, proto in _REASON_TO_PROTO.items()}


@dataclass(slots=True)
class RowPayload:
    """What the executor is told of a request and the core does not look at.

    Args:
        prompt_column: the prompt as it came in its message: copied as memory, where 32k ids of a list take 0.6 ms or
            more. None: the request's own list is taken.
    """

    sampling: common_pb2.SamplingParams
    stop: common_pb2.StopConditions
    trace: common_pb2.TraceContext = field(default_factory=common_pb2.TraceContext)
    prompt_column: Sequence[int] | None = None


@dataclass(slots=True)
class Logprobs:
    """Logprobs of a row's tokens as columns: the token itself, then the most likely ones, token by token."""

    num_per_token: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]


# --- tokenizer -> scheduler -------------------------------------------------------------------------------------


def request_of(submit: engine_pb2.Submit, capabilities: Capabilities, now_s: float) -> Request:
    """The request that a Submit asks for.

    Args:
        now_s: on the engine's clock; deadline and age count from it.

    Raises: InvalidArgument naming the field.
    """
    prompt_token_ids, resume_token_ids = list(submit.prompt_token_ids), list(submit.resume_token_ids)
    _check_ids(prompt_token_ids, capabilities.vocab_size, "prompt")
    _check_ids(resume_token_ids, capabilities.vocab_size, "resume_token_ids")
    _check_ids(submit.stop.stop_token_ids, capabilities.vocab_size, "stop_token_ids")
    _check_sampling(submit.sampling, capabilities)
    _check_tenant(submit.tenant)
    if not submit.request_id:
        raise InvalidArgument("a request needs an id", field="request_id")
    max_output_tokens = submit.stop.max_tokens if submit.stop.HasField("max_tokens") else _UNLIMITED
    if max_output_tokens < 1:
        raise InvalidArgument("max_tokens is 0; at least one token is generated", field="max_tokens")
    return Request(
        submit.request_id,
        prompt_token_ids=prompt_token_ids,
        max_output_tokens=max_output_tokens,
        stop_token_ids=_stop_token_ids(submit.stop, capabilities),
        min_output_tokens=submit.stop.min_tokens,
        output_token_ids=resume_token_ids,
        priority_class=submit.priority_class,
        tenant=submit.tenant,
        submitted_s=now_s - submit.age_ms / 1000,
        cache_salt=submit.cache_salt,
        reads_prefix_cache=not submit.sampling.HasField("num_prompt_logprobs"),
        deadline_s=now_s + submit.remaining_time_ms / 1000 if submit.HasField("remaining_time_ms") else None,
        payload=RowPayload(submit.sampling, submit.stop, prompt_column=submit.prompt_token_ids),
    )


def settings_of(payload: RowPayload) -> bytes:
    """Sampling and stops of a request, comparable; without prompt logprobs, of which a reader may have enough."""
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(payload.sampling)
    sampling.ClearField("num_prompt_logprobs")
    return sampling.SerializeToString(deterministic=True) + payload.stop.SerializeToString(deterministic=True)


def _stop_token_ids(stop: common_pb2.StopConditions, capabilities: Capabilities) -> frozenset[int]:
    asked = frozenset(stop.stop_token_ids)
    return asked if stop.ignore_eos else asked | frozenset(capabilities.eos_token_ids)


def _check_ids(token_ids: Sequence[int], vocab_size: int, field_name: str) -> None:
    if token_ids and (worst := max(token_ids)) >= vocab_size:
        raise InvalidArgument(
            f"token id {worst} is outside the vocabulary; ids are below {vocab_size}", field=field_name
        )


def _check_sampling(sampling: common_pb2.SamplingParams, capabilities: Capabilities) -> None:
    _check_ids(list(sampling.logit_bias), capabilities.vocab_size, "logit_bias")
    for name, value in (("logprobs", sampling.num_logprobs), ("prompt_logprobs", sampling.num_prompt_logprobs)):
        if value > capabilities.max_num_logprobs:
            raise InvalidArgument(f"{name} is {value}; the most is {capabilities.max_num_logprobs}", field=name)


def _check_tenant(name: str) -> None:
    if (num_bytes := len(name.encode())) > _MAX_TENANT_BYTES:
        raise InvalidArgument(
            f"the tenant's name has {num_bytes} bytes; the most is {_MAX_TENANT_BYTES}", field="tenant"
        )


def tenant_policy_of(proto: engine_pb2.TenantPolicy) -> TenantPolicy:
    """What a tenant may have.

    Raises: InvalidArgument naming the field.
    """
    _check_tenant(proto.tenant)
    weight = proto.weight if proto.HasField("weight") else 1.0
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:  # NaN is refused, too
        raise InvalidArgument(
            f"the weight of tenant {proto.tenant!r} is {weight}; it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}",
            field="tenants.weight",
        )
    limits: dict[str, int | None] = {}
    for name in ("max_num_running", "max_num_waiting", "max_tokens_per_minute"):
        limits[name] = getattr(proto, name) if proto.HasField(name) else None
        if limits[name] == 0:
            raise InvalidArgument(
                f"{name} of tenant {proto.tenant!r} is 0; it must be at least 1, or absent for no limit",
                field=f"tenants.{name}",
            )
    return TenantPolicy(weight, **limits)


def finish_reason_of(proto: int) -> FinishReason:
    """The reason that a tokenizer's Finish gives; one that we do not know counts as a stop string."""
    return _REASON_FROM_PROTO.get(proto, FinishReason.STOP_STRING)


# --- scheduler -> tokenizer -------------------------------------------------------------------------------------


def welcome(
    capabilities: Capabilities, epoch: str, max_model_len: int, max_num_waiting: int, heartbeat_s: float
) -> engine_pb2.Welcome:
    """The answer to Hello."""
    return engine_pb2.Welcome(
        schema_revision=SCHEMA_REVISION,
        engine_epoch=epoch,
        model_id=capabilities.model_id,
        tokenizer_fingerprint=capabilities.tokenizer_fingerprint,
        vocab_size=capabilities.vocab_size,
        block_size=capabilities.block_size,
        hash_scheme=HASH_SCHEME,
        batch_invariant=capabilities.batch_invariant,
        max_model_len=max_model_len,
        max_num_waiting=max_num_waiting,
        max_num_logprobs=capabilities.max_num_logprobs,
        eos_token_ids=capabilities.eos_token_ids,
        default_sampling=capabilities.default_sampling,
        heartbeat_ms=round(heartbeat_s * 1000),
    )


def response_of(frame: Frame) -> engine_pb2.EngineServiceSessionResponse:
    """A frame as one message of packed columns."""
    load = None if frame.load is None else load_proto(frame.load)
    response = engine_pb2.EngineServiceSessionResponse(load=load, draining=frame.is_draining)
    for handle, error in frame.rejected:
        response.rejected.add(handle=handle, error=to_proto(error))
    for handle, num_cached_tokens in frame.accepted:
        response.accepted.add(handle=handle, num_cached_tokens=num_cached_tokens)
    for handle, run in frame.prompt_logprobs:
        response.prompt_logprobs.add(
            handle=handle,
            first_position=run.first_position,
            num_per_token=run.num_per_token,
            token_ids=run.token_ids,
            logprobs=run.logprobs,
        )
    if frame.tokens.handles:
        _fill_outputs(response.outputs, frame.tokens)
    for row in frame.finished:
        response.finished.add(
            handle=row.handle,
            reason=_REASON_TO_PROTO[row.reason],
            num_generated_tokens=row.num_generated_tokens,
            error=None if row.error is None else to_proto(row.error),
        )
    return response


def _fill_outputs(outputs: engine_pb2.StepOutputs, tokens: TokenColumns) -> None:
    outputs.handles.extend(tokens.handles)
    outputs.first_token_indexes.extend(tokens.first_token_indexes)
    outputs.num_tokens.extend(tokens.num_tokens)
    outputs.token_ids.extend(tokens.token_ids)
    outputs.num_logprobs_per_token.extend(tokens.num_logprobs_per_token)
    outputs.logprob_token_ids.extend(tokens.logprob_token_ids)
    outputs.logprobs.extend(tokens.logprobs)


def load_proto(load: LoadState) -> engine_pb2.Load:
    """How busy the engine is."""
    return engine_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        num_waiting_tokens=load.num_waiting_tokens,
        tokens_per_second=load.tokens_per_second,
        num_cached_blocks=load.num_cached_blocks,
        max_num_seqs=load.max_num_seqs,
        waits_for_executor=load.waits_for_executor,
    )


# --- scheduler <-> executor -------------------------------------------------------------------------------------


def capabilities_of(response: executor_pb2.GetCapabilitiesResponse) -> Capabilities:
    """An executor's capabilities."""
    return Capabilities(
        boot_id=response.boot_id,
        model_id=response.model_id,
        tokenizer_fingerprint=response.tokenizer_fingerprint,
        vocab_size=response.vocab_size,
        max_model_len=response.max_model_len,
        block_size=response.block_size,
        max_num_blocks=response.max_num_blocks,
        max_num_seqs=response.max_num_seqs,
        max_num_batched_tokens=response.max_num_batched_tokens,
        max_plans_in_flight=max(1, response.max_plans_in_flight),
        max_num_logprobs=response.max_num_logprobs,
        batch_invariant=response.batch_invariant,
        eos_token_ids=tuple(response.eos_token_ids),
        default_sampling=response.default_sampling,
        description=response.description,
    )


def execute_request_of(
    plan: SchedulerOutput, epoch: executor_pb2.Epoch, trace: common_pb2.TraceContext | None
) -> executor_pb2.ExecuteRequest:
    """A plan as one message of packed columns."""
    rows = plan.rows
    request = executor_pb2.ExecuteRequest(
        epoch=epoch,
        step_id=plan.step_id,
        finished_row_ids=plan.finished_row_ids,
        row_ids=[row.row_id for row in rows],
        num_scheduled_tokens=[row.num_scheduled_tokens for row in rows],
        num_computed_tokens=[row.num_computed_tokens for row in rows],
        feeds_back=[row.feeds_back for row in rows],
        num_new_blocks=[len(row.new_block_ids) for row in rows],
        new_block_ids=[block_id for row in rows for block_id in row.new_block_ids],
        trace=trace,
    )
    for row in rows:
        if row.is_new:
            _fill_new_row(request.new_rows.add(), row)
    return request


def _fill_new_row(proto: executor_pb2.NewRow, row: ScheduledRow) -> None:
    """Write a new row in its place: a message that is put into another one is copied by encoding it."""
    request, payload = row.request, row.request.payload
    proto.row_id = row.row_id
    proto.request_id = request.request_id
    proto.prompt_token_ids.extend(request.prompt_token_ids if payload.prompt_column is None else payload.prompt_column)
    proto.generated_token_ids.extend(request.output_token_ids)
    proto.sampling.CopyFrom(payload.sampling)
    proto.stop.CopyFrom(payload.stop)
    proto.trace.CopyFrom(payload.trace)


def model_output_of(response: executor_pb2.ExecuteResponse) -> ModelOutput:
    """A step's result."""
    step_error: TokenloomError | None = None
    if response.HasField("step_error"):
        step_error = from_proto(response.step_error)
    return ModelOutput(
        step_id=response.step_id,
        sampled=_sampled_of(response),
        prompt_logprobs={
            run.row_id: PromptLogprobs(run.first_position, run.num_per_token, list(run.token_ids), list(run.logprobs))
            for run in response.prompt_logprobs
        },
        row_errors={row.row_id: from_proto(row.error) for row in response.row_errors},
        step_error=step_error,
    )


def _sampled_of(response: executor_pb2.ExecuteResponse) -> dict[int, RowOutput]:
    sampled: dict[int, RowOutput] = {}
    token_ids, num_per_token = list(response.sampled_token_ids), list(response.num_logprobs_per_token)
    logprob_ids, logprobs = response.logprob_token_ids, response.logprobs
    at = logprobs_at = 0
    for i, (row_id, count) in enumerate(zip(response.row_ids, response.num_sampled, strict=True)):
        row = RowOutput(token_ids[at : at + count])
        at += count
        if num_per_token and (width := num_per_token[i]):
            end = logprobs_at + width * count
            row.logprobs = Logprobs(width, logprob_ids[logprobs_at:end], logprobs[logprobs_at:end])
            logprobs_at = end
        sampled[row_id] = row
    return sampled
