"""What watchers of steps and of the prefix cache are sent."""

from __future__ import annotations

from tokenloom.api.v1 import engine_pb2
from tokenloom.scheduler.cache_watchers import CachePart
from tokenloom.scheduler.convert import load_proto
from tokenloom.scheduler.core.block_hash import HASH_SCHEME
from tokenloom.scheduler.core.plan import PreemptReason
from tokenloom.scheduler.watchers import StepRecord

_PREEMPT_REASONS = {
    PreemptReason.BLOCKS: engine_pb2.PREEMPT_REASON_BLOCKS,
    PreemptReason.PRIORITY: engine_pb2.PREEMPT_REASON_PRIORITY,
    PreemptReason.SHARE: engine_pb2.PREEMPT_REASON_SHARE,
}


def step_proto(record: StepRecord, num_dropped: int) -> engine_pb2.WatchStepsResponse:
    """A plan, and how many plans its reader missed before it."""
    return engine_pb2.WatchStepsResponse(
        step_id=record.step_id,
        made_at_us=round(record.made_at_s * 1e6),
        max_num_batched_tokens=record.max_num_batched_tokens,
        request_ids=record.request_ids,
        tenants=record.tenants,
        priority_classes=record.priority_classes,
        num_scheduled_tokens=record.num_scheduled_tokens,
        num_computed_tokens=record.num_computed_tokens,
        samples=record.samples,
        preempted_request_ids=record.preempted_request_ids,
        preempt_reasons=[_PREEMPT_REASONS[reason] for reason in record.preempt_reasons],
        load=load_proto(record.load),
        num_dropped=num_dropped,
    )


def cache_events_proto(
    part: CachePart, sequence: int, block_size: int, engine_epoch: str
) -> engine_pb2.WatchCacheEventsResponse:
    """A part of what changed in the prefix cache.

    Args:
        sequence: number of the message.
        block_size: tokens per block.
        engine_epoch: as in Welcome.
    """
    response = engine_pb2.WatchCacheEventsResponse(
        sequence=sequence,
        cleared=part.is_cleared,
        removed_hashes=part.removed,
        stored_hashes=[block_hash for block_hash, _ in part.stored],
        parent_hashes=[parent for _, parent in part.stored],
        has_more=part.has_more,
    )
    if part.is_cleared:
        response.block_size, response.hash_scheme, response.engine_epoch = block_size, HASH_SCHEME, engine_epoch
    return response
