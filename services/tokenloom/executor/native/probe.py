"""The numeric probe of the fast path: does it say what transformers says with the same weights, unpacked?

The rows and steps are those of the other probe. Weights in 4 or 8 bits are the model's own. What differs are keys and
values in bf16, and transformers' weights, which were rounded to bf16 when they were unpacked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenloom.executor.batch import Batch
from tokenloom.executor.forward import ForwardPass
from tokenloom.executor.probe import paged_logits, probe_rows, unwritten_cache
from tokenloom.executor.progress import Progress

MAX_MEAN_KL = 3e-3
MAX_KL = 3e-2
"""In nats; the rounding alone gives 1.4e-4 and 1e-3 for the embedded model."""


def probe_divergence(forward: ForwardPass, causal_lm: Any, block_size: int) -> tuple[float, float]:
    """Compare with a transformers model in fp32 that has the same weights.

    Returns: the KL divergence in nats, the mean over all positions and the worst; infinite if one is not a number.
    """
    rows = probe_rows(int(causal_lm.config.get_text_config().vocab_size))
    cache = unwritten_cache(forward.shapes, block_size, forward.kv_dtype, forward.device)

    def run(batch: Batch) -> Tensor:
        return forward.logits(forward.hidden_states(batch, cache, Progress()))

    with torch.inference_mode():
        plain = torch.cat([causal_lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in rows])
        paged = torch.cat(paged_logits(run, rows, block_size, forward.device))
        log_plain, log_paged = (torch.log_softmax(logits.double(), dim=-1) for logits in (plain, paged))
        divergences = (log_plain.exp() * (log_plain - log_paged)).sum(dim=-1).nan_to_num(nan=torch.inf)
    return float(divergences.mean()), float(divergences.max())
