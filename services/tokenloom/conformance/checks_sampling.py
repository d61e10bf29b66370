"""Sampling: seeds, filters, masks, bias, logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tokenloom.api.v1 import common_pb2
from tokenloom.conformance.check import check
from tokenloom.conformance.lab import Lab, Row
from tokenloom.conformance.results import Failed, Sampled, Skipped

_NUM_TOKENS = 12
_HOT = 20.0
_LOGPROB_SLACK = 1e-3


def _seeded(seed: int, **fields: object) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"temperature": _HOT, "seed": seed, **fields})  # type: ignore[arg-type]


async def _alone(
    lab: Lab,
    sampling: common_pb2.SamplingParams,
    count: int = _NUM_TOKENS,
    stop: common_pb2.StopConditions | None = None,
) -> Row:
    """A row that ran in an epoch of its own."""
    epoch = await lab.epoch()
    row = epoch.row(lab.prompt(lab.usual_prompt_tokens), sampling=sampling, stop=stop)
    await epoch.generate([row], count)
    return row


def _expect_equal(lab: Lab, one: Sequence[int], two: Sequence[int], what: str) -> None:
    """Compare tokens that noise chose: how near a tie was, nobody can tell."""
    if list(one) == list(two):
        return
    told = f"{what}: {list(two)} instead of {list(one)}"
    if lab.can.batch_invariant:
        raise Failed(told)
    raise Skipped(f"{told}; the executor is not batch invariant")


@check("seeds")
async def seeds(lab: Lab) -> str:
    """A row's noise follows from its seed and the position alone: alone, beside others and behind a replay."""
    reference = await _alone(lab, _seeded(7))
    again = await _alone(lab, _seeded(7))
    if again.token_ids != reference.token_ids:
        raise Failed(f"the same run gives {again.token_ids} instead of {reference.token_ids}")
    epoch = await lab.epoch()
    row = epoch.row(lab.prompt(lab.usual_prompt_tokens), sampling=_seeded(7))
    beside = [epoch.row(lab.prompt(5, 1), sampling=_seeded(8))] if lab.can.max_num_seqs > 1 else []
    await epoch.generate([*beside, row], _NUM_TOKENS, depth=2)
    _expect_equal(lab, reference.token_ids, row.token_ids, "beside another row")
    epoch = await lab.epoch()
    kept = reference.token_ids[:5]
    row = epoch.row(lab.prompt(lab.usual_prompt_tokens), generated=kept, sampling=_seeded(7))
    await epoch.generate([row], _NUM_TOKENS - len(kept))
    _expect_equal(lab, reference.token_ids[len(kept) :], row.token_ids, "behind a replay")
    return f"seed 7 gives {reference.token_ids[:4]}..."


@check("seeds-differ")
async def seeds_differ(lab: Lab) -> str:
    """Rows with different seeds sample different tokens, given enough noise."""
    texts = {tuple((await _alone(lab, _seeded(seed))).token_ids) for seed in (1, 2, 1 << 40)}
    if len(texts) < 3:
        raise Failed(f"three seeds gave {len(texts)} different outputs at temperature {_HOT:g}")
    return "three seeds, three outputs"


@check("only-most-likely")
async def only_most_likely(lab: Lab) -> str:
    """With top_k 1 or top_p 0 the most likely token is taken, whatever temperature and seed are."""
    reference = await _alone(lab, lab.watched())
    for name, fields in (("top_k 1", {"top_k": 1}), ("top_p 0", {"top_p": 0.0})):
        row = await _alone(lab, _seeded(3, **fields))
        lab.expect_same(reference, row.token_ids, name)
    return "as greedy"


@check("default-sampling")
async def default_sampling(lab: Lab) -> str:
    """Sampling parameters that a row leaves open are those of default_sampling."""
    default = lab.can.default_sampling
    explicit = common_pb2.SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, seed=5)
    explicit.MergeFrom(default)
    one = await _alone(lab, common_pb2.SamplingParams(seed=5))
    two = await _alone(lab, explicit)
    if one.token_ids != two.token_ids:
        raise Failed(f"{one.token_ids} without parameters, {two.token_ids} with the defaults")
    return f"temperature is {explicit.temperature:g} by default"


@check("logit-bias")
async def logit_bias(lab: Lab) -> str:
    """logit_bias is added to the logits of its tokens: 100 lets one win, -100 keeps one away."""
    natural = (await _alone(lab, lab.watched(), 1)).token_ids[0]
    wanted = (natural + 1) % lab.can.vocab_size
    row = await _alone(lab, common_pb2.SamplingParams(temperature=0.0, logit_bias={wanted: 100.0}), 3)
    if set(row.token_ids) != {wanted}:
        raise Failed(f"with a bias of 100 on {wanted} the tokens are {row.token_ids}")
    row = await _alone(lab, common_pb2.SamplingParams(temperature=0.0, logit_bias={natural: -100.0}), 1)
    if row.token_ids == [natural]:
        raise Failed(f"with a bias of -100 on {natural} that token is sampled")
    return f"{wanted} wins, {natural} loses"


