"""Plans: what they may hold, and what a faulty plan or row leaves behind."""

from __future__ import annotations

from collections.abc import Callable

from google.rpc import code_pb2

from tokenloom.api.v1 import executor_pb2
from tokenloom.conformance.check import add_check, check
from tokenloom.conformance.lab import Epoch, Lab, Part, Row, changed
from tokenloom.conformance.results import Failed, Result, Skipped

_INVALID_ARGUMENT: int = code_pb2.INVALID_ARGUMENT
_UNKNOWN_FIELD = b"\xc2\x3e\x03new"  # field 1000, three bytes
_MALFORMED = "The plan is a step error with INVALID_ARGUMENT, changes nothing, and the rows go on."


def _expect_step_error(result: Result, what: str) -> str:
    """The error of a plan that must have failed as a whole."""
    if result.step_error is None:
        came = "row errors" if result.row_errors else "no error"
        raise Failed(f"{what}: {came} instead of a step error")
    if result.step_error.code != _INVALID_ARGUMENT:
        raise Failed(f"{what}: the step error's code is {result.step_error.code} instead of {_INVALID_ARGUMENT}")
    if result.sampled:
        raise Failed(f"{what}: rows {sorted(result.sampled)} sampled in a plan that failed")
    return result.step_error.message


async def _expect_harmless(lab: Lab, epoch: Epoch, row: Row, count: int = 3) -> None:
    """A row goes on as if the faulty plan had never been."""
    await epoch.generate([row], count)
    other = await lab.epoch()
    reference = other.row(row.new.prompt_token_ids, sampling=lab.watched())
    await other.generate([reference], len(row.token_ids))
    lab.expect_same(reference, row.token_ids, "the row that was running")


# --- rows that end ------------------------------------------------------------------------------------------------


@check("finish-only")
async def finish_only(lab: Lab) -> str:
    """A plan that only finishes rows has a result, without rows."""
    epoch = await lab.epoch()
    row = epoch.row(lab.prompt(3))
    await epoch.generate([row], 1)
    await epoch.step(finished=[row.row_id])
    again = epoch.row(lab.prompt(4))
    await epoch.generate([again], 1)
    return "an empty result, and the next plan runs"


@check("finished-rows-forgotten")
async def finished_rows_forgotten(lab: Lab) -> str:
    """A row is forgotten with the plan that finishes it: a later plan cannot name it."""
    epoch = await lab.epoch()
    row = epoch.row(lab.prompt(3))
    await epoch.generate([row], 1)
    await epoch.step(finished=[row.row_id])
    return _expect_step_error(await epoch.ask(epoch.plan([epoch.part(row)])), "a plan with a finished row")


# --- rows that fail -----------------------------------------------------------------------------------------------


@check("row-error")
async def row_error(lab: Lab) -> str:
    """What is wrong inside a new row (a token outside the vocabulary) is an error of that row alone, in every plan
    that names it until it is finished; the rows beside it are good.
    """
    lab.need_rows(2)
    epoch = await lab.epoch()
    row = epoch.row(lab.prompt(lab.can.block_size + 1))
    await epoch.generate([row], 1)
    bad = epoch.row([*lab.prompt(2, 1), lab.can.vocab_size])
    seen = ""
    for _ in range(2):
        parts = [epoch.part(row), epoch.part(bad)]
        result = await epoch.ask(epoch.plan(parts))
        if result.step_error is not None:
            raise Failed(f"the whole plan failed: {result.step_error.message}")
        if result.row_errors.keys() != {bad.row_id}:
            raise Failed(f"rows {sorted(result.row_errors)} have errors instead of row {bad.row_id} alone")
        if bad.row_id in result.sampled:
            raise Failed("the row that failed sampled a token")
        seen = result.row_errors.pop(bad.row_id).message
        epoch.apply(result, parts[:1])
    await epoch.step(finished=[bad.row_id])
    await _expect_harmless(lab, epoch, row)
    return f"{seen}; its neighbour went on"


