"""Noise is a pure function of (seed, position, token)."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from tokenloom.executor.noise import exponential_noise, noise_keys

CPU = torch.device("cpu")
TOKENS = torch.arange(50_257, dtype=torch.int32)  # GPT-2's vocabulary: no multiple of any vector's width


def test_noise_is_the_same_alone_and_in_any_batch() -> None:
    draws = [(seed, position) for seed in (0, 1, 2**64 - 1) for position in (0, 1, 7, 100_000)]
    together = exponential_noise(noise_keys(draws, CPU), TOKENS)
    for i, draw in enumerate(draws):
        alone = exponential_noise(noise_keys([draw], CPU), TOKENS)
        assert torch.equal(together[i], alone[0])


def test_a_tokens_noise_does_not_depend_on_which_other_tokens_are_asked_for() -> None:
    keys = noise_keys([(3, 5), (4, 5)], CPU)
    ids = torch.tensor([[9, 40_000, 1], [7, 0, 49_999]], dtype=torch.int32)
    whole = exponential_noise(keys, TOKENS)
    assert torch.equal(exponential_noise(keys, ids), whole.gather(1, ids.long()))


@pytest.mark.parametrize("draw", [(0, 0), (1, 0), (0, 1), (123456789, 4095)])
def test_noise_is_exponentially_distributed_over_tokens(draw: tuple[int, int]) -> None:
    noise = exponential_noise(noise_keys([draw], CPU), TOKENS)[0]
    assert bool((noise > 0).all())
    assert bool(noise.isfinite().all())
    assert stats.kstest(noise.numpy(), "expon").pvalue > 1e-3


def test_noise_is_exponentially_distributed_over_positions_and_over_seeds() -> None:
    token = torch.tensor([17], dtype=torch.int32)
    for draws in ([(5, position) for position in range(20_000)], [(seed, 5) for seed in range(20_000)]):
        noise = exponential_noise(noise_keys(draws, CPU), token)[:, 0]
        assert stats.kstest(noise.numpy(), "expon").pvalue > 1e-3


def test_neighbouring_positions_and_seeds_are_not_correlated() -> None:
    noise = exponential_noise(noise_keys([(5, 1), (5, 2), (6, 1)], CPU), TOKENS)
    correlation = torch.corrcoef(noise)
    assert float((correlation - torch.eye(3)).abs().max()) < 0.02
