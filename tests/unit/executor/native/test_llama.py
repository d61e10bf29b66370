"""A whole model of the Llama shape over the kernels: against transformers, and bitwise against itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.executor.native.kernel_lab import (
    FORMATS,
    VOCAB_SIZE,
    batch_of,
    isas,
    kernels_of,
    write_tiny_gguf,
)
from tokenloom.common.gguf_file import GgufFile
from tokenloom.executor.kv_cache import KVCache
from tokenloom.executor.native.gguf_weights import GgufWeights
from tokenloom.executor.native.library import Format, Pool
from tokenloom.executor.native.llama import NativeLlama
from tokenloom.executor.native.probe import probe_divergence
from tokenloom.executor.native.weights import UnsupportedWeights
from tokenloom.executor.progress import Progress

CPU = torch.device("cpu")


def load(pool: Pool, path: Path, kv_dtype: torch.dtype = torch.float32) -> NativeLlama:
    weights = GgufWeights(GgufFile(path))
    return NativeLlama(pool, weights.shape, weights, kv_dtype)


def new_cache(model: NativeLlama, num_blocks: int = 64) -> KVCache:
    cache = KVCache(model.shapes, num_blocks, 16, model.kv_dtype, CPU)
    for keys, values in cache.layers:
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
    return cache


def plain_model(path: Path) -> Any:
    """transformers' model with the same weights, unpacked."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)


@pytest.fixture(scope="module", params=FORMATS, ids=lambda form: form.name)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", request.param)


@pytest.mark.parametrize("isa", isas())
def test_the_model_says_what_transformers_says(tiny: Path, isa: str) -> None:
    with kernels_of(isa) as pool:
        model = load(pool, tiny)
        mean, worst = probe_divergence(model, plain_model(tiny), 16)
    assert mean < 1e-5
    assert worst < 1e-4


def test_layers_count_as_progress(tiny: Path) -> None:
    with kernels_of(isas()[0]) as pool:
        model, progress = load(pool, tiny), Progress()
        model.hidden_states(batch_of([(range(5), 0, 5, [1])]), new_cache(model), progress)
    assert progress.count == 2


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NativeLlama, Pool]]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", Format.Q4_1)
    with kernels_of(isas()[0], num_threads=3) as pool:
        yield load(pool, path, torch.bfloat16), pool


def ids_of(row: int, num: int) -> list[int]:
    return [(row * 131 + 17 * i * i + 3 * i) % VOCAB_SIZE for i in range(num)]


def undisturbed(model: NativeLlama, row: int, num: int) -> torch.Tensor:
    """Logits of every position, in one step, alone."""
    batch = batch_of([(ids_of(row, num), 0, num, list(range(1, 1 + -(-num // 16))))])
    return model.logits(model.hidden_states(batch, new_cache(model), Progress()))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_logits_are_bitwise_the_same_in_every_batch_chunking_and_recomputation(
    packed: tuple[NativeLlama, Pool], data: st.DataObject
) -> None:
    model, _ = packed
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    done, cache = [0] * len(lengths), new_cache(model)
    blocks: list[list[int]] = [[] for _ in lengths]
    free: list[int] = list(np.random.default_rng(len(lengths)).permutation(63) + 1)
    found: list[dict[int, torch.Tensor]] = [{} for _ in lengths]
    num_lost = 0
    while any(done[i] < lengths[i] for i in range(len(lengths))):
        rows = [i for i in range(len(lengths)) if done[i] < lengths[i]]
        rows = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
        if num_lost < 3 and data.draw(st.integers(0, 9)) == 0:  # preempted: its blocks go, its tokens come again
            num_lost += 1
            free += blocks[rows[0]]
            done[rows[0]], blocks[rows[0]] = 0, []
        ends = [done[i] + data.draw(st.integers(1, min(60, lengths[i] - done[i]))) for i in rows]
        for i, end in zip(rows, ends, strict=True):
            while len(blocks[i]) * 16 < end:
                blocks[i].append(free.pop())
        batch = batch_of([(ids_of(i, end), done[i], end, blocks[i]) for i, end in zip(rows, ends, strict=True)])
        logits = model.logits(model.hidden_states(batch, cache, Progress()))
        for first_token, scheduled in zip(batch.first_tokens, batch.rows, strict=True):
            i = rows[scheduled.row.row_id]
            for t in range(scheduled.num_tokens):
                found[i][scheduled.first + t] = logits[first_token + t]
        for i, end in zip(rows, ends, strict=True):
            done[i] = end
    for i, length in enumerate(lengths):
        assert torch.equal(torch.stack([found[i][t] for t in range(length)]), undisturbed(model, i, length))


def test_a_prefix_that_another_row_wrote_is_as_good_as_ones_own(packed: tuple[NativeLlama, Pool]) -> None:
    model, _ = packed
    cache, ids = new_cache(model), ids_of(0, 48)
    model.hidden_states(batch_of([(ids, 0, 33, [5, 9, 2])]), cache, Progress())
    batch = batch_of([(ids, 32, 48, [5, 9, 7])])  # two blocks of the other, one of its own
    found = model.logits(model.hidden_states(batch, cache, Progress()))
    assert torch.equal(found, undisturbed(model, 0, 48)[32:])


def test_weights_that_are_not_known_are_not_left_out_in_silence(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "biased.gguf", Format.F32, extra=["blk.0.attn_q.bias"])
    with kernels_of(isas()[0]) as pool, pytest.raises(UnsupportedWeights, match=r"do not know: blk\.0\.attn_q\.bias"):
        load(pool, path)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [({"head_dim": 16}, "head_dim 16 is not a multiple of 32"), ({"heads": 3, "kv_heads": 2}, "not shared evenly")],
)
def test_shapes_that_the_kernels_are_not_made_for_are_refused(
    tmp_path: Path, shape: dict[str, Any], reason: str
) -> None:
    path = write_tiny_gguf(tmp_path / "odd.gguf", Format.F32, **shape)
    with kernels_of(isas()[0]) as pool, pytest.raises(UnsupportedWeights, match=reason):
        load(pool, path)
