"""What the scheduler knows of its executor, and what both make of their limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.core.config import SchedulerConfig, SchedulingPolicy


@dataclass(frozen=True)
class Capabilities:
    """An executor's answer to GetCapabilities; see executor.proto for the fields.

    Args:
        default_sampling: the model's own sampling defaults; passed through to tokenizers.
    """

    boot_id: str
    model_id: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    max_num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_plans_in_flight: int
    max_num_logprobs: int
    batch_invariant: bool
    eos_token_ids: Sequence[int]
    default_sampling: Any
    description: str

    def serves_same_model_as(self, other: Capabilities) -> bool:
        """Requests begun on `other` can go on here."""
        mine = (self.model_id, self.tokenizer_fingerprint, self.vocab_size, self.block_size, self.max_model_len)
        return mine == (
            other.model_id,
            other.tokenizer_fingerprint,
            other.vocab_size,
            other.block_size,
            other.max_model_len,
        )

    def num_blocks(self, settings: SchedulerSettings) -> int:
        """KV blocks to lay out."""
        return min(self.max_num_blocks, settings.num_blocks or self.max_num_blocks)

    def scheduler_config(self, settings: SchedulerSettings) -> SchedulerConfig:
        """The core's limits: the lower of what was set and what the executor can. A row needs a token of the budget."""
        max_num_batched_tokens = min(settings.max_num_batched_tokens, self.max_num_batched_tokens)
        return SchedulerConfig(
            max_num_seqs=min(settings.max_num_seqs, self.max_num_seqs, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_waiting=settings.max_num_waiting,
            max_num_waiting_tokens=settings.max_num_waiting_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            policy=SchedulingPolicy(settings.scheduling_policy),
            num_priority_classes=settings.num_priority_classes,
            ageing_s=settings.ageing_s,
            prompt_token_charge=settings.prompt_token_charge,
            output_token_charge=settings.output_token_charge,
        )
