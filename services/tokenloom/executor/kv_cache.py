"""KV memory: per layer one tensor of keys and one of values, cut into blocks.

Layout `[num_blocks, block_size, num_kv_heads, head_dim]`, so that a slot (`block_id * block_size + offset`) is one
contiguous run of all heads. Nothing is cleared: what a row may read it has written itself, or a row with the same
prefix has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenloom.common.errors import SetupError


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer's keys and values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


def block_bytes(shapes: list[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    numbers = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    return numbers * block_size * dtype.itemsize


def max_num_blocks(budget_bytes: int, bytes_per_block: int) -> int:
    """Blocks that a budget has room for, the null block included.

    Raises: SetupError if there is not room for one block besides it.
    """
    num_blocks = budget_bytes // bytes_per_block
    if num_blocks < 2:
        raise SetupError(
            f"--kv-cache-bytes {budget_bytes} holds {num_blocks} blocks of {bytes_per_block} bytes and at least 2 are "
            "needed; give it more memory or a smaller --block-size"
        )
    return num_blocks


class KVCache:
    """The KV memory of all layers.

    Args:
        shapes: sizes per layer.
        num_blocks: blocks to lay out, the null block 0 included.
    """

    def __init__(
        self, shapes: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor]] = []
        for shape in shapes:
            head = (num_blocks, block_size, shape.num_kv_heads)
            self.layers.append(
                (
                    torch.empty((*head, shape.key_dim), dtype=dtype, device=device),
                    torch.empty((*head, shape.value_dim), dtype=dtype, device=device),
                )
            )