@check("min-tokens")
async def min_tokens(lab: Lab) -> str:
    """End-of-sequence and stop tokens are masked until min_tokens tokens were generated, those of a replay included."""
    natural = await _alone(lab, lab.watched(), 4)
    stop_token_ids = sorted({*natural.token_ids, *lab.can.eos_token_ids})
    # A bias that all but forces a stop token shows the mask, and its end, at once.
    pushed = common_pb2.SamplingParams(temperature=0.0, logit_bias={natural.token_ids[0]: 100.0})
    stop = common_pb2.StopConditions(min_tokens=3, stop_token_ids=stop_token_ids)
    row = await _alone(lab, pushed, 4, stop)
    if early := set(row.token_ids[:3]) & set(stop_token_ids):
        raise Failed(f"stop tokens {sorted(early)} are among the first 3 tokens {row.token_ids[:3]}")
    if row.token_ids[3] != natural.token_ids[0]:
        raise Failed(f"token 4 is {row.token_ids[3]}: stop tokens are still masked behind min_tokens")
    epoch = await lab.epoch()
    prompt = lab.prompt(lab.usual_prompt_tokens)
    replayed = epoch.row(prompt, generated=row.token_ids[:2], sampling=pushed, stop=stop)
    await epoch.generate([replayed], 2)
    lab_tokens = replayed.token_ids
    if lab_tokens[0] in stop_token_ids or lab_tokens[1] != natural.token_ids[0]:
        raise Failed(f"behind a replay of 2 tokens come {lab_tokens}; the mask ends behind token 3")
    return f"{len(stop_token_ids)} stop tokens masked for 3 tokens"


@check("logprobs")
async def logprobs(lab: Lab) -> str:
    """A row that asks for k logprobs has 1 + k entries per token, the token itself and then the k most likely in
    order, beside rows that ask for none.
    """
    lab.need_logprobs(3)
    lab.need_rows(3)
    epoch = await lab.epoch()
    prompt = lab.prompt(lab.usual_prompt_tokens)
    rows = {
        0: epoch.row(prompt, sampling=common_pb2.SamplingParams(temperature=0.0, num_logprobs=0)),
        None: epoch.row(prompt, sampling=common_pb2.SamplingParams(temperature=0.0)),
        3: epoch.row(prompt, sampling=_seeded(5, num_logprobs=3)),
    }
    for row in rows.values():  # prompts may be longer than what one plan takes
        await epoch.generate([row], 1)
    for _ in range(3):
        result = await epoch.step(*(epoch.part(row) for row in rows.values()))
        for num, row in rows.items():
            _check_entries(result.sampled[row.row_id], num)
    return "0, none and 3 logprobs in one plan"


def _check_entries(sampled: Sampled, num: int | None) -> None:
    width = 0 if num is None else 1 + num
    if sampled.width != width:
        raise Failed(f"{sampled.width} entries per token where {width} were due")
    if num is None:
        return
    if sampled.logprob_ids[0] != sampled.token_ids[0]:
        raise Failed(f"the first entry is of token {sampled.logprob_ids[0]}, sampled was {sampled.token_ids[0]}")
    _check_order(sampled.logprob_ids[1:], sampled.logprobs[1:], sampled.logprob_ids[0], sampled.logprobs[0])


def _check_order(top_ids: Sequence[int], top: Sequence[float], own_id: int, own: float) -> None:
    """The most likely ones stand in order, once each, and fit the token itself."""
    if any(not value <= _LOGPROB_SLACK for value in [own, *top]):
        raise Failed(f"logprobs {[own, *top]} are not all numbers of at most 0")
    if any(a < b for a, b in pairwise(top)) or len(set(top_ids)) < len(top_ids):
        raise Failed(f"the most likely tokens {list(top_ids)} with logprobs {list(top)} are not in order, once each")
    if top and own_id in top_ids and abs(top[list(top_ids).index(own_id)] - own) > _LOGPROB_SLACK:
        raise Failed(f"token {own_id} has two logprobs in one result")
    if top and own_id not in top_ids and own > top[-1] + _LOGPROB_SLACK:
        raise Failed(f"token {own_id} with {own} is not among the most likely ones {list(top)}")


@check("prompt-logprobs")
async def prompt_logprobs(lab: Lab) -> str:
    """A row that asks for prompt logprobs gets those of every prompt token after the first, once each, in runs that
    name their position, however the prompt is chunked.
    """
    lab.need_logprobs(1)
    epoch = await lab.epoch()
    prompt = lab.prompt(lab.usual_prompt_tokens)
    row = epoch.row(prompt, sampling=common_pb2.SamplingParams(temperature=0.0, num_prompt_logprobs=1))
    chunk = max(1, min(lab.can.block_size - 1, lab.can.max_num_batched_tokens, len(prompt) // 2))
    told: list[int] = []
    while row.num_computed < len(prompt):
        end = row.num_computed + min(chunk, len(prompt) - row.num_computed)
        result = await epoch.step(epoch.part(row, end - row.num_computed))
        for run in result.prompt_logprobs:
            if run.row_id != row.row_id or run.num_per_token != 2:
                raise Failed(f"a run of row {run.row_id} with {run.num_per_token} entries per token instead of 2")
            if not len(run.token_ids) == len(run.logprobs) or len(run.token_ids) % 2:
                raise Failed(f"{len(run.token_ids)} tokens and {len(run.logprobs)} logprobs in a run")
            for i in range(0, len(run.token_ids), 2):
                position = run.first_position + i // 2
                told.append(position)
                if position >= len(prompt) or run.token_ids[i] != prompt[position]:
                    raise Failed(f"the entry of position {position} is of token {run.token_ids[i]}")
                _check_order(
                    run.token_ids[i + 1 : i + 2], run.logprobs[i + 1 : i + 2], run.token_ids[i], run.logprobs[i]
                )
    if told != list(range(1, len(prompt))):
        raise Failed(f"positions {told} were told instead of 1 to {len(prompt) - 1}")
    return f"positions 1 to {len(prompt) - 1} in chunks of {chunk}"
