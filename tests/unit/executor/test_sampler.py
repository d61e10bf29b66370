"""The sampler against exact distributions and plain references."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from scipy import stats

from tokenloom.executor.plan import SamplingParams
from tokenloom.executor.sampler import PenaltyCounts, Sampler, SamplerRow

NUM_DRAWS = 20_000
SMALL, LARGE = 40, 700  # below and above the number of candidates that are looked at first
CPU = torch.device("cpu")
SETTINGS = {
    "plain": (SMALL, SamplingParams()),
    "cold": (SMALL, SamplingParams(temperature=0.5)),
    "hot": (SMALL, SamplingParams(temperature=1.7)),
    "top_k": (SMALL, SamplingParams(top_k=5)),
    "top_k of one": (SMALL, SamplingParams(top_k=1)),
    "top_p": (SMALL, SamplingParams(top_p=0.8)),
    "min_p": (SMALL, SamplingParams(min_p=0.15)),
    "top_k, top_p": (SMALL, SamplingParams(temperature=1.3, top_k=12, top_p=0.7)),
    "all filters": (SMALL, SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02)),
    "bias": (SMALL, SamplingParams(top_p=0.95, logit_bias={3: 4.0, 7: -100.0})),
    "large, top_p within the candidates": (LARGE, SamplingParams(temperature=0.4, top_p=0.9)),
    "large, more than the candidates": (LARGE, SamplingParams(temperature=3.0, top_p=0.97, min_p=0.001)),
}


def logits_of(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(vocab_size, generator=generator) * 2


def exact_distribution(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """Bias, temperature, min_p, top_k, top_p in double precision, token by token."""
    biased = [float(x) + params.logit_bias.get(i, 0.0) for i, x in enumerate(logits.tolist())]
    scaled = [x / params.temperature for x in biased]
    largest = max(scaled)
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = [i for i in order if math.exp(scaled[i] - largest) >= params.min_p]
    kept = kept[: params.top_k or None]
    total = sum(math.exp(scaled[i] - largest) for i in kept)
    nucleus: list[int] = []
    mass = 0.0
    for i in kept:
        if nucleus and mass >= params.top_p * total:
            break
        nucleus.append(i)
        mass += math.exp(scaled[i] - largest)
    return [math.exp(scaled[i] - largest) / mass if i in set(nucleus) else 0.0 for i in range(len(scaled))]


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_exact_filtered_distribution(name: str) -> None:
    vocab_size, params = SETTINGS[name]
    logits = logits_of(vocab_size)
    rows = [SamplerRow(replace(params, seed=1234), position) for position in range(NUM_DRAWS)]
    counts: Counter[int] = Counter()
    for start in range(0, NUM_DRAWS, 5000):
        some = rows[start : start + 5000]
        counts.update(Sampler().sample(logits.expand(len(some), -1), some).token_ids)
    expected = [p * NUM_DRAWS for p in exact_distribution(logits, params)]
    assert all(expected[token] > 0 for token in counts), "a token was drawn that the filters remove"
    observed_bins, expected_bins, rest = [], [], [0.0, 0.0]
    for token, mean in enumerate(expected):
        if mean >= 5:
            observed_bins.append(float(counts[token]))
            expected_bins.append(mean)
        else:
            rest = [rest[0] + counts[token], rest[1] + mean]
    if rest[1] > 0:
        observed_bins.append(rest[0])
        expected_bins.append(rest[1])
    if len(expected_bins) > 1:
        assert stats.chisquare(observed_bins, expected_bins).pvalue > 1e-3


def test_a_row_draws_the_same_token_alone_and_in_a_batch_of_sixteen() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, LARGE, generator=generator) * 3
    params = [params for vocab_size, params in SETTINGS.values() if not params.logit_bias] + [SamplingParams()] * 5
    rows = [SamplerRow(replace(p, seed=i), position=10 * i) for i, p in enumerate(params)]
    assert len(rows) == 16
    together = Sampler().sample(logits, rows).token_ids
    alone = [Sampler().sample(logits[i : i + 1], [row]).token_ids[0] for i, row in enumerate(rows)]
    backwards = Sampler().sample(logits.flip(0), rows[::-1]).token_ids[::-1]
    assert together == alone == backwards


def test_seed_and_position_both_change_the_draw() -> None:
    logits = torch.zeros(1, LARGE)
    draws = {
        Sampler().sample(logits, [SamplerRow(SamplingParams(seed=seed), position)]).token_ids[0]
        for seed in range(5)
        for position in range(5)
    }
    assert len(draws) > 20


@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
def test_top_p_zero_and_temperature_zero_take_the_most_likely_token(vocab_size: int) -> None:
    logits = logits_of(vocab_size)
    rows = [
        SamplerRow(SamplingParams(temperature=1.5, top_p=0.0, seed=1), 3),
        SamplerRow(SamplingParams(temperature=0.0), 3),
    ]
    best = int(logits.argmax())
    assert Sampler().sample(logits.expand(2, -1), rows).token_ids == [best, best]


def test_among_equal_logits_the_filters_keep_the_lower_token_ids() -> None:
    logits = torch.zeros(1, LARGE)
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=3 / LARGE - 1e-5)):
        drawn = {
            Sampler().sample(logits, [SamplerRow(replace(params, seed=0), position)]).token_ids[0]
            for position in range(60)
        }
        assert drawn == {0, 1, 2}
    assert Sampler().sample(logits, [SamplerRow(SamplingParams(temperature=0.0), 0)]).token_ids == [0]


def penalised(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> list[float]:
    """The penalties one token at a time."""
    found = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        found.append(logit)
    return found


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, repetition_penalty=1.8),
        SamplingParams(temperature=0.0, frequency_penalty=0.7),
        SamplingParams(temperature=0.0, presence_penalty=-1.5),
        SamplingParams(temperature=0.0, repetition_penalty=0.6, frequency_penalty=-0.4, presence_penalty=2.0),
    ],
)
def test_penalties_equal_a_plain_reference_over_a_whole_generation(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(3)
    prompt, output = [1, 5, 5, 8], [2, 2, 9]
    counts = PenaltyCounts(prompt, output, SMALL, CPU)
    for _ in range(30):
        logits = torch.randn(SMALL, generator=generator)
        row = SamplerRow(params, len(prompt) + len(output), len(output), counts)
        token = Sampler().sample(logits.unsqueeze(0), [row]).token_ids[0]
        reference = penalised(logits.tolist(), prompt, output, params)
        assert token == max(range(SMALL), key=reference.__getitem__)
        output.append(token)
        counts.add(token)


def test_penalties_of_one_row_leave_its_neighbours_alone() -> None:
    logits = logits_of(SMALL).expand(3, -1)
    best = int(logits[0].argmax())
    greedy = SamplingParams(temperature=0.0)
    counts = PenaltyCounts([], [best] * 50, SMALL, CPU)
    rows = [
        SamplerRow(greedy, 1),
        SamplerRow(replace(greedy, frequency_penalty=2.0), 51, 50, counts),
        SamplerRow(greedy, 1),
    ]
    tokens = Sampler().sample(logits, rows).token_ids
    assert tokens[0] == tokens[2] == best
    assert tokens[1] != best


def test_end_and_stop_tokens_are_masked_until_min_tokens_were_generated() -> None:
    logits = torch.zeros(1, SMALL)
    logits[0, 4], logits[0, 6], logits[0, 9] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(6,))
    sampler = Sampler(eos_token_ids=(4,))
    tokens = [sampler.sample(logits, [SamplerRow(params, 10 + n, n)]).token_ids[0] for n in range(5)]
    assert tokens == [9, 9, 9, 4, 4]


def test_logprobs_are_of_the_raw_logits_with_the_sampled_token_first() -> None:
    logits = logits_of(SMALL)
    params = SamplingParams(temperature=0.3, top_k=3, seed=8, num_logprobs=4, logit_bias={0: 100.0})
    output = Sampler().sample(logits.unsqueeze(0), [SamplerRow(params, 0)])
    entry = output.logprobs[0]
    assert entry is not None
    raw = torch.log_softmax(logits.double(), dim=0)
    assert output.token_ids == [0] == entry.token_ids[:1]
    assert entry.token_ids[1:] == raw.argsort(descending=True)[:4].tolist()
    assert entry.logprobs == pytest.approx(raw[entry.token_ids].tolist(), abs=1e-5)


def test_rows_that_ask_for_no_logprobs_get_none_and_zero_means_the_token_alone() -> None:
    logits = logits_of(SMALL).expand(2, -1)
    rows = [
        SamplerRow(SamplingParams(temperature=0.0), 0),
        SamplerRow(SamplingParams(temperature=0.0, num_logprobs=0), 0),
    ]
    nothing, alone = Sampler().sample(logits, rows).logprobs
    assert nothing is None
    assert alone is not None
    assert alone.token_ids == [int(logits[0].argmax())]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_told_and_harm_no_other_row(bad: float) -> None:
    logits = logits_of(SMALL).repeat(3, 1)
    logits[1, 11] = bad
    params = SamplingParams(seed=5, top_p=0.9, num_logprobs=2)
    rows = [SamplerRow(params, 7) for _ in range(3)]
    output = Sampler().sample(logits, rows)
    alone = Sampler().sample(logits[:1], rows[:1])
    assert output.is_finite == [True, False, True]
    assert output.token_ids[0] == output.token_ids[2] == alone.token_ids[0]
    assert output.logprobs[1] is None
    assert output.logprobs[0] == alone.logprobs[0]


def test_a_tiny_temperature_is_greedy_and_a_small_one_does_not_overflow() -> None:
    logits = logits_of(SMALL) * 100
    rows = [SamplerRow(SamplingParams(temperature=t, seed=2), 0) for t in (1e-30, 1e-4, 1e-3)]
    assert Sampler().sample(logits.expand(3, -1), rows).token_ids == [int(logits.argmax())] * 3
