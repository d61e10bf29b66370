"""The load gate: which models run over the paged cache, proven before the first request.

Many models would run and be wrong in silence: some never call the registered attention function (Bloom, Falcon, MPT,
GPT-Neo), some keep state elsewhere (Mamba, linear attention), some compute with the whole batch's positions (rope
types dynamic and longrope). So a model passes static checks, one pass that records what each layer asks for, and a
numeric probe: the same tokens plainly and in two chunks over scattered blocks have to give the same distributions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tokenloom.executor.attention import (
    AttentionBackend,
    AttentionTraits,
    LayerAttention,
    PagedStep,
    UnsupportedAttention,
)
from tokenloom.executor.batch import build_batch
from tokenloom.executor.kv_cache import KVCache, LayerShape
from tokenloom.executor.model import PagedModel
from tokenloom.executor.plan import SamplingParams
from tokenloom.executor.rows import Row, ScheduledRow

PROBE_TOKENS = 24
PROBE_CHUNK = 11
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_MAX_KL = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}


class ModelRefused(Exception):
    """The model cannot be served over the paged cache; the message says why."""


@dataclass(frozen=True)
class ModelLayout:
    """What the recording pass saw, by layer."""

    shapes: list[LayerShape]
    layers: list[LayerAttention]
    has_sinks: bool

    def traits(self, model: PagedModel, block_size: int) -> AttentionTraits:
        """What the layers ask of a backend."""
        return AttentionTraits(
            device_type=model.device.type,
            dtype=model.dtype,
            head_dims=frozenset((shape.key_dim, shape.value_dim) for shape in self.shapes),
            block_size=block_size,
            has_sliding_window=any(layer.sliding_window is not None for layer in self.layers),
            has_softcap=any(layer.softcap is not None for layer in self.layers),
            has_sinks=self.has_sinks,
        )


def check_architecture(causal_lm: Any) -> None:
    """The static checks, before anything runs.

    Raises: ModelRefused.
    """
    name = type(causal_lm).__name__
    config = causal_lm.config.get_text_config()
    if getattr(causal_lm, "_is_stateful", False):
        raise ModelRefused(f"{name} keeps a recurrent state that is not in the KV cache")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{name} is an encoder-decoder model")
    if not getattr(causal_lm, "_supports_attention_backend", False):
        raise ModelRefused(f"{name} does not call transformers' attention interface")
    if unknown := set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES:
        raise ModelRefused(f"{name} has layers of type {', '.join(sorted(unknown))}")
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _BATCH_DEPENDENT_ROPE:
            raise ModelRefused(f"{name} uses rope type {rope_type}, whose angles depend on the whole batch")


def record_layout(model: PagedModel) -> ModelLayout:
    """Run two tokens and record what every layer hands to attention.

    Raises: ModelRefused unless each layer calls it exactly once, with its own place in the cache.
    """
    recorder = _Recorder()
    ids = torch.arange(2, device=model.device).unsqueeze(0)
    try:
        with torch.inference_mode():
            model.hidden_states(ids, ids, recorder)
    except (UnsupportedAttention, TypeError, AttributeError) as error:
        raise ModelRefused(f"{type(model.causal_lm).__name__}: {error}") from error
    num_layers = int(model.config.num_hidden_layers)
    indices = [layer.index for layer in recorder.layers]
    if sorted(indices) != list(range(num_layers)):
        raise ModelRefused(
            f"{type(model.causal_lm).__name__} has {num_layers} layers and attention was called for layers {indices}"
        )
    order = sorted(range(num_layers), key=indices.__getitem__)
    return ModelLayout(
        shapes=[recorder.shapes[i] for i in order],
        layers=[recorder.layers[i] for i in order],
        has_sinks=any(layer.sinks is not None for layer in recorder.layers),
    )


def probe(model: PagedModel, backend: AttentionBackend, layout: ModelLayout, block_size: int) -> float:
    """Compare the paged path with the model's own on the same tokens.

    Returns: the mean KL divergence over positions, in nats.

    Raises: ModelRefused if it is above what the dtype's rounding explains.
    """
    ids = [(7 + 31 * i * i) % model.vocab_size for i in range(PROBE_TOKENS)]
    # SDPA knows neither soft-capping nor sinks.
    by_hand = layout.has_sinks or any(layer.softcap is not None for layer in layout.layers)
    try:
        with torch.inference_mode():
            plain = model.plain_logits(torch.tensor([ids], device=model.device), "eager" if by_hand else "sdpa")
            paged = _paged_logits(model, backend, layout, ids, block_size)
    except (UnsupportedAttention, TypeError, AttributeError, RuntimeError) as error:
        raise ModelRefused(f"{type(model.causal_lm).__name__} does not run over the paged cache: {error}") from error
    log_plain, log_paged = (torch.log_softmax(logits.double(), dim=-1) for logits in (plain, paged))
    divergence = float((log_plain.exp() * (log_plain - log_paged)).sum(dim=-1).mean())
    limit = _MAX_KL[model.dtype]
    if not divergence <= limit:
        raise ModelRefused(
            f"{type(model.causal_lm).__name__} gives other results over the paged cache than by itself "
            f"(mean KL {divergence:.3g}, at most {limit:g})"
        )
    return divergence


def _paged_logits(
    model: PagedModel, backend: AttentionBackend, layout: ModelLayout, ids: list[int], block_size: int
) -> Tensor:
    """Logits of all positions, computed in two chunks over blocks in falling order."""
    num_blocks = -(-len(ids) // block_size)
    cache = KVCache(layout.shapes, num_blocks + 1, block_size, model.dtype, model.device)
    row = Row(0, "probe", len(ids), ids, SamplingParams(), block_ids=list(range(num_blocks, 0, -1)))
    parts = []
    for first, end in ((0, PROBE_CHUNK), (PROBE_CHUNK, len(ids))):
        batch = build_batch([ScheduledRow(row, first, end)], block_size, model.device)
        step = PagedStep(backend, cache, batch.metadata)
        parts.append(model.logits(model.hidden_states(batch.input_ids, batch.positions, step)))
    return torch.cat(parts)


def _rope_types(parameters: Any) -> Iterator[str]:
    """Rope types of a config's `rope_parameters`, which may be nested by layer type."""
    if not isinstance(parameters, dict):
        return
    yield str(parameters.get("rope_type", "default"))
    for value in parameters.values():
        yield from _rope_types(value)


class _Recorder:
    """A step that attends within itself and notes what layers ask for."""

    def __init__(self) -> None:
        self.shapes: list[LayerShape] = []
        self.layers: list[LayerAttention] = []

    def run(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        """Plain causal attention over `[T, heads, head_dim]`."""
        self.shapes.append(LayerShape(key.shape[1], key.shape[2], value.shape[2]))
        self.layers.append(layer)
        group = query.shape[1] // key.shape[1]
        k, v = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (key, value))
        out = functional.scaled_dot_product_attention(query.transpose(0, 1), k, v, is_causal=True, scale=layer.scale)
        return out.transpose(0, 1)
