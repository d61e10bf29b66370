"""From logits to tokens, for all rows of a step at once.

A row's token is a pure function of its logits, parameters, seed and position. Order of the transforms as in vLLM V1:
min_tokens mask and logit_bias, penalties, temperature, min_p, top_k, top_p. Logprobs are of the raw logits.

Theory of operation. Tokens are ordered by (logit, then lower id first); min_p, top_k and top_p each keep a prefix of
that order, so ties never leave it open which tokens remain. A token is drawn by an exponential race: the winner is the
token with the largest `logit / temperature - log(noise)`, which is a draw from the softmax (Gumbel-max trick), and its
noise depends on nothing but seed, position and the token itself (noise.py).

Sorting a vocabulary is slow and what remains after the filters is nearly always short, so rows are filtered among
their 256 most likely tokens; the few rows that need more try 4,096, then all. Each way keeps the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenloom.executor.noise import exponential_noise, noise_keys
from tokenloom.executor.plan import SamplingParams, TokenLogprobs

_CANDIDATE_STAGES = (256, 4096)
_NOISE_AT_ONCE = 200_000  # values; so much of it stays in the CPU's caches, which makes it twice as fast
_NEGATIVE_INFINITY = float("-inf")


class PenaltyCounts:
    """How often a row's tokens occurred, for the penalties.

    Args:
        prompt_token_ids: count for the repetition penalty alone.
        output_token_ids: count for all three.
    """

    def __init__(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        prompt = torch.tensor(prompt_token_ids, dtype=torch.long, device=device)
        output = torch.tensor(output_token_ids, dtype=torch.long, device=device)
        self.output_counts = torch.bincount(output, minlength=vocab_size).float()
        self.is_seen = self.output_counts > 0
        self.is_seen[prompt] = True

    def add(self, token_id: int) -> None:
        """Count one more generated token."""
        self.output_counts[token_id] += 1
        self.is_seen[token_id] = True


@dataclass(frozen=True)
class SamplerRow:
    """A row that samples.

    Args:
        position: index, in the row's token ids, of the token to be sampled; with the seed it fixes the noise.
        num_generated: tokens generated before.
        counts: needed if the parameters have penalties.
    """

    params: SamplingParams
    position: int
    num_generated: int = 0
    counts: PenaltyCounts | None = None


@dataclass(frozen=True)
class SamplerOutput:
    """Columns over the rows; where `is_finite` is False the logits were no numbers and the token means nothing."""

    token_ids: list[int]
    is_finite: list[bool]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Samples rows of one model.

    Args:
        eos_token_ids: masked, with a row's own stop tokens, until its min_tokens were generated.
    """

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: Tensor, rows: Sequence[SamplerRow]) -> SamplerOutput:
        """Choose a token for each row.

        Args:
            logits: `[num_rows, vocab_size]`, any float dtype.
        """
        raw = logits.float()
        # Not aminmax, which takes 30 times longer on the CPU (torch 2.13). NaN spreads to both.
        is_finite = (raw.amin(dim=-1).isfinite() & raw.amax(dim=-1).isfinite()).tolist()
        adjusted = self._adjusted(raw, rows)
        token_ids = adjusted.argmax(dim=-1)
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy and is_finite[i]]
        if drawn:
            token_ids[drawn] = _draw(_rows_of(adjusted, drawn), [rows[i] for i in drawn])
        chosen = token_ids.tolist()
        return SamplerOutput(chosen, is_finite, _sampled_logprobs(raw, rows, chosen, is_finite))

    def _adjusted(self, raw: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Logits after masks, bias and penalties; `raw` itself if no row has any."""
        adjusted = raw
        for i, row in enumerate(rows):
            params = row.params
            is_masked = row.num_generated < params.min_tokens
            if not (is_masked or params.logit_bias or params.has_penalties):
                continue
            if adjusted is raw:
                adjusted = raw.clone()
            logits = adjusted[i]
            if is_masked:
                logits[[*self._eos_token_ids, *params.stop_token_ids]] = _NEGATIVE_INFINITY
            if params.logit_bias:
                bias = torch.tensor(list(params.logit_bias.values()), device=raw.device)
                logits[list(params.logit_bias)] += bias
            if params.has_penalties:
                assert row.counts is not None
                _penalise_(logits, row.counts, params)
        return adjusted


def token_logprobs(logits: Tensor, token_ids: Sequence[int], nums: Sequence[int]) -> list[TokenLogprobs]:
    """Logprob entries of given tokens.

    Args:
        logits: `[num_rows, vocab_size]`, finite.
        token_ids: the token of each row; its entry comes first.
        nums: how many most likely tokens follow, per row; the token itself may be among them.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    top_values, top_ids = _most_likely(logprobs, min(max(nums), logits.shape[1]))
    value_lists, id_lists = top_values.tolist(), top_ids.tolist()
    return [
        TokenLogprobs([token_ids[i], *id_lists[i][:num]], [own[i], *value_lists[i][:num]]) for i, num in enumerate(nums)
    ]


def _sampled_logprobs(
    raw: Tensor, rows: Sequence[SamplerRow], token_ids: list[int], is_finite: list[bool]
) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(rows)
    asked = [(i, k) for i, row in enumerate(rows) if (k := row.params.num_logprobs) is not None and is_finite[i]]
    if asked:
        indices = [i for i, _ in asked]
        entries = token_logprobs(_rows_of(raw, indices), [token_ids[i] for i in indices], [k for _, k in asked])
        for i, entry in zip(indices, entries, strict=True):
            found[i] = entry
    return found


def _penalise_(logits: Tensor, counts: PenaltyCounts, params: SamplingParams) -> None:
    """Apply a row's penalties in place.

    Source: Keskar et al. 2019, section 4.1 (repetition); OpenAI API reference (frequency, presence).
    """
    if params.repetition_penalty != 1.0:
        scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        torch.where(counts.is_seen, scaled, logits, out=logits)
    if params.frequency_penalty != 0.0:
        logits.sub_(counts.output_counts, alpha=params.frequency_penalty)
    if params.presence_penalty != 0.0:
        logits.sub_((counts.output_counts > 0).float(), alpha=params.presence_penalty)


def _draw(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Draw a token for each of `rows`, none of which is greedy: int64 `[num_rows]`."""
    temperature = torch.tensor([row.params.temperature for row in rows], device=logits.device).unsqueeze(1)
    # Relative to the largest, so that no temperature overflows; the order and the softmax stay as they are.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    keys = noise_keys(((row.params.seed or 0, row.position) for row in rows), logits.device)
    filters = _Filters.of([row.params for row in rows], logits.shape[1], logits.device)
    token_ids = torch.empty(len(rows), dtype=torch.long, device=logits.device)
    pending = [i for i, row in enumerate(rows) if _is_filtered(row.params)]
    whole = [i for i, row in enumerate(rows) if not _is_filtered(row.params)]
    all_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    num_at_once = max(1, _NOISE_AT_ONCE // logits.shape[1])
    for start in range(0, len(whole), num_at_once):
        some = whole[start : start + num_at_once]
        race = scaled[some] - exponential_noise(keys[some], all_ids).log_()
        token_ids[some] = race.argmax(dim=-1)
    for num_candidates in (*_CANDIDATE_STAGES, logits.shape[1]):
        if pending:
            num_candidates = min(num_candidates, logits.shape[1])
            winners, is_exact = _draw_filtered(scaled[pending], keys[pending], filters.at(pending), num_candidates)
            token_ids[pending] = winners
            pending = [i for i, exact in zip(pending, is_exact.tolist(), strict=True) if not exact]
    return token_ids


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


@dataclass(frozen=True)
class _Filters:
    """min_p, top_k and top_p as columns `[num_rows, 1]`."""

    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor

    @staticmethod
    def of(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> _Filters:
        """Columns of the rows' parameters; top_k 0 becomes the whole vocabulary, top_p 1 infinity: nothing is cut."""
        return _Filters(
            torch.tensor([p.min_p for p in params], device=device).unsqueeze(1).log(),
            torch.tensor([p.top_k or vocab_size for p in params], device=device).unsqueeze(1),
            torch.tensor([p.top_p if p.top_p < 1.0 else torch.inf for p in params], device=device).unsqueeze(1),
        )

    def at(self, rows: list[int]) -> _Filters:
        """The columns of some rows."""
        return _Filters(self.log_min_p[rows], self.top_k[rows], self.top_p[rows])


def _draw_filtered(scaled: Tensor, keys: Tensor, filters: _Filters, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Draw from what the filters keep among each row's `num_candidates` most likely tokens.

    Args:
        scaled: `[num_rows, vocab_size]`, logits over temperature, the largest of a row is 0.

    Returns: tokens, and whether more candidates would have changed nothing; `[num_rows]` each.
    """
    is_all = num_candidates == scaled.shape[1]
    values, ids = _sorted(scaled) if is_all else _most_likely(scaled, num_candidates)
    rank = torch.arange(num_candidates, device=scaled.device)
    is_kept = (rank < filters.top_k) & (values >= filters.log_min_p)
    num_before_top_p = is_kept.sum(dim=-1)
    mass = values.exp() * is_kept
    is_cut_before = ((filters.top_k < scaled.shape[1]) | filters.log_min_p.isfinite()).squeeze(1)
    total = mass.sum(dim=-1)
    if not is_all and not bool(is_cut_before.all()):
        total = torch.where(is_cut_before, total, scaled.exp().sum(dim=-1))
    mass_before = mass.cumsum(dim=-1) - mass
    is_kept &= (mass_before < filters.top_p * total.unsqueeze(1)) | (rank == 0)
    race = values - exponential_noise(keys, ids.int()).log_()
    winners = race.masked_fill_(~is_kept, _NEGATIVE_INFINITY).argmax(dim=-1, keepdim=True)
    # Candidates above the last one's value are surely the row's most likely; a prefix within them is exact.
    num_sure = (values > values[:, -1:]).sum(dim=-1)
    needed = torch.where(is_cut_before, num_before_top_p, is_kept.sum(dim=-1))
    is_exact = torch.ones_like(needed, dtype=torch.bool) if is_all else needed <= num_sure
    return ids.gather(1, winners).squeeze(1), is_exact


def _sorted(values: Tensor) -> tuple[Tensor, Tensor]:
    """All of each row in the order of the filters: larger first, then lower id."""
    ordered, ids = values.sort(dim=-1, descending=True, stable=True)
    return ordered, ids


def _most_likely(values: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest of each row in the order of the filters; which of those equal to the last is left open."""
    ids = values.topk(num, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(1, order)


def _rows_of(values: Tensor, rows: list[int]) -> Tensor:
    """Some rows; without a copy if they are all."""
    return values if len(rows) == values.shape[0] else values[rows]
