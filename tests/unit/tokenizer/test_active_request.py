from __future__ import annotations

import pytest

from tokenloom.tokenizer.active_request import child_seed


@pytest.mark.parametrize(
    ("seed", "index", "expected"),
    [
        (0, 0, 14776485713554191401),
        (0, 1, 1312093454061838643),
        (5, 0, 5354861812988460959),
        ((1 << 64) - 1, 127, 9795674288955089962),
    ],
)
def test_seeds_of_choices_never_change(seed: int, index: int, expected: int) -> None:
    assert child_seed(seed, index) == expected


def test_seeds_of_choices_differ_and_fit_64_bits() -> None:
    seeds = {child_seed(seed, index) for seed in range(20) for index in range(128)}
    assert len(seeds) == 20 * 128
    assert max(seeds) < 1 << 64
