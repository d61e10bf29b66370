"""Models of the Llama shape over the kernels: RMS norms, rope, grouped attention, gated SiLU.

Stands where `PagedModel` stands, for one runner at a time. It imports no transformers, so a start costs the reading of
the weights. KV memory is the runner's own, used in the kernels' layout: per block and head keys as
`[head_dim, block_size]`, values as `[block_size, head_dim]`.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenloom.executor.batch import Batch
from tokenloom.executor.kv_cache import KVCache, LayerShape
from tokenloom.executor.native.library import GROUP, Cache, Layer, Model, Pool, Step
from tokenloom.executor.native.weights import Floats, PackedMatrix, UnsupportedWeights, WeightSource, layer_name
from tokenloom.executor.progress import Progress


@dataclass(frozen=True)
class LlamaShape:
    """Sizes and constants.

    Args:
        inv_freq: `[head_dim / 2]`, rope's angle per position.
        rope_scale: factor on cosine and sine.
        sliding_windows: per layer, keys that a query sees, itself included; 0: all.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    inv_freq: Floats
    rope_scale: float
    sliding_windows: tuple[int, ...]

    def check(self) -> None:
        """Raise UnsupportedWeights if the kernels are not made for such sizes."""
        for name in ("hidden_size", "head_dim", "intermediate_size"):
            if getattr(self, name) % GROUP:
                raise UnsupportedWeights(f"{name} {getattr(self, name)} is not a multiple of {GROUP}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedWeights(f"{self.num_heads} heads are not shared evenly by {self.num_kv_heads}")


class NativeLlama:
    """A model of the Llama shape. Implements `ForwardPass`.

    Args:
        pool: the kernels' threads; its owner closes it after the last call.
        kv_dtype: of keys and values, bfloat16 or float32.

    Raises: UnsupportedWeights.
    """

    def __init__(self, pool: Pool, shape: LlamaShape, source: WeightSource, kv_dtype: torch.dtype) -> None:
        shape.check()
        self.shape = shape
        self.kv_dtype = kv_dtype
        self.device = torch.device("cpu")
        self.vocab_size = shape.vocab_size
        self._pool = pool
        self._vectors: list[Floats] = []
        self._matrices: list[PackedMatrix] = []
        self._layers = (Layer * shape.num_layers)(*(self._layer(source, i) for i in range(shape.num_layers)))
        self._model = self._whole(source)
        self._cache: tuple[KVCache, Cache, list[object]] | None = None

    @property
    def num_weight_bytes(self) -> int:
        """Memory of all matrices."""
        return sum(matrix.num_bytes for matrix in self._matrices)

    @property
    def weights_name(self) -> str:
        """For people: the formats of the matrices, the most common first."""
        formats = Counter(matrix.format.name for matrix in self._matrices)
        return "+".join(name.lower() for name, _ in formats.most_common())

    @property
    def shapes(self) -> list[LayerShape]:
        """Keys and values of each layer."""
        one = LayerShape(self.shape.num_kv_heads, self.shape.head_dim, self.shape.head_dim)
        return [one] * self.shape.num_layers

    def hidden_states(self, batch: Batch, cache: KVCache, progress: Progress) -> Tensor:
        """The body: a step of T tokens to `[T, hidden_size]`, after the final norm.

        Raises: MemoryError.
        """
        metadata = batch.metadata
        num_tokens = batch.input_ids.shape[1]
        ids = batch.input_ids[0].to(torch.int32)
        hidden = torch.empty((num_tokens, self.shape.hidden_size))
        one = Step(
            num_tokens,
            len(metadata.query_lens),
            ids.data_ptr(),
            metadata.cu_seqlens_q.data_ptr(),
            metadata.seqused_k.data_ptr(),
            metadata.block_table.data_ptr(),
            metadata.block_table.shape[1],
        )
        failed = self._pool.library.tl_hidden_states(
            self._pool.handle,
            self._model,
            self._cache_of(cache),
            one,
            hidden.data_ptr(),
            ctypes.byref(progress.counter),
        )
        if failed:
            raise MemoryError(f"no memory for a step of {num_tokens} tokens")
        return hidden

    def logits(self, hidden_states: Tensor) -> Tensor:
        """The head: `[num_rows, hidden_size]` to `[num_rows, vocab_size]`."""
        hidden = hidden_states.contiguous()
        logits = torch.empty((hidden.shape[0], self.vocab_size))
        self._pool.library.tl_logits(
            self._pool.handle, self._model, hidden.data_ptr(), hidden.shape[0], logits.data_ptr()
        )
        return logits

    def _cache_of(self, cache: KVCache) -> Cache:
        """The cache as the kernels see it; made once per layout of the memory."""
        if self._cache is None or self._cache[0] is not cache:
            keys = (ctypes.c_void_p * len(cache.layers))(*(k.data_ptr() for k, _ in cache.layers))
            values = (ctypes.c_void_p * len(cache.layers))(*(v.data_ptr() for _, v in cache.layers))
            one = Cache(keys, values, int(self.kv_dtype is torch.bfloat16), cache.block_size)
            self._cache = (cache, one, [keys, values])
        return self._cache[1]

    def _whole(self, source: WeightSource) -> Model:
        shape = self.shape
        embedding = self._packed(source, "embedding")
        is_tied = source.vector("is_tied") is not None
        head = embedding if is_tied else self._packed(source, "head")
        return Model(
            shape.num_layers,
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.intermediate_size,
            shape.norm_eps,
            self._layers,
            embedding.c,
            head.c,
            self._vector(source, "final_norm"),
            self._kept(shape.inv_freq),
            shape.rope_scale,
        )

    def _layer(self, source: WeightSource, index: int) -> Layer:
        def name(part: str) -> str:
            return layer_name(index, part)

        biases = [source.vector(name(f"{part}_bias")) for part in "qkv"]
        has_bias = any(bias is not None for bias in biases)
        bias = np.concatenate([b for b in biases if b is not None]) if has_bias else None
        gate_up = PackedMatrix(self._pool, [source.matrix(name("gate")), source.matrix(name("up"))], interleaved=True)
        self._matrices.append(gate_up)
        return Layer(
            self._packed(source, *(name(part) for part in "qkv"), bias=bias).c,
            self._packed(source, name("o"), bias=source.vector(name("o_bias"))).c,
            gate_up.c,
            self._packed(source, name("down")).c,
            self._vector(source, name("attention_norm")),
            self._vector(source, name("mlp_norm")),
            self._vector(source, name("q_norm"), is_optional=True),
            self._vector(source, name("k_norm"), is_optional=True),
            self.shape.sliding_windows[index],
            self.shape.head_dim**-0.5,
        )

    def _packed(self, source: WeightSource, *names: str, bias: Floats | None = None) -> PackedMatrix:
        matrix = PackedMatrix(self._pool, [source.matrix(name) for name in names], bias)
        self._matrices.append(matrix)
        return matrix

    def _vector(self, source: WeightSource, name: str, *, is_optional: bool = False) -> int | None:
        values = source.vector(name)
        if values is None and not is_optional:
            raise UnsupportedWeights(f"the model has no {name}")
        return None if values is None else self._kept(values)

    def _kept(self, values: Floats) -> int:
        """Keep a vector alive as long as this model; returns its address."""
        self._vectors.append(np.ascontiguousarray(values, np.float32))
        return int(self._vectors[-1].ctypes.data)
