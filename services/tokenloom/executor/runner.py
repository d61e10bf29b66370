"""Runs plans, one at a time: plan to tensors, forward pass, sampled tokens.

Synchronous and without locks: whoever owns a runner calls it from one thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenloom.common.errors import Internal, InvalidArgument
from tokenloom.executor.batch import Batch, build_batch
from tokenloom.executor.forward import ForwardPass
from tokenloom.executor.kv_cache import KVCache
from tokenloom.executor.plan import Plan, PromptLogprobs, Result, RowFailure, SampledRow, StepTimings, TokenLogprobs
from tokenloom.executor.progress import Progress
from tokenloom.executor.row_checks import Limits
from tokenloom.executor.rows import RowTable, ScheduledRow
from tokenloom.executor.sampler import Sampler, SamplerRow, token_logprobs

log = logging.getLogger(__name__)
LOGITS_SLICE = 256
"""Most rows of logits that exist at once while prompt logprobs are made."""


@dataclass(frozen=True)
class RunnerParts:
    """What a runner is made of."""

    forward: ForwardPass
    sampler: Sampler
    limits: Limits
    max_num_blocks: int


class Runner:
    """Executes plans on a model. Nothing can run before the first `initialize`.

    Attributes:
        progress: rises while a plan runs; may be read from other threads.
    """

    def __init__(self, parts: RunnerParts) -> None:
        self.progress = Progress()
        self._parts = parts
        self._rows = RowTable(parts.limits, parts.forward.device)
        self._cache: KVCache | None = None

    @property
    def num_rows(self) -> int:
        """Rows that are known."""
        return len(self._rows)

    def initialize(self, num_blocks: int) -> None:
        """Lay out the KV memory (2 to max_num_blocks blocks, the null block included) and forget all rows.

        Raises: InvalidArgument if the memory has no room for so many; nothing was changed then.
        """
        parts = self._parts
        if not 2 <= num_blocks <= parts.max_num_blocks:
            raise InvalidArgument(f"{num_blocks} blocks; from 2 to {parts.max_num_blocks} fit", field="num_blocks")
        if self._cache is None or self._cache.num_blocks != num_blocks:
            self._cache = None  # free the old memory before the new is taken
            forward, block_size = parts.forward, parts.limits.block_size
            self._cache = KVCache(forward.shapes, num_blocks, block_size, forward.kv_dtype, forward.device)
        self._rows.begin_epoch(num_blocks)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> Result:
        """Run a plan.

        Raises: InvalidArgument if it is malformed: other rows go on. Whatever the forward pass raises: the plan's rows
            have failed then, and say so in later plans.
        """
        assert self._cache is not None, "initialize comes first"
        clock = _Stopwatch()
        scheduled = self._rows.apply(plan)
        good = [s for s in scheduled if s.row.failure is None]
        sampled: list[SampledRow] = []
        prompt_logprobs: list[PromptLogprobs] = []
        timings = StepTimings()
        if good:
            try:
                batch = build_batch(good, self._parts.limits.block_size, self._parts.forward.device)
                timings.prepare_us = clock.lap_us()
                hidden = self._parts.forward.hidden_states(batch, self._cache, self.progress)
                sampling = [i for i, s in enumerate(batch.rows) if s.is_sampling]
                logits = self._last_logits(batch, sampling, hidden)
                timings.forward_us = clock.lap_us()
                prompt_logprobs = self._prompt_logprobs(batch, hidden)
                sampled = self._sample([batch.rows[i] for i in sampling], logits)
                timings.sample_us = clock.lap_us()
            except Exception:
                for s in good:
                    s.row.failure = Internal("an earlier step of this row failed", reason="STEP_FAILED")
                raise
        self.progress.advance()
        return Result(plan.step_id, sampled, prompt_logprobs, _failures(scheduled), timings)

    def _last_logits(self, batch: Batch, sampling: list[int], hidden: Tensor) -> Tensor:
        """Logits after the last token of the rows that sample: `[num_rows, vocab_size]`."""
        last = [batch.first_tokens[i] + batch.rows[i].num_tokens - 1 for i in sampling]
        if not last:
            return hidden.new_empty((0, self._parts.limits.vocab_size))
        return self._parts.forward.logits(hidden if len(last) == hidden.shape[0] else hidden[last])

    def _sample(self, scheduled: list[ScheduledRow], logits: Tensor) -> list[SampledRow]:
        """Sample for rows in their order and append the tokens to their ids."""
        if not scheduled:
            return []
        rows = [SamplerRow(s.row.sampling, s.end, s.end - s.row.num_prompt_tokens, s.row.counts) for s in scheduled]
        output = self._parts.sampler.sample(logits, rows)
        sampled = []
        for i, s in enumerate(scheduled):
            if s.row.failure is not None:
                continue
            if not output.is_finite[i]:
                s.row.failure = Internal("the model's logits are not finite", reason="LOGITS_NOT_FINITE")
                continue
            s.row.append(output.token_ids[i])
            sampled.append(SampledRow(s.row.row_id, output.token_ids[i], output.logprobs[i]))
        return sampled

    def _prompt_logprobs(self, batch: Batch, hidden: Tensor) -> list[PromptLogprobs]:
        """Logprobs of the prompt tokens that follow the computed ones, for rows that ask."""
        found = []
        for first_token, s in zip(batch.first_tokens, batch.rows, strict=True):
            row, num = s.row, s.row.sampling.num_prompt_logprobs
            end = min(s.end, row.num_prompt_tokens - 1)
            if num is None or end <= s.first:
                continue
            entries: list[TokenLogprobs] = []
            for start in range(s.first, end, LOGITS_SLICE):
                stop = min(start + LOGITS_SLICE, end)
                offset = first_token - s.first
                self.progress.advance()
                logits = self._parts.forward.logits(hidden[offset + start : offset + stop])
                if not bool(logits.isfinite().all()):
                    row.failure = Internal("the model's logits are not finite", reason="LOGITS_NOT_FINITE")
                    break
                entries += token_logprobs(logits, row.token_ids[start + 1 : stop + 1], [num] * (stop - start))
            else:
                found.append(PromptLogprobs(row.row_id, s.first + 1, entries))
        return found


def _failures(scheduled: list[ScheduledRow]) -> list[RowFailure]:
    """The rows of a plan that have failed, in this plan or before."""
    failures = []
    for s in scheduled:
        if (error := s.row.failure) is not None:
            log.warning("row %d failed: %s", s.row.row_id, error, extra={"request_id": s.row.request_id})
            failures.append(RowFailure(s.row.row_id, error))
    return failures


class _Stopwatch:
    """Microseconds between laps."""

    def __init__(self) -> None:
        self._last_ns = time.perf_counter_ns()

    def lap_us(self) -> int:
        """Time since the last lap."""
        now_ns = time.perf_counter_ns()
        lap_us, self._last_ns = (now_ns - self._last_ns) // 1000, now_ns
        return lap_us
