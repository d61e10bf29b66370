"""Plan to tensors."""

from __future__ import annotations

import torch

from tokenloom.executor.batch import build_batch
from tokenloom.executor.plan import SamplingParams
from tokenloom.executor.rows import Row, ScheduledRow


def scheduled(row_id: int, ids: list[int], first: int, end: int, blocks: list[int]) -> ScheduledRow:
    return ScheduledRow(Row(row_id, "", len(ids), ids, SamplingParams(), block_ids=blocks), first, end)


def test_decode_rows_come_first_shortest_first_and_every_array_says_the_same() -> None:
    rows = [
        scheduled(1, [10, 11, 12, 13, 14, 15], 2, 6, [7, 3]),
        scheduled(2, [20, 21, 22, 23, 24], 4, 5, [5, 9]),
        scheduled(3, [30, 31, 32], 0, 2, [1]),
        scheduled(4, [40], 0, 1, [2, 8]),
    ]
    batch = build_batch(rows, 4, torch.device("cpu"))
    metadata = batch.metadata
    assert [s.row.row_id for s in batch.rows] == [4, 2, 1, 3]
    assert batch.input_ids.tolist() == [[40, 24, 12, 13, 14, 15, 30, 31]]
    assert batch.positions.tolist() == [[0, 4, 2, 3, 4, 5, 0, 1]]
    assert metadata.slot_mapping.tolist() == [8, 36, 30, 31, 12, 13, 4, 5]
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 6, 8]
    assert metadata.seqused_k.tolist() == metadata.seq_lens == [1, 5, 6, 2]
    assert metadata.cu_seqlens_k.tolist() == [0, 1, 6, 12, 14]
    assert metadata.block_table.tolist() == [[2, 8], [5, 9], [7, 3], [1, 0]]
    assert metadata.query_lens == [1, 1, 4, 2]
    assert (metadata.num_decode, metadata.max_q, metadata.max_k) == (2, 4, 6)
    assert batch.first_tokens == [0, 1, 2, 6]
    assert {metadata.cu_seqlens_q.dtype, metadata.seqused_k.dtype, metadata.block_table.dtype} == {torch.int32}