# --- plans beyond the limits --------------------------------------------------------------------------------------


@check("too-many-tokens")
async def too_many_tokens(lab: Lab) -> str:
    """A plan of more than max_num_batched_tokens tokens is malformed. The plan is a step error with INVALID_ARGUMENT,
    changes nothing, and the rows go on.
    """
    lab.need_rows(2)
    epoch = await lab.epoch()
    row = epoch.row(lab.prompt(3))
    await epoch.generate([row], 1)
    left = lab.can.max_num_batched_tokens + 1
    parts: list[Part] = []
    while left:
        num_tokens = min(left, lab.can.max_model_len)
        parts.append(epoch.part(epoch.row(lab.prompt(num_tokens, len(parts)))))
        left -= num_tokens
    if len(parts) > lab.can.max_num_seqs:
        raise Skipped("no plan can have more tokens: its rows do not suffice")
    message = _expect_step_error(await epoch.ask(epoch.plan(parts)), f"{lab.can.max_num_batched_tokens + 1} tokens")
    await _expect_harmless(lab, epoch, row)
    return message


@check("too-many-rows")
async def too_many_rows(lab: Lab) -> str:
    """A plan of more than max_num_seqs rows is malformed. The plan is a step error with INVALID_ARGUMENT, changes
    nothing, and the rows go on.
    """
    if lab.can.max_num_batched_tokens <= lab.can.max_num_seqs:
        raise Skipped("a plan with one row too many has too many tokens, too")
    epoch = await lab.epoch()
    row = epoch.row(lab.prompt(3))
    await epoch.generate([row], 1)
    parts = [epoch.part(epoch.row(lab.prompt(1, salt))) for salt in range(lab.can.max_num_seqs + 1)]
    message = _expect_step_error(await epoch.ask(epoch.plan(parts)), f"{len(parts)} rows")
    await _expect_harmless(lab, epoch, row)
    return message


# --- malformed plans ----------------------------------------------------------------------------------------------

MakeBad = Callable[[Lab, Epoch, Row], executor_pb2.ExecuteRequest]


def _fresh(lab: Lab, epoch: Epoch, num_tokens: int = 3) -> executor_pb2.ExecuteRequest:
    """A good plan with a new row."""
    return epoch.plan([epoch.part(epoch.row(lab.prompt(num_tokens, 1)))])


def _unknown_row(lab: Lab, epoch: Epoch, row: Row) -> executor_pb2.ExecuteRequest:
    return changed(_fresh(lab, epoch), new_rows=[])


def _known_row(lab: Lab, epoch: Epoch, row: Row) -> executor_pb2.ExecuteRequest:
    plan = _fresh(lab, epoch)
    plan.new_rows[0].row_id = row.row_id
    return changed(plan, row_ids=[row.row_id])


def _row_twice(lab: Lab, epoch: Epoch, row: Row) -> executor_pb2.ExecuteRequest:
    plan = _fresh(lab, epoch)
    return changed(
        plan,
        row_ids=[*plan.row_ids] * 2,
        num_scheduled_tokens=[1, 1],
        num_computed_tokens=[0, 1],
        feeds_back=[False, False],
        num_new_blocks=[len(plan.new_block_ids), 0],
    )


def _idle_row(lab: Lab, epoch: Epoch, row: Row) -> executor_pb2.ExecuteRequest:
    return changed(_fresh(lab, epoch), num_scheduled_tokens=[0])


def _null_block(lab: Lab, epoch: Epoch, row: Row) -> executor_pb2.ExecuteRequest:
    plan = _fresh(lab, epoch)
    return changed(plan, new_block_ids=[0, *plan.new_block_ids[1:]])


def _outside_block(lab: Lab, epoch: Epoch, row: Row) -> executor_pb2.ExecuteRequest:
    plan = _fresh(lab, epoch)
    return changed(plan, new_block_ids=[*plan.new_block_ids[:-1], lab.num_blocks])


