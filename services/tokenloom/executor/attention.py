"""Attention over a paged KV cache: the interface of its backends and the one function that transformers' models call.

Theory of operation. A step's tokens, of all rows, are one flattened sequence of `num_tokens`; rows that compute a
single token (decode) come first. Each layer calls `paged_attention` with its new keys and values. These are stored at
their slots (`block_id * block_size + offset`), then every row's queries look at the keys of its own block table, the
new ones included: causal and aligned to the bottom right, so that a row's last query sees all its keys.

Block 0 is never in a row's table; kernels that pad use it as the place to write what nobody reads. Memory that no row
has written may hold anything, NaN included, and must not reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenloom.executor.kv_cache import KVCache
from tokenloom.executor.progress import Progress

ATTENTION_NAME = "tokenloom"
"""Under this name transformers knows `paged_attention`."""


@dataclass(frozen=True)
class AttentionTraits:
    """What a model's layers ask of a backend."""

    device_type: str
    dtype: torch.dtype
    head_dims: frozenset[tuple[int, int]]
    """(query and key, value) sizes of a head."""
    block_size: int
    has_sliding_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False


@dataclass(frozen=True)
class StepMetadata:
    """Which tokens belong to which row and where their keys and values are; B rows, T tokens.

    Tensors are int32 on the model's device unless said otherwise; lists are the same numbers on the host.

    Args:
        cu_seqlens_q: `[B + 1]`, first token of each row, and T.
        seqused_k: `[B]`, keys of each row, the new ones included.
        cu_seqlens_k: `[B + 1]`, running sum of `seqused_k`.
        block_table: `[B, max_blocks]`, padded with block 0.
        slot_mapping: `[T]` int64, where each token's key and value go.
        query_lens: new tokens of each row; the first `num_decode` are 1.
        seq_lens: `seqused_k` on the host.
        num_decode: rows with one new token; they come first.
        block_size: tokens per block.
    """

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    cu_seqlens_k: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    query_lens: list[int]
    seq_lens: list[int]
    num_decode: int
    block_size: int

    @property
    def max_q(self) -> int:
        """Most new tokens of a row."""
        return max(self.query_lens)

    @property
    def max_k(self) -> int:
        """Most keys of a row."""
        return max(self.seq_lens)


@dataclass(frozen=True)
class LayerAttention:
    """How one layer attends.

    Args:
        index: the layer's place in the KV cache.
        scale: factor on the scores.
        sliding_window: a query sees this many keys, itself included; None: all.
        softcap: scores become `softcap * tanh(score / softcap)`; None: as they are.
        sinks: `[num_heads]`, a logit per head that takes part in the softmax and gives nothing (GPT-OSS); None: none.
    """

    index: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """A way to compute attention over the paged cache."""

    name: str
    batch_invariant: bool
    """A row's output is bitwise the same in every batch and chunking."""

    def supports(self, traits: AttentionTraits) -> tuple[bool, str]:
        """Whether this backend can serve a model, and why not."""

    def prepare(self, metadata: StepMetadata) -> Any:
        """Compute once per step what all layers share; the result goes to every `attend` of the step."""

    def store(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write the step's keys and values, `[T, num_kv_heads, head_dim]` each, into a layer's cache."""

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, prepared: Any, layer: LayerAttention) -> Tensor:
        """Attend; every key is stored already.

        Args:
            query: `[T, num_heads, head_dim]`.
            k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`; v_cache likewise.
            prepared: what `prepare` returned.
            layer: scale, window and the like.

        Returns: `[T, num_heads, head_dim of the values]`.
        """


class PagedStep:
    """One step's attention; models hand it through to every layer as the keyword argument `paged`.

    Args:
        progress: advanced with every layer; None: nobody looks.
    """

    def __init__(
        self, backend: AttentionBackend, cache: KVCache, metadata: StepMetadata, progress: Progress | None = None
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._progress = progress or Progress()
        self._slot_mapping = metadata.slot_mapping
        self._prepared = backend.prepare(metadata)

    def run(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        """Store one layer's keys and values and attend; shapes as in `AttentionBackend`."""
        k_cache, v_cache = self._cache.layers[layer.index]
        self._progress.advance()
        self._backend.store(key, value, k_cache, v_cache, self._slot_mapping)
        return self._backend.attend(query, k_cache, v_cache, self._prepared, layer)


class Step(Protocol):
    """What `paged_attention` hands a layer's tensors to: `PagedStep`, or the load gate's recorder."""

    def run(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        """As `PagedStep.run`."""


class UnsupportedAttention(Exception):
    """A model asks for something that paged attention does not do; the load gate makes a refusal of it."""


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged: Step | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention layers call under the name ATTENTION_NAME.

    Args:
        module: the layer; its `layer_idx` is its place in the KV cache.
        query: `[1, num_heads, T, head_dim]`; key and value likewise with num_kv_heads.
        attention_mask: None, since causality follows from the metadata.
        paged: this step, as given to the model's forward.
        others: what transformers passes to every attention function; None of it may change the result.

    Returns: `[1, T, num_heads, head_dim]` and None.

    Raises: UnsupportedAttention if the layer asks for what would silently be left out.

    Source: transformers' AttentionInterface (docs, "Attention Interface").
    """
    if paged is None:
        raise UnsupportedAttention("a layer did not hand on the keyword arguments of the model's forward")
    if attention_mask is not None:
        raise UnsupportedAttention("a layer brings an attention mask of its own")
    if others.get("position_bias") is not None:
        raise UnsupportedAttention("a layer adds a position bias to the scores")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedAttention("a layer attends to later tokens")
    layer = LayerAttention(
        index=int(module.layer_idx),  # type: ignore[arg-type]
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    out = paged.run(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), layer)
    return out.unsqueeze(0), None


def register_paged_attention() -> None:
    """Make `paged_attention` known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
