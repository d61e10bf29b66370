from __future__ import annotations

import asyncio

from tokenloom.api.v1 import inference_pb2
from tokenloom.gateway.tokenizer_client import Outbox


def start(handle: int, num_bytes: int = 1) -> inference_pb2.SessionStart:
    prompt = inference_pb2.Prompt(text="x" * num_bytes)
    return inference_pb2.SessionStart(handle=handle, complete=inference_pb2.CompleteRequest(prompts=[prompt]))


def frames(outbox: Outbox, count: int) -> list[tuple[list[int], list[int]]]:
    """Handles started and cancelled by the next frames."""

    async def take() -> list[tuple[list[int], list[int]]]:
        taken = [await outbox.next_frame() for _ in range(count)]
        return [([begun.handle for begun in frame.starts], list(frame.cancelled_handles)) for frame in taken]

    return asyncio.run(take())


def test_what_piles_up_goes_into_one_frame_in_order() -> None:
    outbox = Outbox()
    for handle in (1, 2, 3):
        outbox.add_start(start(handle))
    assert frames(outbox, 1) == [([1, 2, 3], [])]


def test_a_request_cancelled_before_it_was_sent_is_never_sent() -> None:
    outbox = Outbox()
    outbox.add_start(start(1))
    outbox.add_start(start(2))
    outbox.add_cancel(1)
    assert frames(outbox, 1) == [([2], [])]
    outbox.add_cancel(2)
    assert frames(outbox, 1) == [([], [2])]


def test_large_requests_are_spread_over_frames() -> None:
    outbox = Outbox()
    for handle in (1, 2, 3):
        outbox.add_start(start(handle, 600_000))
    outbox.add_start(start(4, 3 << 20))
    assert frames(outbox, 4) == [([1], []), ([2], []), ([3], []), ([4], [])]
