"""The noise: exact reference, distribution, independence of neighbouring seeds, positions and tokens."""

import math

import numpy as np
import pytest
import torch

from engine.worker.sample import rng
from engine.worker.sample.race import GumbelRace

CPU = torch.device("cpu")
MASK = 0xFFFFFFFF


def mix(x: int, key: int = 0) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & MASK
    x ^= key
    x ^= x >> 15
    x = x * 0xD35A2D97 & MASK
    return x ^ x >> 15


def plain_word(seed: int, position: int, token: int) -> int:
    """The documented function in plain integers."""
    low, high = seed & MASK, seed >> 32 & MASK
    k0 = mix(mix(mix(low ^ 0x85EBCA6B) + high & MASK) + position & MASK)
    k1 = mix(mix(mix(high ^ 0xC2B2AE35) + low & MASK) ^ position)
    return mix(mix(token * 0x9E3779B9 & MASK) ^ k0, k1) & 0x7FFFFFFF


def words(seeds: list[int], positions: list[int], vocab: int) -> torch.Tensor:
    as_int64 = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds])
    return rng.words(rng.token_table(vocab, CPU), *rng.row_keys(as_int64, torch.tensor(positions)))


def test_words_equal_the_documented_function():
    seeds = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    positions = [0, 1, 17, 4095, 131071, 5, 77]
    got = words(seeds, positions, 300)
    want = [[plain_word(s, p, t) for t in range(300)] for s, p in zip(seeds, positions, strict=True)]
    assert got.tolist() == want


def uniforms(seeds: list[int], positions: list[int], vocab: int) -> np.ndarray:
    return (words(seeds, positions, vocab).numpy().astype(np.float64) + 0.5) / 2**31


@pytest.mark.parametrize("along", ["seed", "position", "token"])
def test_uniform_and_uncorrelated_along(along: str):
    n = 4096
    if along == "seed":
        u = np.stack([uniforms(list(range(n)), [7] * n, 16)])[0].T      # [16, n]: one seed after another
    elif along == "position":
        u = uniforms([42] * n, list(range(n)), 16).T
    else:
        u = uniforms(list(range(16)), [3] * 16, n)
    # 64 bins: chi-square of 63 degrees of freedom, pooled over the 16 series
    for series in u:
        counts = np.bincount((series * 64).astype(int), minlength=64)
        chi = ((counts - n / 64) ** 2 / (n / 64)).sum()
        assert chi < 63 + 5.5 * math.sqrt(2 * 63)
    for lag in (1, 2, 3, 64, 1024):
        a, b = u[:, :-lag] - 0.5, u[:, lag:] - 0.5
        correlation = (a * b).mean() * 12
        assert abs(correlation) < 5 / math.sqrt(a.size), lag
    across = np.corrcoef(u)
    assert np.abs(across - np.eye(len(u))).max() < 5.5 / math.sqrt(n)


def test_one_flipped_bit_of_seed_or_position_flips_half_of_the_bits():
    base_seed, base_position, vocab = 0x9A3C_71F2_0B55_E871, 1234, 4096
    base = words([base_seed], [base_position], vocab)
    flips = [(base_seed ^ 1 << bit, base_position) for bit in range(64)]
    flips += [(base_seed, base_position ^ 1 << bit) for bit in range(17)]
    other = words([s for s, _ in flips], [p for _, p in flips], vocab)
    difference = (other ^ base).numpy().view(np.uint8)
    ones = np.unpackbits(difference, axis=1).reshape(len(flips), -1).mean(1) * 32 / 31
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / math.sqrt(31 * vocab)


def test_noise_is_gumbel_and_bounded():
    noise = rng.gumbel(words(list(range(64)), [9] * 64, 20_000)).numpy().astype(np.float64)
    n = noise.size
    assert abs(noise.mean() - np.euler_gamma) < 5 * math.sqrt(math.pi**2 / 6 / n)
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    for x in (-2.0, -1.0, 0.0, 1.0, 3.0, 6.0, 9.0):
        p = math.exp(-math.exp(-x))
        assert abs((noise <= x).mean() - p) < 5 * math.sqrt(p * (1 - p) / n) + 1e-7, x
    ends = rng.gumbel(torch.tensor([0, 2**31 - 1], dtype=torch.int32))
    assert ends.isfinite().all()
    assert 22.1 < ends[0] < 22.3
    assert -2.9 < ends[1] < -2.7


@pytest.mark.parametrize("vocab", [1, 5, 64, 100, 1000, 4096])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 1e6])
def test_pruned_race_equals_the_plain_one(vocab: int, scale: float):
    race = GumbelRace(vocab, CPU)
    g = torch.Generator().manual_seed(vocab)
    z = torch.randn(200, vocab, generator=g) * scale
    z[torch.rand(200, vocab, generator=g) < 0.3] = -torch.inf
    z[:, 0] = 0.0
    keys = rng.row_keys(torch.arange(200), torch.arange(200))
    plain = (z + rng.gumbel(rng.words(race.table, *keys))).argmax(-1)
    assert race.sample(z, *keys).tolist() == plain.tolist()
    ids = torch.arange(vocab).expand(200, vocab)
    assert race.sample_among(z, ids, torch.ones_like(ids, dtype=torch.bool), *keys).tolist() == plain.tolist()
