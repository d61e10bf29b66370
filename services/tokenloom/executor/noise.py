"""Counter-based noise: a pure function of (seed, position, token id).

No generator state exists, so a token's noise does not depend on the batch it is computed in, on what was computed
before, or on the process: a row that is preempted, replayed or moved draws the same noise again.

Source: the counter-based idea of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); splitmix64
(Steele et al., OOPSLA 2014) spreads (seed, position) over two 32-bit keys, and two keyed rounds of the 32-bit mixer
lowbias32 (Wellons, "Prospecting for hash functions", 2018) give each token its bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_LOWBIAS32_A = 0x7FEB352D
_LOWBIAS32_B = 0x846CA68B - (1 << 32)  # as a signed 32-bit number
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def noise_keys(seeds_and_positions: Iterable[tuple[int, int]], device: torch.device) -> Tensor:
    """Keys of draws: int32 `[num_rows, 2]`. Seeds are taken modulo 2**64."""
    rows = []
    for seed, position in seeds_and_positions:
        key = _splitmix64(_splitmix64(seed & _MASK64) ^ position)
        rows.append((_signed32(key & 0xFFFFFFFF), _signed32(key >> 32)))
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 2)


def exponential_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard exponential noise, one value per row and token.

    Args:
        keys: int32 `[num_rows, 2]` from `noise_keys`.
        token_ids: int32, `[num_tokens]` or `[num_rows, num_tokens]`.

    Returns: fp32 `[num_rows, num_tokens]`, above 0 and below 17. The smallest values, which decide who wins, have a
        resolution of 2**-31.
    """
    bits = _mix_(token_ids ^ keys[:, :1])
    bits = _mix_(bits.bitwise_xor_(keys[:, 1:]))
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=_LARGEST_BELOW_ONE).neg_().log1p_().neg_()


def _mix_(bits: Tensor) -> Tensor:
    """lowbias32 in place on int32; the masks make arithmetic shifts logical."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
    bits.mul_(_LOWBIAS32_A)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF))
    bits.mul_(_LOWBIAS32_B)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _signed32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
