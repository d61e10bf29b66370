"""The numeric probe: does a model say over the paged cache what it says by itself?

Two rows of different lengths run as a scheduler would run them: prompts in chunks, one row that decodes beside another
that is still in its prompt, then both decoding. Blocks of the two are mixed and in falling order; memory that no row
has written is NaN. Sliding windows are narrowed on both sides, so that they leave keys out within so few tokens. Every
position has to give the distribution that the model gives by itself: one that is wrong is not averaged away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tokenloom.executor.attention import AttentionBackend, LayerAttention, PagedStep, Step, UnsupportedAttention
from tokenloom.executor.batch import Batch, build_batch
from tokenloom.executor.gate import ModelLayout, ModelRefused
from tokenloom.executor.kv_cache import KVCache, LayerShape
from tokenloom.executor.model import PagedModel
from tokenloom.executor.plan import SamplingParams
from tokenloom.executor.rows import Row, ScheduledRow

PROBE_WINDOW = 8
"""Sliding windows are at most so wide in the probe."""
_NUM_TOKENS = (24, 16)
_STEP_ENDS = ((11, 13), (22, 14), (23, 15), (24, 16))
"""Where each step leaves the two rows: two chunks, a chunk beside a decode row, then two decode rows."""
_MAX_KL = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Rounding alone gives 4e-11 in fp32 and 6e-3 in bf16 at the worst position of a model with 30 layers; transformers'
own two ways to attend differ from each other as much."""


class ModelDiverges(ModelRefused):
    """The model gives other results over the paged cache; it would again."""


def probe(model: PagedModel, backend: AttentionBackend, layout: ModelLayout, block_size: int) -> float:
    """Compare the paged path with the model's own on the same tokens.

    Returns: the KL divergence of the worst position, in nats.

    Raises: ModelDiverges if it is above what the dtype's rounding explains, ModelRefused if the model cannot run over
        the paged cache, or cannot now (memory may be short).
    """
    name = type(model.causal_lm).__name__
    rows = probe_rows(model.vocab_size)
    # SDPA knows neither soft-capping nor sinks.
    by_hand = layout.has_sinks or any(layer.softcap is not None for layer in layout.layers)
    implementation = "eager" if by_hand else "sdpa"
    try:
        with torch.inference_mode(), _narrow_windows(model) as window:
            plain = [model.plain_logits(torch.tensor([ids], device=model.device), implementation) for ids in rows]
            cache = unwritten_cache(layout.shapes, block_size, model.dtype, model.device)

            def run(batch: Batch) -> Tensor:
                step = _NarrowedStep(PagedStep(backend, cache, batch.metadata), window)
                return model.logits(model.hidden_states(batch.input_ids, batch.positions, step))

            paged = paged_logits(run, rows, block_size, model.device)
    except (UnsupportedAttention, TypeError, AttributeError, RuntimeError) as error:
        raise ModelRefused(f"{name} does not run over the paged cache: {error}") from error
    divergence = worst_divergence(torch.cat(plain), torch.cat(paged))
    limit = _MAX_KL[model.dtype]
    if not divergence <= limit:
        raise ModelDiverges(
            f"{name} gives other results over the paged cache than by itself (KL {divergence:.3g}, at most {limit:g})"
        )
    return divergence


def worst_divergence(plain: Tensor, paged: Tensor) -> float:
    """Largest KL divergence of a position, in nats; infinite if one is not a number. Logits `[T, vocab_size]` each."""
    log_plain, log_paged = (torch.log_softmax(logits.double(), dim=-1) for logits in (plain, paged))
    divergences = (log_plain.exp() * (log_plain - log_paged)).sum(dim=-1)
    return float(divergences.nan_to_num(nan=math.inf).max())


@contextmanager
def _narrow_windows(model: PagedModel) -> Iterator[int | None]:
    """Let the model's own masks use a narrow window; gives its width, None if the model has no window."""
    own = getattr(model.config, "sliding_window", None)
    if not isinstance(own, int):
        yield None
        return
    model.config.sliding_window = min(own, PROBE_WINDOW)
    try:
        yield model.config.sliding_window
    finally:
        model.config.sliding_window = own


class _NarrowedStep:
    """A step whose layers' windows are at most so wide; None: as they are."""

    def __init__(self, step: Step, window: int | None) -> None:
        self._step = step
        self._window = window

    def run(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        """As `PagedStep.run`."""
        if self._window is not None and layer.sliding_window is not None:
            layer = replace(layer, sliding_window=min(layer.sliding_window, self._window))
        return self._step.run(query, key, value, layer)


def probe_rows(vocab_size: int) -> list[list[int]]:
    """The token ids of the probe's two rows."""
    return [[(7 + 11 * k + 31 * i * i) % vocab_size for i in range(num)] for k, num in enumerate(_NUM_TOKENS)]


def paged_logits(
    run: Callable[[Batch], Tensor], token_ids: list[list[int]], block_size: int, device: torch.device
) -> list[Tensor]:
    """Logits of all positions, `[num_tokens, vocab_size]` for each row, over the steps of `_STEP_ENDS`.

    Args:
        run: a step over a cache of `num_probe_blocks` blocks; gives the logits of all its tokens.
    """
    num_blocks = num_probe_blocks(block_size)
    rows = [
        Row(k, "probe", len(ids), ids, SamplingParams(), block_ids=list(range(num_blocks - 1 - k, 0, -2)))
        for k, ids in enumerate(token_ids)
    ]
    parts: list[list[Tensor]] = [[], []]
    starts: tuple[int, ...] = (0, 0)
    for ends in _STEP_ENDS:
        scheduled = [ScheduledRow(row, first, end) for row, first, end in zip(rows, starts, ends, strict=True)]
        batch = build_batch(scheduled, block_size, device)
        logits = run(batch)
        for first_token, s in zip(batch.first_tokens, batch.rows, strict=True):
            parts[s.row.row_id].append(logits[first_token : first_token + s.num_tokens])
        starts = ends
    return [torch.cat(of_row) for of_row in parts]


def num_probe_blocks(block_size: int) -> int:
    """Blocks that the probe's rows take, and the null block."""
    return 2 * -(-max(_NUM_TOKENS) // block_size) + 1


def unwritten_cache(shapes: list[LayerShape], block_size: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """KV memory for the probe, full of NaN: what a row has not written must not reach its result."""
    cache = KVCache(shapes, num_probe_blocks(block_size), block_size, dtype, device)
    for keys, values in cache.layers:
        keys.fill_(math.nan)
        values.fill_(math.nan)
    return cache
