"""What tests of the kernels share: the library or a skip, matrices, steps, and a tiny model in a GGUF file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tokenloom.executor.batch import Batch, build_batch
from tokenloom.executor.native.library import Format, LibraryMissing, Pool, load_library
from tokenloom.executor.native.weights import PackedMatrix, RawMatrix, quantized, raw_floats
from tokenloom.executor.plan import SamplingParams
from tokenloom.executor.rows import Row, ScheduledRow

Floats = NDArray[np.float32]
FORMATS = tuple(Format)
PACKED = (Format.Q4_0, Format.Q4_1, Format.Q8_0)
VOCAB_SIZE = 512


def why_no_kernels() -> str | None:
    """Why there are no kernels to test, if no compiler could make them; else they must be there."""
    try:
        load_library()
    except LibraryMissing as error:
        if shutil.which("c++") is None:
            return str(error)
    return None


def isas() -> list[str]:
    """Instruction sets that this machine has; one that stands for none if the kernels were not compiled."""
    try:
        library = load_library()
    except LibraryMissing:
        return ["none"]
    found = [name for name in ("avx512-vnni", "avx2", "portable") if library.tl_choose_isa(name.encode()) == 0]
    library.tl_choose_isa(b"")
    return found


@contextmanager
def kernels_of(isa: str, num_threads: int = 2) -> Iterator[Pool]:
    """A pool whose kernels are of one instruction set."""
    if (reason := why_no_kernels()) is not None:
        pytest.skip(reason)
    assert isa != "none", "the CPU kernels were not compiled although there is a compiler: install tokenloom again"
    pool = Pool(num_threads)
    assert pool.library.tl_choose_isa(isa.encode()) == 0
    try:
        yield pool
    finally:
        pool.library.tl_choose_isa(b"")
        pool.close()


def raw_matrix(pool: Pool, form: Format, values: Floats) -> RawMatrix:
    """Values in a format, rounded as the format rounds."""
    if form in PACKED:
        return quantized(pool, values, form)
    if form is Format.BF16:
        halves = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
        return RawMatrix(form, values.shape[1], halves.view(np.uint8).reshape(values.shape[0], -1))
    return raw_floats(values)


def linear(pool: Pool, matrix: PackedMatrix, inputs: Floats) -> Floats:
    """`inputs * matrix^T`."""
    inputs = np.ascontiguousarray(inputs, np.float32)
    out = np.full((inputs.shape[0], matrix.c.num_outputs), np.nan, np.float32)
    pool.library.tl_linear(pool.handle, matrix.c, inputs.ctypes.data, inputs.shape[0], out.ctypes.data)
    return out


def batch_of(rows: Sequence[tuple[Sequence[int], int, int, Sequence[int]]], block_size: int = 16) -> Batch:
    """A step's batch from rows of (token ids, first, end, block ids); decode rows come first in it."""
    scheduled = [
        ScheduledRow(Row(i, "test", len(ids), list(ids), SamplingParams(), block_ids=list(blocks)), first, end)
        for i, (ids, first, end, blocks) in enumerate(rows)
    ]
    return build_batch(scheduled, block_size, torch.device("cpu"))


def write_tiny_gguf(path: Path, form: Format, seed: int = 0, extra: Sequence[str] = (), **shape: int) -> Path:
    """A model of the llama architecture with random weights, matrices in `form`; queries' rows in llama.cpp's order.

    Args:
        extra: names of vectors that such models do not have.
    """
    import gguf

    size = {"hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "mlp": 96, "layers": 2, "context": 1024, **shape}
    random = np.random.default_rng(seed)
    kinds = {
        Format.F32: gguf.GGMLQuantizationType.F32,
        Format.BF16: gguf.GGMLQuantizationType.BF16,
        Format.Q4_0: gguf.GGMLQuantizationType.Q4_0,
        Format.Q4_1: gguf.GGMLQuantizationType.Q4_1,
        Format.Q8_0: gguf.GGMLQuantizationType.Q8_0,
    }
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(size["layers"])
    writer.add_context_length(size["context"])
    writer.add_embedding_length(size["hidden"])
    writer.add_feed_forward_length(size["mlp"])
    writer.add_head_count(size["heads"])
    writer.add_head_count_kv(size["kv_heads"])
    writer.add_key_length(size["head_dim"])
    writer.add_value_length(size["head_dim"])
    writer.add_rope_dimension_count(size["head_dim"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB_SIZE)

    def matrix(name: str, num_outputs: int, num_inputs: int, scale: float = 0.15) -> None:
        values = random.normal(0, scale, (num_outputs, num_inputs)).astype(np.float32)
        packed = gguf.quants.quantize(values, kinds[form])
        writer.add_tensor(name, packed, raw_dtype=kinds[form])

    def norm(name: str) -> None:
        writer.add_tensor(name, random.uniform(0.8, 1.2, size["hidden"]).astype(np.float32))

    matrix("token_embd.weight", VOCAB_SIZE, size["hidden"], 0.5)
    norm("output_norm.weight")
    for name in extra:
        norm(name)
    for i in range(size["layers"]):
        all_heads, kv = size["heads"] * size["head_dim"], size["kv_heads"] * size["head_dim"]
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", all_heads, size["hidden"])
        matrix(f"blk.{i}.attn_k.weight", kv, size["hidden"])
        matrix(f"blk.{i}.attn_v.weight", kv, size["hidden"])
        matrix(f"blk.{i}.attn_output.weight", size["hidden"], all_heads)
        matrix(f"blk.{i}.ffn_gate.weight", size["mlp"], size["hidden"])
        matrix(f"blk.{i}.ffn_up.weight", size["mlp"], size["hidden"])
        matrix(f"blk.{i}.ffn_down.weight", size["hidden"], size["mlp"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
