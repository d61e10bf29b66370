"""Capabilities, epochs and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from tokenloom.api.v1 import executor_pb2
from tokenloom.common.errors import FailedPrecondition, InvalidArgument
from tokenloom.common.schema import SCHEMA_REVISION
from tokenloom.conformance.check import check
from tokenloom.conformance.lab import Epoch, Lab
from tokenloom.conformance.results import Failed

_HEARTBEAT_MS = 100
_QUIET_S = 0.3


async def _ends_with_failed_precondition(read: Awaitable[object], what: str) -> None:
    try:
        answer = await read
    except FailedPrecondition:
        return
    came = "a result" if isinstance(answer, executor_pb2.ExecuteResponse) else "the end of the stream with status OK"
    raise Failed(f"{what}: {came} came instead of FAILED_PRECONDITION")


@check("capabilities")
async def capabilities(lab: Lab) -> str:
    """GetCapabilities tells limits that can be worked with, and the same at each call."""
    can = lab.can
    at_least = {"vocab_size": 2, "max_model_len": 2, "block_size": 1, "max_num_blocks": 2, "max_num_seqs": 1}
    at_least |= {"max_num_batched_tokens": 1, "max_plans_in_flight": 2}
    for name, least in at_least.items():
        if (value := getattr(can, name)) < least:
            raise Failed(f"{name} is {value}; it is at least {least}")
    if abs(can.schema_revision - SCHEMA_REVISION) > 1:
        raise Failed(f"schema_revision is {can.schema_revision}; this is {SCHEMA_REVISION}, and they may be one apart")
    for name in ("boot_id", "model_id", "tokenizer_fingerprint"):
        if not getattr(can, name):
            raise Failed(f"{name} is empty")
    if any(token_id >= can.vocab_size for token_id in can.eos_token_ids):
        raise Failed(f"eos_token_ids {list(can.eos_token_ids)} are not all below vocab_size {can.vocab_size}")
    if await lab.client.capabilities() != can:
        raise Failed("a second call answers something else")
    return f"{can.model_id}: {can.max_num_blocks} blocks of {can.block_size} tokens, {can.max_num_seqs} rows"


@check("initialize-begins-epoch")
async def initialize_begins_epoch(lab: Lab) -> str:
    """Each Initialize begins an epoch with the same boot id and the next counter."""
    first = await lab.client.initialize(lab.num_blocks)
    second = await lab.client.initialize(lab.num_blocks)
    if first.boot_id != lab.can.boot_id:
        raise Failed(f"the epoch's boot id is {first.boot_id!r}, that of the capabilities {lab.can.boot_id!r}")
    if (second.boot_id, second.counter) != (first.boot_id, first.counter + 1):
        raise Failed(f"{first.boot_id}/{first.counter} is followed by {second.boot_id}/{second.counter}")
    return f"counter {first.counter}, then {second.counter}"


@check("initialize-bounds")
async def initialize_bounds(lab: Lab) -> str:
    """Initialize with fewer than 2 or more than max_num_blocks blocks is INVALID_ARGUMENT, and the epoch goes on."""
    epoch = await lab.epoch()
    row = epoch.row(lab.prompt(3))
    await epoch.generate([row], 1)
    for num_blocks in (0, 1, lab.can.max_num_blocks + 1):
        try:
            await lab.client.initialize(num_blocks)
        except InvalidArgument:
            continue
        raise Failed(f"{num_blocks} blocks are taken")
    await epoch.generate([row], 1)
    return f"0, 1 and {lab.can.max_num_blocks + 1} blocks are refused"


@check("stale-epoch")
async def stale_epoch(lab: Lab) -> str:
    """A plan of another epoch ends the stream with FAILED_PRECONDITION and is not run."""
    old = await lab.client.initialize(lab.num_blocks)
    others = {
        "an older counter": old,
        "a counter to come": executor_pb2.Epoch(boot_id=old.boot_id, counter=old.counter + 100),
        "another boot id": executor_pb2.Epoch(boot_id=f"not-{old.boot_id}", counter=old.counter + 1),
    }
    for name, other in others.items():
        current = await lab.epoch()
        plan = current.plan([current.part(current.row(lab.prompt(3)))])
        plan.epoch.CopyFrom(other)
        if name == "another boot id":
            plan.epoch.counter = current.epoch.counter
        await current.stream.send(plan)
        await _ends_with_failed_precondition(current.stream.read(), f"a plan with {name}")
    return ", ".join(others)


@check("initialize-ends-stream")
async def initialize_ends_stream(lab: Lab) -> str:
    """Initialize ends the stream of the epoch before with FAILED_PRECONDITION, and its rows are void."""
    before = await lab.epoch()
    row = before.row(lab.prompt(3))
    await before.generate([row], 1)
    after = await lab.epoch()
    await _ends_with_failed_precondition(before.stream.read(), "the older stream")
    result = await after.ask(after.plan([after.part(row)]))
    if result.step_error is None:
        raise Failed("a row of the epoch before is still known")
    return f"{result.step_error.message}"


@check("epoch-ends-with-stream")
async def epoch_ends_with_stream(lab: Lab) -> str:
    """An epoch ends with its stream: a later stream needs a new Initialize."""
    epoch = await lab.epoch()
    row = epoch.row(lab.prompt(3))
    await epoch.generate([row], 1)
    await epoch.stream.half_close()
    if await epoch.stream.read() is not None:
        raise Failed("a result came that no plan asked for")
    later = lab.client.stream()
    try:
        await later.send(epoch.plan([epoch.part(row)]))
        await _ends_with_failed_precondition(later.read(), "a stream that goes on with the epoch")
    finally:
        later.cancel()
    return "a second stream is refused"


@check("one-stream-per-epoch")
async def one_stream_per_epoch(lab: Lab) -> str:
    """While a stream runs the plans of an epoch, another one is refused with FAILED_PRECONDITION and does no harm."""
    epoch = await lab.epoch()
    row, intruder = epoch.row(lab.prompt(3)), epoch.row(lab.prompt(3, 1))
    await epoch.generate([row], 1)
    other = lab.client.stream()
    try:
        plan = epoch.plan([epoch.part(intruder)])
        plan.step_id = 1
        await other.send(plan)
        await _ends_with_failed_precondition(other.read(), "a second stream")
    finally:
        other.cancel()
    plan = epoch.plan([part := epoch.part(row)])
    plan.step_id -= 1
    epoch.apply(await epoch.ask(plan), [part])
    return "the first stream goes on"


@check("half-close")
async def half_close(lab: Lab) -> str:
    """When the scheduler closes its side, all plans sent are answered and the stream ends with OK."""
    epoch = await lab.epoch()
    step_ids = await _send_some(epoch, lab)
    await epoch.stream.half_close()
    for step_id in step_ids:
        await epoch.result(step_id)
    if (more := await epoch.stream.read()) is not None:
        raise Failed(f"a result of plan {more.step_id} came twice")
    return f"{len(step_ids)} plans answered"


@check("results-in-order")
async def results_in_order(lab: Lab) -> str:
    """max_plans_in_flight plans are taken before any result is read, and each has one result, in their order."""
    epoch = await lab.epoch()
    step_ids = await _send_some(epoch, lab)
    for step_id in step_ids:
        await epoch.result(step_id)
    return f"{len(step_ids)} plans in flight"


@check("heartbeats")
async def heartbeats(lab: Lab) -> str:
    """If Initialize asks for heartbeats, they come on a silent stream, say nothing else, and never count backwards."""
    epoch = await lab.epoch(_HEARTBEAT_MS)
    seen = [await _heartbeat(epoch), await _heartbeat(epoch)]
    plan = epoch.plan([epoch.part(epoch.row(lab.prompt(3)))])
    await epoch.stream.send(plan)
    while (response := await epoch.stream.receive()).HasField("heartbeat"):
        seen.append(response.heartbeat.progress)
    if response.step_id != plan.step_id:
        raise Failed(f"the result of plan {response.step_id} came where that of plan {plan.step_id} was due")
    seen.append(await _heartbeat(epoch))
    if seen != sorted(seen):
        raise Failed(f"progress went {seen}")
    quiet = await lab.epoch()
    try:
        async with asyncio.timeout(_QUIET_S):
            await quiet.stream.read()
    except TimeoutError:
        return f"progress {seen}"
    raise Failed("a response came that was not asked for")


async def _heartbeat(epoch: Epoch) -> int:
    """The progress that the next response tells, which must be a heartbeat."""
    response = await epoch.stream.receive()
    if not response.HasField("heartbeat"):
        raise Failed(f"a result of plan {response.step_id} came instead of a heartbeat")
    if response != executor_pb2.ExecuteResponse(heartbeat=response.heartbeat):
        raise Failed("a heartbeat has other fields beside it")
    return response.heartbeat.progress


async def _send_some(epoch: Epoch, lab: Lab) -> list[int]:
    """Send as many plans as may be in flight."""
    row, step_ids = epoch.row(lab.prompt(3)), []
    for _ in range(max(1, lab.can.max_plans_in_flight)):
        plan = epoch.plan([epoch.part(row)])
        await epoch.stream.send(plan)
        step_ids.append(plan.step_id)
    return step_ids
