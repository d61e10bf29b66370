"""Attention over the paged cache in the kernels' layout, against plain softmax and against itself."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.unit.executor.native.kernel_lab import Floats, isas, kernels_of
from tokenloom.executor.native.library import Cache, Layer, Model, Pool, Step


@dataclass(frozen=True)
class Case:
    """Sizes, and rows as (first, end) of their positions."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    window: int = 0
    is_bf16: bool = False


CASES = (
    Case(rows=((0, 1),)),
    Case(rows=((16, 17), (127, 128), (128, 129), (300, 301))),
    Case(rows=((0, 40), (5, 6), (0, 7)), num_heads=4, num_kv_heads=4, head_dim=64),
    Case(rows=((100, 180), (250, 251)), num_heads=9, num_kv_heads=3, head_dim=64, is_bf16=True),
    Case(rows=((0, 200), (199, 200)), window=24),
    Case(rows=((150, 190), (399, 400)), window=130, is_bf16=True, block_size=32),
    Case(rows=((0, 5), (60, 61)), num_heads=8, num_kv_heads=1, head_dim=96, block_size=48),
    Case(rows=((0, 20), (20, 21)), num_heads=2, num_kv_heads=2, head_dim=128),
)


class Memory:
    """Queries, keys and values of all positions of some rows, and a cache of NaN with scattered blocks."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        random = np.random.default_rng(seed)
        longest = max(end for _, end in case.rows)
        self.q = [self._numbers(random, longest, case.num_heads) for _ in case.rows]
        self.k = [self._numbers(random, longest, case.num_kv_heads) for _ in case.rows]
        self.v = [self._numbers(random, longest, case.num_kv_heads) for _ in case.rows]
        per_row = -(-longest // case.block_size)
        self.tables = random.permutation(len(case.rows) * per_row).reshape(len(case.rows), per_row).astype(np.int32) + 1
        numbers = (len(case.rows) * per_row + 1) * case.block_size * case.num_kv_heads * case.head_dim
        dtype = torch.bfloat16 if case.is_bf16 else torch.float32
        self.keys, self.values = (torch.full((numbers,), torch.nan, dtype=dtype) for _ in range(2))

    def _numbers(self, random: np.random.Generator, num: int, heads: int) -> Floats:
        return random.normal(0, 1, (num, heads, self.case.head_dim)).astype(np.float32)

    def attend(self, pool: Pool, rows: tuple[tuple[int, int, int], ...]) -> list[Floats]:
        """Run (row, first, end) of each row in one step; `[tokens, heads, head_dim]` of each."""
        case = self.case
        q, k, v = (
            np.concatenate([part[row][first:end] for row, first, end in rows]) for part in (self.q, self.k, self.v)
        )
        out = np.full_like(q, np.nan)
        cu_seqlens = np.cumsum([0, *(end - first for _, first, end in rows)]).astype(np.int32)
        seq_lens = np.array([end for *_, end in rows], np.int32)
        tables = np.ascontiguousarray(self.tables[[row for row, *_ in rows]])
        layer = (Layer * 1)()
        layer[0].sliding_window, layer[0].attention_scale = case.window, case.head_dim**-0.5
        model = Model(num_layers=1, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim)
        model.layers = layer
        keys, values = (ctypes.c_void_p * 1)(self.keys.data_ptr()), (ctypes.c_void_p * 1)(self.values.data_ptr())
        cache = Cache(keys, values, int(case.is_bf16), case.block_size)
        step = Step(
            q.shape[0], len(rows), 0, cu_seqlens.ctypes.data, seq_lens.ctypes.data, tables.ctypes.data, tables.shape[1]
        )
        addresses = [part.ctypes.data for part in (q, k, v, out)]
        pool.library.tl_attention(pool.handle, model, 0, cache, step, *addresses)
        return np.split(out, cu_seqlens[1:-1])

    def fill(self, pool: Pool) -> None:
        """Write what stands before the rows' own tokens."""
        if before := tuple((row, 0, first) for row, (first, _) in enumerate(self.case.rows) if first):
            self.attend(pool, before)

    def expected(self, row: int) -> Floats:
        """Softmax in doubles over the keys and values as the cache rounds them."""
        case, (first, end) = self.case, self.case.rows[row]
        group = case.num_heads // case.num_kv_heads
        k, v = (self._rounded(part[row][:end]).repeat(group, axis=1) for part in (self.k, self.v))
        scores = np.einsum("qhd,khd->hqk", self.q[row][first:end].astype(np.float64), k) * case.head_dim**-0.5
        positions, keys = np.arange(first, end)[:, None], np.arange(end)[None]
        seen = (keys <= positions) & ((keys > positions - case.window) if case.window else True)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        found: Floats = np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), v)
        return found

    def _rounded(self, part: Floats) -> Floats:
        if not self.case.is_bf16:
            return part
        rounded: Floats = torch.from_numpy(part).to(torch.bfloat16).float().numpy()
        return rounded


def all_rows(case: Case) -> tuple[tuple[int, int, int], ...]:
    return tuple((row, first, end) for row, (first, end) in enumerate(case.rows))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("case", CASES)
def test_attention_is_softmax_over_what_a_query_sees(isa: str, case: Case) -> None:
    with kernels_of(isa) as pool:
        memory = Memory(case)
        memory.fill(pool)
        for row, found in enumerate(memory.attend(pool, all_rows(case))):
            np.testing.assert_allclose(found, memory.expected(row), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("case", CASES)
def test_attention_is_bitwise_the_same_alone_in_any_batch_and_in_any_chunks(isa: str, case: Case) -> None:
    with kernels_of(isa, num_threads=3) as pool:
        memory = Memory(case)
        memory.fill(pool)
        together = memory.attend(pool, all_rows(case))
        random = np.random.default_rng(1)
        for row, (first, end) in enumerate(case.rows):
            alone = Memory(case)
            cuts = sorted({0, first, end, *random.integers(0, end, 3).tolist()})
            chunks = [alone.attend(pool, ((row, a, b),))[0] for a, b in itertools.pairwise(cuts)]
            assert np.array_equal(np.concatenate(chunks)[first:], together[row])


def test_a_value_that_is_no_number_reaches_those_who_see_it_and_no_others() -> None:
    case = replace(CASES[0], rows=((0, 40), (0, 40)))
    with kernels_of(isas()[0]) as pool:
        clean = Memory(case).attend(pool, all_rows(case))
        memory = Memory(case)
        memory.k[0][20, 0] = np.nan
        found = memory.attend(pool, all_rows(case))
    group = case.num_heads // case.num_kv_heads
    assert np.isnan(found[0][20:, :group]).all()
    assert np.array_equal(found[0][:20], clean[0][:20])
    assert np.array_equal(found[0][:, group:], clean[0][:, group:])
    assert np.array_equal(found[1], clean[1])