def _no_block(lab: Lab, epoch: Epoch, row: Row) -> executor_pb2.ExecuteRequest:
    plan = _fresh(lab, epoch, lab.can.block_size + 1)
    return changed(plan, new_block_ids=plan.new_block_ids[:1], num_new_blocks=[1])


def _beyond_ids(lab: Lab, epoch: Epoch, row: Row) -> executor_pb2.ExecuteRequest:
    plan = _fresh(lab, epoch)
    block_ids = [*plan.new_block_ids, *epoch.blocks(1)]
    return changed(plan, num_scheduled_tokens=[4], new_block_ids=block_ids, num_new_blocks=[len(block_ids)])


def _uneven_columns(lab: Lab, epoch: Epoch, row: Row) -> executor_pb2.ExecuteRequest:
    return changed(_fresh(lab, epoch), feeds_back=[])


def _stray_block(lab: Lab, epoch: Epoch, row: Row) -> executor_pb2.ExecuteRequest:
    plan = _fresh(lab, epoch)
    return changed(plan, new_block_ids=[*plan.new_block_ids, *epoch.blocks(1)])


_BAD_PLANS: dict[str, tuple[str, MakeBad]] = {
    "unknown-row": ("A plan that names a row that it does not bring and that is not known is malformed.", _unknown_row),
    "known-row": ("A plan that brings a row that is known is malformed.", _known_row),
    "row-twice": ("A plan in which a row stands twice is malformed.", _row_twice),
    "idle-row": ("A plan in which a row computes no token is malformed.", _idle_row),
    "null-block": ("A plan that gives block 0 to a row is malformed.", _null_block),
    "outside-block": ("A plan that gives a row a block beyond those that were laid out is malformed.", _outside_block),
    "too-few-blocks": ("A plan in which a row's blocks have no room for its tokens is malformed.", _no_block),
    "beyond-ids": ("A plan in which a row computes tokens behind the end of its ids is malformed.", _beyond_ids),
    "uneven-columns": ("A plan whose columns have different lengths is malformed.", _uneven_columns),
    "stray-block": ("A plan with more new_block_ids than num_new_blocks adds up to is malformed.", _stray_block),
}


def _add(name: str, rule: str, make: MakeBad) -> None:
    async def body(lab: Lab) -> str:
        epoch = await lab.epoch()
        row = epoch.row(lab.prompt(lab.can.block_size + 1))
        await epoch.generate([row], 1)
        message = _expect_step_error(await epoch.ask(make(lab, epoch, row)), name)
        await _expect_harmless(lab, epoch, row)
        return message

    add_check(name, f"{rule} {_MALFORMED}", body)


for _name, (_rule, _make) in _BAD_PLANS.items():
    _add(_name, _rule, _make)


@check("unknown-fields")
async def unknown_fields(lab: Lab) -> str:
    """Fields that the executor does not know are ignored, in plans and in rows."""
    epoch = await lab.epoch()
    row = epoch.row(lab.prompt(3))
    plan = epoch.plan([part := epoch.part(row)])
    plan.MergeFromString(_UNKNOWN_FIELD)
    plan.new_rows[0].MergeFromString(_UNKNOWN_FIELD)
    plan.new_rows[0].sampling.MergeFromString(_UNKNOWN_FIELD)
    epoch.apply(await epoch.ask(plan), [part])
    await _expect_harmless(lab, epoch, row)
    return "a field 1000 in plan, row and sampling parameters"


@check("trace-context")
async def trace_context(lab: Lab) -> str:
    """A trace context, also one that makes no sense, changes nothing."""
    epoch = await lab.epoch()
    row = epoch.row(lab.prompt(3))
    plan = epoch.plan([part := epoch.part(row)])
    plan.trace.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    plan.new_rows[0].trace.traceparent = "no trace"
    epoch.apply(await epoch.ask(plan), [part])
    await _expect_harmless(lab, epoch, row)
    return "a good one and a bad one"
