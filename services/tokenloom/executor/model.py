"""A transformers causal LM behind the few calls that the executor makes.

The body (token ids to hidden states) and the head (hidden states to logits) are called apart, so that logits exist
only for rows that need them. The head is not just the `lm_head` matrix: some families cap or scale their logits after
it. So the model's own forward computes it, on a shallow copy whose body hands back given hidden states.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tokenloom.executor.attention import ATTENTION_NAME, Step, register_paged_attention


class PagedModel:
    """A causal LM whose attention goes through `paged_attention`.

    Args:
        causal_lm: a transformers `PreTrainedModel` with a language model head, in evaluation mode. Its attention
            implementation is changed.

    Raises: ValueError if transformers cannot change it.
    """

    def __init__(self, causal_lm: Any) -> None:
        register_paged_attention()
        causal_lm.set_attn_implementation(ATTENTION_NAME)
        self.causal_lm = causal_lm
        self.config = causal_lm.config.get_text_config()
        self._body = getattr(causal_lm, causal_lm.base_model_prefix)
        self._given = _GivenHiddenStates()
        self._head = copy.copy(causal_lm)
        self._head._modules = {**causal_lm._modules, causal_lm.base_model_prefix: self._given}

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.causal_lm.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of keys and values."""
        return self.causal_lm.dtype  # type: ignore[no-any-return]

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self.config.vocab_size)

    def hidden_states(self, input_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """The body: `[1, T]` ids and positions to `[T, hidden_size]`."""
        output = self._body(input_ids=input_ids, position_ids=positions, use_cache=False, paged=step)
        return output[0][0]  # type: ignore[no-any-return]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """The head: `[num_rows, hidden_size]` to `[num_rows, vocab_size]`."""
        self._given.hidden_states = hidden_states.unsqueeze(0)
        output = self._head(input_ids=None, use_cache=False)
        self._given.hidden_states = None
        return output.logits[0]  # type: ignore[no-any-return]

    def plain_logits(self, input_ids: Tensor, implementation: str) -> Tensor:
        """What the model gives by itself, without our attention: `[1, T]` ids to `[T, vocab_size]`.

        Args:
            implementation: transformers' `sdpa` or `eager`.
        """
        self.causal_lm.set_attn_implementation(implementation)
        try:
            return self.causal_lm(input_ids=input_ids, use_cache=False).logits[0]  # type: ignore[no-any-return]
        finally:
            self.causal_lm.set_attn_implementation(ATTENTION_NAME)


class _GivenHiddenStates(nn.Module):
    """Stands in for a model's body and returns what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_states: Tensor | None = None

    @property
    def decoder(self) -> _GivenHiddenStates:
        """OPT's head calls `model.decoder`."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        """The hidden states in the form of a model output."""
        assert self.hidden_states is not None
        return _GivenOutput(self.hidden_states)


class _GivenOutput:
    """A model output that holds hidden states; whatever else a head looks for (attentions, router logits) is None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]
