"""What an executor can do, learned once from its model and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom.common.errors import SetupError
from tokenloom.executor.plan import SamplingParams
from tokenloom.executor.row_checks import Limits


@dataclass(frozen=True)
class Capabilities:
    """GetCapabilitiesResponse as plain data; executor.proto has the meaning of each field."""

    model_id: str
    tokenizer_fingerprint: str
    limits: Limits
    max_num_blocks: int
    block_bytes: int
    batch_invariant: bool
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    description: str


def eos_token_ids(causal_lm: Any) -> tuple[int, ...]:
    """End-of-sequence tokens of the generation config, else of the model's config, in rising order."""
    for config in (causal_lm.generation_config, causal_lm.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(sorted({int(i) for i in (found if isinstance(found, Sequence) else [found])}))
    return ()


def default_sampling(causal_lm: Any) -> SamplingParams:
    """Sampling parameters that the model's generation config sets; what it leaves open is neutral."""
    chosen = causal_lm.generation_config.to_diff_dict() if causal_lm.generation_config is not None else {}
    neutral = SamplingParams()
    return SamplingParams(
        temperature=float(_or(chosen.get("temperature"), neutral.temperature)),
        top_p=float(_or(chosen.get("top_p"), neutral.top_p)),
        top_k=int(_or(chosen.get("top_k"), neutral.top_k)),
        min_p=float(_or(chosen.get("min_p"), neutral.min_p)),
        repetition_penalty=float(_or(chosen.get("repetition_penalty"), neutral.repetition_penalty)),
    )


def own_model_len(causal_lm: Any) -> int | None:
    """The longest sequence that the model's config allows, in tokens; None if it does not say."""
    own = getattr(causal_lm.config.get_text_config(), "max_position_embeddings", None)
    return None if own is None else int(own)


def model_len(own: int | None, wanted: int) -> int:
    """The longest sequence to serve: `wanted` tokens, or the model's own limit for 0.

    Raises: SetupError if the model cannot go so far.
    """
    if not own:
        if not wanted:
            raise SetupError("the model's config does not say how long sequences may be; set --max-model-len")
        return wanted
    if wanted > own:
        raise SetupError(f"--max-model-len {wanted} is more than the model's own limit of {own} tokens")
    return wanted or own


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
