"""Tokens: the same ids give the same tokens, however they are computed."""

from __future__ import annotations

from tokenloom.conformance.check import check
from tokenloom.conformance.lab import Lab, Row
from tokenloom.conformance.results import Failed

_NUM_TOKENS = 12


async def _reference(lab: Lab, prompt: list[int], count: int = _NUM_TOKENS) -> Row:
    """A row that ran alone, one plan at a time, in an epoch of its own."""
    epoch = await lab.epoch()
    row = epoch.row(prompt, sampling=lab.watched())
    await epoch.generate([row], count)
    return row


@check("greedy")
async def greedy(lab: Lab) -> str:
    """A greedy row gives the same tokens whenever it is run, in a new epoch or in the same."""
    prompt = lab.prompt(lab.usual_prompt_tokens)
    reference = await _reference(lab, prompt)
    epoch = await lab.epoch()
    for _ in range(2):
        row = epoch.row(prompt)
        await epoch.generate([row], _NUM_TOKENS)
        lab.expect_same(reference, row.token_ids, "again")
    return f"tokens {reference.token_ids[:4]}..."


@check("feeds-back")
async def feeds_back(lab: Lab) -> str:
    """A row that feeds back computes the token that the plan before samples, also while that plan is in flight."""
    depth = max(2, lab.can.max_plans_in_flight)
    prompts = [lab.prompt(lab.usual_prompt_tokens, salt) for salt in range(min(3, lab.can.max_num_seqs))]
    references = [await _reference(lab, prompt) for prompt in prompts]
    epoch = await lab.epoch()
    rows = [epoch.row(prompt) for prompt in prompts]
    await epoch.generate(rows, _NUM_TOKENS, depth=depth)
    for reference, row in zip(references, rows, strict=True):
        lab.expect_same(reference, row.token_ids, f"{depth} plans in flight")
    return f"{len(rows)} rows, {depth} plans in flight"


@check("chunked-prefill")
async def chunked_prefill(lab: Lab) -> str:
    """A prompt computed in chunks of any size gives the tokens that it gives in one."""
    prompt = lab.prompt(lab.usual_prompt_tokens)
    reference = await _reference(lab, prompt)
    sizes = sorted({1, max(1, lab.can.block_size - 1), lab.can.block_size, lab.can.block_size + 1})
    for size in sizes:
        epoch = await lab.epoch()
        row = epoch.row(prompt)
        await epoch.generate([row], _NUM_TOKENS, chunk=size)
        lab.expect_same(reference, row.token_ids, f"chunks of {size}")
    return f"chunks of {', '.join(map(str, sizes))}"


@check("batching")
async def batching(lab: Lab) -> str:
    """A row's tokens do not depend on the rows beside it, which may decode or compute prompts."""
    lab.need_rows(3)
    prompt = lab.prompt(lab.usual_prompt_tokens)
    reference = await _reference(lab, prompt)
    epoch = await lab.epoch()
    row = epoch.row(prompt)
    neighbours = [epoch.row(lab.prompt(lab.usual_prompt_tokens + salt, salt)) for salt in (1, 2)]
    await epoch.generate([neighbours[0]], 2)
    await epoch.generate([neighbours[0], row], 4)
    await epoch.generate([row, neighbours[1]], _NUM_TOKENS - 4, chunk=3)
    lab.expect_same(reference, row.token_ids, "beside others")
    return "beside one row that decodes and one that computes its prompt"


@check("replay")
async def replay(lab: Lab) -> str:
    """A new row with generated_token_ids goes on with the tokens that the row it replaces would have given."""
    prompt = lab.prompt(lab.usual_prompt_tokens)
    reference = await _reference(lab, prompt)
    for num_kept in (1, _NUM_TOKENS // 2):
        epoch = await lab.epoch()
        row = epoch.row(prompt, generated=reference.token_ids[:num_kept])
        await epoch.generate([row], _NUM_TOKENS - num_kept)
        lab.expect_same(reference, row.token_ids, f"behind {num_kept} tokens", num_kept)
    return f"behind 1 and {_NUM_TOKENS // 2} tokens"


@check("prefix-sharing")
async def prefix_sharing(lab: Lab) -> str:
    """A new row may begin behind blocks that another row with the same ids wrote: it computes the rest alone."""
    size = lab.can.block_size
    prompt = lab.prompt(min(2 * size + 2, lab.can.max_model_len // 2))
    reference = await _reference(lab, prompt)
    epoch = await lab.epoch()
    donor = epoch.row(prompt)
    await epoch.generate([donor], 2)
    num_blocks = (len(prompt) - 1) // size
    if not num_blocks:
        raise Failed(f"max_model_len {lab.can.max_model_len} has no room for two blocks of {size} tokens")
    row = epoch.behind(epoch.row(prompt), donor, num_blocks)
    beside = [donor] if lab.can.max_num_seqs > 1 else []
    await epoch.generate([row, *beside], _NUM_TOKENS)
    lab.expect_same(reference, row.token_ids, f"behind {num_blocks} shared blocks")
    if beside:
        lab.expect_same(reference, donor.token_ids[:_NUM_TOKENS], "the row that shares its blocks")
    return f"{num_blocks} blocks shared"


@check("block-reuse")
async def block_reuse(lab: Lab) -> str:
    """Blocks of a row that a plan finishes may be another row's in the same plan, while earlier plans are in flight."""
    prompt, other = (lab.prompt(lab.usual_prompt_tokens, salt) for salt in (0, 1))
    reference, before = await _reference(lab, prompt), await _reference(lab, other, 2)
    epoch = await lab.epoch()
    first = epoch.row(other)
    await epoch.generate([first], 1)
    part_before = epoch.part(first)
    plan_before = epoch.plan([part_before])
    row = epoch.row(prompt)
    row.block_ids = list(reversed(first.block_ids))
    part = epoch.part(row)
    plan = epoch.plan([part], finished=[first.row_id])
    await epoch.stream.send(plan_before)
    await epoch.stream.send(plan)
    epoch.apply(await epoch.result(plan_before.step_id), [part_before])
    epoch.apply(await epoch.result(plan.step_id), [part])
    await epoch.generate([row], _NUM_TOKENS - 1)
    lab.expect_same(before, first.token_ids, "the row that ended")
    lab.expect_same(reference, row.token_ids, "the row that took its blocks")
    return f"{len(row.block_ids)} blocks changed hands"


@check("samples-at-end")
async def samples_at_end(lab: Lab) -> str:
    """A row samples one token when its range reaches the end of its ids, and none before."""
    epoch = await lab.epoch()
    prompt = lab.prompt(min(5, lab.can.max_num_batched_tokens + 1))
    row = epoch.row(prompt)
    for _ in prompt[:-1]:  # every step is checked for what samples
        await epoch.step(epoch.part(row, 1))
    await epoch.step(epoch.part(row, 1))
    await epoch.step(epoch.part(row, 1))
    if len(row.token_ids) != 2:
        raise Failed(f"{len(row.token_ids)} tokens came of two steps")
    return f"token {len(prompt)} of {len(prompt)} samples"
