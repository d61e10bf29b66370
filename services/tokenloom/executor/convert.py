"""Between the wire (executor_pb2) and plain data (plan.py). The only module of this stage that sees both."""

from __future__ import annotations

from itertools import chain, islice

from tokenloom.api.v1 import common_pb2, executor_pb2
from tokenloom.common.errors import InvalidArgument, TokenloomError, to_proto
from tokenloom.common.schema import SCHEMA_REVISION
from tokenloom.executor.capabilities import Capabilities
from tokenloom.executor.plan import (
    NewRow,
    Plan,
    PlannedRow,
    PromptLogprobs,
    Result,
    RowFailure,
    SamplingParams,
)
from tokenloom.executor.row_checks import MAX_LOGPROBS


def plan_from_proto(request: executor_pb2.ExecuteRequest, defaults: SamplingParams) -> Plan:
    """Unpack a plan's columns.

    Args:
        defaults: sampling parameters of rows that leave them open.

    Raises: InvalidArgument (reason MALFORMED_PLAN) if the columns do not fit together.
    """
    num_rows = len(request.row_ids)
    columns = (
        request.num_scheduled_tokens,
        request.num_computed_tokens,
        request.feeds_back,
        request.num_new_blocks,
    )
    if any(len(column) != num_rows for column in columns):
        raise _malformed(request, f"its columns do not all have {num_rows} entries")
    if sum(request.num_new_blocks) != len(request.new_block_ids):
        raise _malformed(request, "new_block_ids has another length than num_new_blocks says")
    if any(request.num_draft_tokens):
        raise _malformed(request, "this executor verifies no draft tokens")
    if request.grammars:
        raise _malformed(request, "this executor prepares no grammars")
    block_ids = iter(request.new_block_ids)
    rows = [
        PlannedRow(
            row_id=row_id,
            num_scheduled_tokens=num_scheduled,
            num_computed_tokens=num_computed,
            new_block_ids=list(islice(block_ids, num_blocks)),
            feeds_back=feeds_back,
        )
        for row_id, num_scheduled, num_computed, feeds_back, num_blocks in zip(request.row_ids, *columns, strict=True)
    ]
    new_rows = [_new_row(new, defaults) for new in request.new_rows]
    return Plan(request.step_id, rows, new_rows, list(request.finished_row_ids))


def result_to_proto(result: Result) -> executor_pb2.ExecuteResponse:
    """Pack a result into columns."""
    timings = result.timings
    response = executor_pb2.ExecuteResponse(
        step_id=result.step_id,
        row_ids=[row.row_id for row in result.sampled],
        num_sampled=[1] * len(result.sampled),
        sampled_token_ids=[row.token_id for row in result.sampled],
        num_logprobs_per_token=[len(row.logprobs.token_ids) if row.logprobs else 0 for row in result.sampled],
        prompt_logprobs=[_prompt_logprobs(run) for run in result.prompt_logprobs],
        row_errors=[_row_error(failure) for failure in result.failures],
        timings=executor_pb2.StepTimings(
            queued_us=timings.queued_us,
            prepare_us=timings.prepare_us,
            forward_us=timings.forward_us,
            sample_us=timings.sample_us,
        ),
    )
    for row in result.sampled:
        if row.logprobs is not None:
            response.logprob_token_ids.extend(row.logprobs.token_ids)
            response.logprobs.extend(row.logprobs.logprobs)
    return response


def failed_step_to_proto(step_id: int, error: TokenloomError) -> executor_pb2.ExecuteResponse:
    """The answer to a plan of which nothing counts."""
    return executor_pb2.ExecuteResponse(step_id=step_id, step_error=to_proto(error))


def capabilities_to_proto(
    capabilities: Capabilities, boot_id: str, max_plans_in_flight: int
) -> executor_pb2.GetCapabilitiesResponse:
    """What the executor can do, as the scheduler reads it."""
    limits, sampling = capabilities.limits, capabilities.default_sampling
    return executor_pb2.GetCapabilitiesResponse(
        schema_revision=SCHEMA_REVISION,
        boot_id=boot_id,
        model_id=capabilities.model_id,
        tokenizer_fingerprint=capabilities.tokenizer_fingerprint,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        max_num_blocks=capabilities.max_num_blocks,
        block_bytes=capabilities.block_bytes,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_plans_in_flight=max_plans_in_flight,
        max_num_logprobs=MAX_LOGPROBS,
        batch_invariant=capabilities.batch_invariant,
        eos_token_ids=capabilities.eos_token_ids,
        default_sampling=common_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
        ),
        description=capabilities.description,
    )


def _new_row(new: executor_pb2.NewRow, defaults: SamplingParams) -> NewRow:
    return NewRow(
        row_id=new.row_id,
        prompt_token_ids=list(new.prompt_token_ids),
        generated_token_ids=list(new.generated_token_ids),
        sampling=_sampling(new.sampling, new.stop, defaults),
        request_id=new.request_id,
        grammar_key=new.grammar_key,
    )


def _sampling(
    params: common_pb2.SamplingParams, stop: common_pb2.StopConditions, defaults: SamplingParams
) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else defaults.temperature,
        top_p=params.top_p if params.HasField("top_p") else defaults.top_p,
        top_k=params.top_k if params.HasField("top_k") else defaults.top_k,
        min_p=params.min_p if params.HasField("min_p") else defaults.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=(
            params.repetition_penalty if params.HasField("repetition_penalty") else defaults.repetition_penalty
        ),
        logit_bias=dict(params.logit_bias),
        seed=params.seed if params.HasField("seed") else None,
        num_logprobs=params.num_logprobs if params.HasField("num_logprobs") else None,
        num_prompt_logprobs=params.num_prompt_logprobs if params.HasField("num_prompt_logprobs") else None,
        min_tokens=stop.min_tokens,
        stop_token_ids=tuple(stop.stop_token_ids),
    )


def _prompt_logprobs(run: PromptLogprobs) -> executor_pb2.RowPromptLogprobs:
    return executor_pb2.RowPromptLogprobs(
        row_id=run.row_id,
        first_position=run.first_position,
        num_per_token=len(run.entries[0].token_ids),
        token_ids=chain.from_iterable(entry.token_ids for entry in run.entries),
        logprobs=chain.from_iterable(entry.logprobs for entry in run.entries),
    )


def _row_error(failure: RowFailure) -> executor_pb2.RowError:
    return executor_pb2.RowError(row_id=failure.row_id, error=to_proto(failure.error))


def _malformed(request: executor_pb2.ExecuteRequest, what: str) -> InvalidArgument:
    return InvalidArgument(f"plan {request.step_id}: {what}", reason="MALFORMED_PLAN")
