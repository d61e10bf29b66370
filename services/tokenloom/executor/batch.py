"""From scheduled rows to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenloom.executor.attention import StepMetadata
from tokenloom.executor.rows import ScheduledRow


@dataclass(frozen=True)
class Batch:
    """A step's input; T tokens of all rows, one after the other.

    Args:
        rows: decode rows (one token) first, shortest context first; then the others in the plan's order.
        input_ids: `[1, T]` int64; positions likewise.
        metadata: for attention.
        first_tokens: where each row's tokens begin.
    """

    rows: list[ScheduledRow]
    input_ids: Tensor
    positions: Tensor
    metadata: StepMetadata
    first_tokens: list[int]


def build_batch(scheduled: Sequence[ScheduledRow], block_size: int, device: torch.device) -> Batch:
    """Build the tensors for rows that compute something; there is at least one."""
    rows = sorted(scheduled, key=lambda s: (s.num_tokens > 1, s.end if s.num_tokens == 1 else 0))
    query_lens = [s.num_tokens for s in rows]
    seq_lens = [s.end for s in rows]
    ids = [token_id for s in rows for token_id in s.row.token_ids[s.first : s.end]]
    positions = np.concatenate([np.arange(s.first, s.end) for s in rows])
    block_table = np.zeros((len(rows), max(-(-end // block_size) for end in seq_lens)), dtype=np.int64)
    for i, s in enumerate(rows):
        blocks = s.row.block_ids[: block_table.shape[1]]
        block_table[i, : len(blocks)] = blocks
    row_of_token = np.repeat(np.arange(len(rows)), query_lens)
    slots = block_table[row_of_token, positions // block_size] * block_size + positions % block_size
    cu_seqlens_q = np.cumsum([0, *query_lens])
    metadata = StepMetadata(
        cu_seqlens_q=_int32(cu_seqlens_q, device),
        seqused_k=_int32(np.array(seq_lens), device),
        cu_seqlens_k=_int32(np.cumsum([0, *seq_lens]), device),
        block_table=_int32(block_table, device),
        slot_mapping=torch.from_numpy(slots).to(device),
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_decode=query_lens.count(1),
        block_size=block_size,
    )
    return Batch(
        rows=rows,
        input_ids=torch.tensor([ids], dtype=torch.long, device=device),
        positions=torch.from_numpy(positions).to(device).unsqueeze(0),
        metadata=metadata,
        first_tokens=cu_seqlens_q[:-1].tolist(),
    )


def _int32(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)
