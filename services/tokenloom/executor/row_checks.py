"""What can be wrong inside a new row. Such a row fails alone; the plan that brings it is good."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tokenloom.common.errors import InvalidArgument
from tokenloom.executor.plan import NewRow, SamplingParams

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Limits:
    """Bounds that plans and rows are checked against."""

    vocab_size: int
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


def fault_of(new: NewRow, limits: Limits) -> InvalidArgument | None:
    """The first thing that is wrong inside a new row, with the field at fault; None if nothing is."""
    if not new.prompt_token_ids:
        return InvalidArgument("the prompt is empty", field="prompt_token_ids")
    num_tokens = len(new.prompt_token_ids) + len(new.generated_token_ids)
    if num_tokens > limits.max_model_len:
        return InvalidArgument(f"{num_tokens} tokens; at most {limits.max_model_len}", field="prompt_token_ids")
    lists: tuple[tuple[str, Iterable[int]], ...] = (
        ("prompt_token_ids", new.prompt_token_ids),
        ("generated_token_ids", new.generated_token_ids),
        ("logit_bias", new.sampling.logit_bias),
        ("stop_token_ids", new.sampling.stop_token_ids),
    )
    for name, ids in lists:
        if (outside := _outside(ids, limits.vocab_size)) is not None:
            return InvalidArgument(f"token {outside} is outside the vocabulary of {limits.vocab_size}", field=name)
    if new.grammar_key:
        return InvalidArgument("this executor has no grammars", field="grammar_key")
    return _sampling_fault(new.sampling)


def _sampling_fault(params: SamplingParams) -> InvalidArgument | None:
    bounds = (
        ("temperature", params.temperature, 0.0, 100.0),
        ("top_p", params.top_p, 0.0, 1.0),
        ("min_p", params.min_p, 0.0, 1.0),
        ("presence_penalty", params.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", params.frequency_penalty, -2.0, 2.0),
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:  # NaN is not
            return InvalidArgument(f"{name} is {value:g}; from {low:g} to {high:g}", field=name)
    if not 0.0 < params.repetition_penalty < math.inf:
        return InvalidArgument(
            f"repetition_penalty is {params.repetition_penalty:g}; above 0", field="repetition_penalty"
        )
    if not all(-100.0 <= bias <= 100.0 for bias in params.logit_bias.values()):
        return InvalidArgument("a bias is outside -100 to 100", field="logit_bias")
    if params.seed is None and not params.is_greedy:
        return InvalidArgument("a row that samples needs a seed", field="seed")
    for name, num in (("num_logprobs", params.num_logprobs), ("num_prompt_logprobs", params.num_prompt_logprobs)):
        if num is not None and num > MAX_LOGPROBS:
            return InvalidArgument(f"{name} is {num}; at most {MAX_LOGPROBS}", field=name)
    return None


def _outside(token_ids: Iterable[int], vocab_size: int) -> int | None:
    """A token that is not in the vocabulary, or None."""
    if (largest := max(token_ids, default=0)) >= vocab_size:
        return largest
    return smallest if (smallest := min(token_ids, default=0)) < 0 else None
