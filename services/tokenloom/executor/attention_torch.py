"""Attention in plain torch: gather a row's keys and values from its blocks, then scaled_dot_product_attention.

Runs on every device and in every dtype. Decode rows of similar length are one padded batch; other rows are computed
one by one. Padding points at a row's own first slot, which is always written, and is masked: nothing that another row
left in memory can reach a result, not even as NaN times zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokenloom.executor.attention import AttentionTraits, LayerAttention, StepMetadata

_MAX_PADDING = 1.5
_FREE_PADDING = 1024
"""A padded batch may hold this factor of its real keys, and so many keys more: less than another call costs."""


class TorchAttention:
    """Gather and SDPA."""

    name = "torch"
    batch_invariant = False

    def supports(self, traits: AttentionTraits) -> tuple[bool, str]:
        """Everything that `LayerAttention` can say."""
        return True, ""

    def prepare(self, metadata: StepMetadata) -> _Gathers:
        """The slots and masks that layers with the same window share."""
        return _Gathers(metadata)

    def store(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """One indexed copy for the keys, one for the values."""
        k_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
        v_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)

    def attend(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, prepared: _Gathers, layer: LayerAttention
    ) -> Tensor:
        """Decode rows at once, the others in turn; see `AttentionBackend.attend`."""
        keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        parts = [
            _attend_rows(query[gather.tokens], keys, values, gather, layer)
            for gather in prepared.of_window(layer.sliding_window)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Gather:
    """Rows with equally many queries that are computed together.

    Args:
        tokens: their place among the step's tokens.
        slots: `[rows, num_keys]` int64, where each row's keys are.
        mask: `[rows, num_queries, num_keys]`, True where a query sees a key; None: causal from the first key on.
    """

    def __init__(self, tokens: slice, slots: Tensor, mask: Tensor | None) -> None:
        self.tokens = tokens
        self.slots = slots
        self.mask = mask


class _Gathers:
    """The gathers of a step, made on first use for each window that a layer has."""

    def __init__(self, metadata: StepMetadata) -> None:
        self._metadata = metadata
        self._by_window: dict[int | None, list[_Gather]] = {}

    def of_window(self, window: int | None) -> list[_Gather]:
        """Gathers that cover the step's tokens in order."""
        if window not in self._by_window:
            self._by_window[window] = self._make(window)
        return self._by_window[window]

    def _make(self, window: int | None) -> list[_Gather]:
        metadata = self._metadata
        gathers = [self._decode_rows(rows, window) for rows in self._similar_rows()]
        first_token = metadata.num_decode
        for row in range(metadata.num_decode, len(metadata.query_lens)):
            gathers.append(self._chunk(row, first_token, window))
            first_token += metadata.query_lens[row]
        return gathers

    def _similar_rows(self) -> list[slice]:
        """Runs of decode rows that are batched; one long context does not pad all the others to its length."""
        runs: list[slice] = []
        start = num_keys = longest = 0
        for row, seq_len in enumerate(self._metadata.seq_lens[: self._metadata.num_decode]):
            longest, num_keys = max(longest, seq_len), num_keys + seq_len
            if row > start and longest * (row + 1 - start) > _MAX_PADDING * num_keys + _FREE_PADDING:
                runs.append(slice(start, row))
                start, longest, num_keys = row, seq_len, seq_len
        if self._metadata.num_decode:
            runs.append(slice(start, self._metadata.num_decode))
        return runs

    def _decode_rows(self, rows: slice, window: int | None) -> _Gather:
        """Rows with one new token each, which are tokens `rows` as well; each sees its last `window` keys, or all."""
        metadata = self._metadata
        seq_lens = metadata.seq_lens[rows]
        num_keys = max(seq_lens) if window is None else min(max(seq_lens), window)
        lens = metadata.seqused_k[rows].long().unsqueeze(1)
        positions = (lens - num_keys).clamp_(min=0) + torch.arange(num_keys, device=lens.device)
        is_key = positions < lens
        slots = self._slots(rows, torch.where(is_key, positions, 0))
        return _Gather(rows, slots, is_key.unsqueeze(1) if min(seq_lens) < num_keys else None)

    def _chunk(self, row: int, first_token: int, window: int | None) -> _Gather:
        """One row with several new tokens; keys that no query's window reaches are left out."""
        metadata = self._metadata
        num_queries, num_keys = metadata.query_lens[row], metadata.seq_lens[row]
        first_query = num_keys - num_queries
        first_key = 0 if window is None else max(0, first_query - window + 1)
        positions = torch.arange(first_key, num_keys, device=metadata.block_table.device)
        slots = self._slots(slice(row, row + 1), positions.unsqueeze(0))
        tokens = slice(first_token, first_token + num_queries)
        if first_query == 0 and (window is None or window >= num_keys):
            return _Gather(tokens, slots, None)
        queries = torch.arange(first_query, num_keys, device=positions.device).unsqueeze(1)
        mask = positions <= queries
        if window is not None:
            mask &= positions > queries - window
        return _Gather(tokens, slots, mask.unsqueeze(0))

    def _slots(self, rows: slice, positions: Tensor) -> Tensor:
        block_size = self._metadata.block_size
        blocks = self._metadata.block_table[rows].gather(1, positions // block_size)
        return blocks.long() * block_size + positions % block_size


def _attend_rows(query: Tensor, keys: Tensor, values: Tensor, gather: _Gather, layer: LayerAttention) -> Tensor:
    """Attention of one gather.

    Args:
        query: `[rows * num_queries, num_heads, head_dim]`.
        keys: `[num_slots, num_kv_heads, head_dim]`; values likewise.
    """
    rows, num_keys = gather.slots.shape
    num_kv_heads = keys.shape[1]
    num_queries, group = query.shape[0] // rows, query.shape[1] // num_kv_heads
    flat = gather.slots.flatten()
    # [rows, num_kv_heads, num_keys, head_dim]; the heads of a group share them without a copy.
    k = keys.index_select(0, flat).view(rows, num_keys, num_kv_heads, -1).transpose(1, 2)
    v = values.index_select(0, flat).view(rows, num_keys, num_kv_heads, -1).transpose(1, 2)
    if layer.softcap is not None or layer.sinks is not None:
        return _attend_by_hand(query, k, v, gather.mask, layer)
    if num_queries == 1:
        q = query.view(rows, num_kv_heads, group, -1)
        mask = None if gather.mask is None else gather.mask.unsqueeze(1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
        return out.reshape(rows, num_kv_heads * group, -1)
    # One row: its KV heads take the batch's place and the heads of a group share keys by a stride of zero.
    q = query.view(num_queries, num_kv_heads, group, -1).permute(1, 2, 0, 3)
    k = k[0].unsqueeze(1).expand(-1, group, -1, -1)
    v = v[0].unsqueeze(1).expand(-1, group, -1, -1)
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=gather.mask, is_causal=gather.mask is None, scale=layer.scale
    )
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_kv_heads * group, -1)


def _attend_by_hand(query: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: LayerAttention) -> Tensor:
    """What SDPA cannot do: soft-capped scores and attention sinks, with the softmax in fp32.

    Source: Gemma 2 report, section 2 (soft-capping); GPT-OSS model card and its `eager_attention_forward` (sinks).
    """
    rows, num_kv_heads, num_keys, _ = k.shape
    num_queries, group = query.shape[0] // rows, query.shape[1] // num_kv_heads
    q = query.view(rows, num_queries, num_kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    scores = (q @ k.unsqueeze(2).transpose(-1, -2)).float() * layer.scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is None and num_queries > 1:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=k.device).tril().unsqueeze(0)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(1).unsqueeze(1), float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(1, num_kv_heads, group, 1, 1).expand(rows, -1, -1, num_queries, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys].to(v.dtype)
    out = weights @ v.unsqueeze(2)
    return out.permute(0, 3, 1, 2, 4).reshape(rows * num_queries, num_kv_heads * group, -1)
