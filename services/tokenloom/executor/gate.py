"""The load gate: which models run over the paged cache, proven before the first request.

Many models would run and be wrong in silence: some never call the registered attention function (Bloom, Falcon, MPT,
GPT-Neo), some keep state elsewhere (Mamba, linear attention), some compute with the whole batch's positions (rope
types dynamic and longrope). So a model passes static checks, one pass that records what each layer asks for, and a
numeric probe (probe.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tokenloom.executor.attention import AttentionTraits, LayerAttention, UnsupportedAttention
from tokenloom.executor.kv_cache import LayerShape
from tokenloom.executor.model import PagedModel

_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


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
