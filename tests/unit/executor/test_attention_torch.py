"""Paged attention in torch against a reference that knows nothing of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tokenloom.executor.attention import LayerAttention
from tokenloom.executor.attention_torch import TorchAttention
from tokenloom.executor.batch import build_batch
from tokenloom.executor.plan import SamplingParams
from tokenloom.executor.rows import Row, ScheduledRow

HEAD_DIM, VALUE_DIM = 8, 4
CPU = torch.device("cpu")
# (tokens computed before, new tokens) of each row
DECODE = [(0, 1), (5, 1), (33, 1), (16, 1)]
PREFILL = [(0, 7), (4, 9), (16, 16), (30, 2)]
MIXED = [(3, 6), (20, 1), (0, 17), (7, 1)]


def reference(q: Tensor, k: Tensor, v: Tensor, first_query: int, layer: LayerAttention) -> Tensor:
    """Attention of one row, query by query and head by head; q `[n, heads, dim]`, k and v whole."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2])
    for i in range(q.shape[0]):
        last = first_query + i
        first = 0 if layer.sliding_window is None else max(0, last - layer.sliding_window + 1)
        for head in range(q.shape[1]):
            keys, values = k[first : last + 1, head // group], v[first : last + 1, head // group]
            scores = (keys @ q[i, head]).double() * layer.scale
            if layer.softcap is not None:
                scores = torch.tanh(scores / layer.softcap) * layer.softcap
            if layer.sinks is not None:
                scores = torch.cat([scores, layer.sinks[head : head + 1].double()])
            weights = torch.softmax(scores, dim=0)[: len(values)]
            out[i, head] = weights.float() @ values
    return out


class World:
    """Rows with scattered blocks in a cache whose unwritten slots hold NaN."""

    def __init__(self, shape: Sequence[tuple[int, int]], block_size: int, num_heads: int, num_kv_heads: int) -> None:
        generator = torch.Generator().manual_seed(len(shape) + block_size)
        self.lens = [before + new for before, new in shape]
        needed = [-(-n // block_size) for n in self.lens]
        free = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
        self.k_cache = torch.full((sum(needed) + 4, block_size, num_kv_heads, HEAD_DIM), math.nan)
        self.v_cache = torch.full((sum(needed) + 4, block_size, num_kv_heads, VALUE_DIM), math.nan)
        scheduled = []
        for i, (before, new) in enumerate(shape):
            blocks = [free.pop() for _ in range(needed[i])]
            row = Row(i, "", before + new, [0] * (before + new), SamplingParams(), block_ids=blocks)
            scheduled.append(ScheduledRow(row, before, before + new))
        self.batch = build_batch(scheduled, block_size, CPU)
        self.q = [torch.randn(n, num_heads, HEAD_DIM, generator=generator) for n in self.lens]
        self.k = [torch.randn(n, num_kv_heads, HEAD_DIM, generator=generator) for n in self.lens]
        self.v = [torch.randn(n, num_kv_heads, VALUE_DIM, generator=generator) for n in self.lens]
        for s in scheduled:  # what earlier steps wrote
            for position in range(s.first):
                block, offset = s.row.block_ids[position // block_size], position % block_size
                self.k_cache[block, offset] = self.k[s.row.row_id][position]
                self.v_cache[block, offset] = self.v[s.row.row_id][position]

    def new(self, values: list[Tensor]) -> Tensor:
        """The step's new tokens of all rows in the batch's order."""
        return torch.cat([values[s.row.row_id][s.first : s.end] for s in self.batch.rows])


def assert_equals_reference(world: World, layer: LayerAttention) -> None:
    backend = TorchAttention()
    metadata = world.batch.metadata
    backend.store(world.new(world.k), world.new(world.v), world.k_cache, world.v_cache, metadata.slot_mapping)
    out = backend.attend(world.new(world.q), world.k_cache, world.v_cache, backend.prepare(metadata), layer)
    first = 0
    for s in world.batch.rows:
        i = s.row.row_id
        expected = reference(world.q[i][s.first : s.end], world.k[i][: s.end], world.v[i][: s.end], s.first, layer)
        torch.testing.assert_close(out[first : first + s.num_tokens], expected, rtol=1e-4, atol=1e-5)
        first += s.num_tokens


@pytest.mark.parametrize("rows", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
def test_rows_attend_to_their_own_tokens_and_nothing_else(
    rows: list[tuple[int, int]], block_size: int, heads: tuple[int, int]
) -> None:
    assert_equals_reference(World(rows, block_size, *heads), LayerAttention(0, scale=0.3))


@pytest.mark.parametrize("rows", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", [1, 3, 8, 1000])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_sliding_window_counts_the_query_itself(rows: list[tuple[int, int]], window: int, block_size: int) -> None:
    layer = LayerAttention(0, scale=0.3, sliding_window=window)
    assert_equals_reference(World(rows, block_size, 4, 2), layer)


@pytest.mark.parametrize("rows", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_softcap_and_sinks(
    rows: list[tuple[int, int]], window: int | None, sinks: Tensor | None, softcap: float | None
) -> None:
    layer = LayerAttention(0, scale=0.7, sliding_window=window, softcap=softcap, sinks=sinks)
    assert_equals_reference(World(rows, 4, 4, 2), layer)


def test_one_long_context_does_not_pad_the_others_to_its_length() -> None:
    world = World([(0, 1), (2999, 1), (5, 1), (9, 1), (2500, 1)], 16, 2, 1)
    gathers = TorchAttention().prepare(world.batch.metadata).of_window(None)
    assert [tuple(gather.slots.shape) for gather in gathers] == [(3, 10), (2, 3000)]
    assert_equals_reference(world, LayerAttention(0, scale=0.3))


def test_layers_with_different_windows_share_a_step() -> None:
    world = World(MIXED, 4, 4, 2)
    backend = TorchAttention()
    metadata = world.batch.metadata
    backend.store(world.new(world.k), world.new(world.v), world.k_cache, world.v_cache, metadata.slot_mapping)
    prepared = backend.prepare(metadata)
    windows: list[int | None] = [None, 3, None, 3]
    outs = [
        backend.attend(
            world.new(world.q), world.k_cache, world.v_cache, prepared, LayerAttention(i, 0.3, sliding_window=window)
        )
        for i, window in enumerate(windows)
    ]
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1])
