"""The forward pass as a runner sees it, and the one that goes through transformers' own model code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tokenloom.executor.attention import AttentionBackend, PagedStep
from tokenloom.executor.batch import Batch
from tokenloom.executor.gate import ModelLayout
from tokenloom.executor.kv_cache import KVCache, LayerShape
from tokenloom.executor.model import PagedModel
from tokenloom.executor.progress import Progress


class ForwardPass(Protocol):
    """A model over the paged cache. Called from one thread."""

    @property
    def device(self) -> torch.device:
        """Where inputs are and outputs come."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values."""

    @property
    def shapes(self) -> list[LayerShape]:
        """Sizes of each layer's keys and values."""

    def hidden_states(self, batch: Batch, cache: KVCache, progress: Progress) -> Tensor:
        """The body: a step of T tokens to `[T, hidden_size]`; writes their keys and values into the cache."""

    def logits(self, hidden_states: Tensor) -> Tensor:
        """The head: `[num_rows, hidden_size]` to `[num_rows, vocab_size]`."""


@dataclass(frozen=True)
class TorchForward:
    """A transformers model with our attention. Implements `ForwardPass`."""

    model: PagedModel
    layout: ModelLayout
    backend: AttentionBackend

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self.model.device

    @property
    def kv_dtype(self) -> torch.dtype:
        """The model's."""
        return self.model.dtype

    @property
    def shapes(self) -> list[LayerShape]:
        """As the layers ask for."""
        return self.layout.shapes

    def hidden_states(self, batch: Batch, cache: KVCache, progress: Progress) -> Tensor:
        """See `ForwardPass`."""
        step = PagedStep(self.backend, cache, batch.metadata, progress)
        return self.model.hidden_states(batch.input_ids, batch.positions, step)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See `ForwardPass`."""
        return self.model.logits(hidden_states)
