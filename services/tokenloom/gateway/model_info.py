"""A model as the gateway's callers see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelInfo:
    """A model that a tokenizer serves.

    Args:
        id: the name that requests use.
        created_s: since when it is served, seconds since the epoch.
        max_model_len: longest sequence, in tokens.
    """

    id: str
    created_s: int
    max_model_len: int

    def body(self) -> dict[str, Any]:
        """OpenAI's `model` object, with vLLM's max_model_len."""
        return {
            "id": self.id,
            "object": "model",
            "created": self.created_s,
            "owned_by": "tokenloom",
            "max_model_len": self.max_model_len,
        }
