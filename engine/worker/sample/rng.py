"""Stateless Gumbel noise, keyed by (seed, position, token id).

The noise of a token is a pure function of the request's seed, the position at which the sampled token will stand and
the token's id. So a request's result depends neither on what else is in the batch nor on its row, a preempted request
repeats itself exactly, and the same function can be computed inside a GPU kernel: every step is a 32-bit operation.

    seed (64 bits), position ──► k0, k1    two 32-bit words a row
    table[token] = mix(token · φ)          the same for every row, so it is computed once
    word  = mix(table[token] ^ k0, with k1 xored in after the first multiplication), the top bit dropped
    v     = (word + 0.5) · 2⁻³¹            uniform in (0, 1), fine-grained near 0
    noise = -log(-log1p(-v))               standard Gumbel, between -2.82 and 22.19

`mix` is a two-round xorshift-multiply finalizer whose constants 0x21f0aaad and 0xd35a2d97 come from the public-domain
search for low avalanche bias at github.com/skeeto/hash-prospector (issue 19). A small `v` is a large noise: the winners
lie where float32 resolves best, which a 24-bit grid ending at 1 would not give.
"""

import math

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9  # 2³² / golden ratio, odd: token · φ is a bijection
_MUL1 = 0x21F0AAAD
_MUL2 = 0xD35A2D97
_SEED0 = 0x85EBCA6B   # two different words, so that the key words of seed 0 differ
_SEED1 = 0xC2B2AE35
_V_MAX = 1 - 2.0**-24  # the largest float32 below 1


def _signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word: torch shifts and multiplies no uint32 on the CPU."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _xorshift(x: Tensor, bits: int, scratch: Tensor) -> None:
    torch.bitwise_right_shift(x, bits, out=scratch)
    scratch &= (1 << (32 - bits)) - 1  # the shift of an int32 drags the sign in: clear its copies
    x ^= scratch


def _mix(x: Tensor, scratch: Tensor, key: Tensor | None = None) -> Tensor:
    """Mix int32 words in place; `key` enters between the rounds."""
    _xorshift(x, 16, scratch)
    x *= _signed(_MUL1)
    if key is not None:
        x ^= key
    _xorshift(x, 15, scratch)
    x *= _signed(_MUL2)
    _xorshift(x, 15, scratch)
    return x


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The two int32 key words of each row, [R, 1], from int64 `seeds` [R] (all 64 bits count) and `positions` [R]."""
    low = seeds.to(torch.int32)[:, None]  # the conversion keeps the low 32 bits
    high = (seeds >> 32).to(torch.int32)[:, None]
    position = positions.to(torch.int32)[:, None]
    scratch = torch.empty_like(low)
    k0 = _mix(low ^ _signed(_SEED0), scratch)
    k0 = _mix(k0 + high, scratch)
    k0 = _mix(k0 + position, scratch)  # for one seed a bijection of the position
    k1 = _mix(high ^ _signed(_SEED1), scratch)
    k1 = _mix(k1 + low, scratch)
    k1 = _mix(k1 ^ position, scratch)
    return k0, k1


def token_table(vocab_size: int, device: torch.device) -> Tensor:
    """int32 [vocab_size]: the part of the hash that depends on the token alone."""
    x = torch.arange(vocab_size, dtype=torch.int32, device=device) * _signed(_GOLDEN)
    return _mix(x, torch.empty_like(x))


def words(
    table: Tensor, k0: Tensor, k1: Tensor, out: Tensor | None = None, scratch: Tensor | None = None
) -> Tensor:
    """int32 [R, C] in [0, 2³¹): the random word of each token.

    `table` holds entries of `token_table`, [C] or [R, C]; `k0`, `k1` are [R, 1]; `out`, `scratch` are work space.
    """
    x = torch.bitwise_xor(table, k0, out=out)
    _mix(x, torch.empty_like(x) if scratch is None else scratch, k1)
    x &= 0x7FFFFFFF
    return x


def gumbel(word: Tensor) -> Tensor:
    """float32 standard Gumbel noise of `words`."""
    v = word.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_V_MAX)
    return v.neg_().log1p_().neg_().log_().neg_()


def add_gumbel_bound(z: Tensor, word: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
    """`out` = an upper bound of z + gumbel(word), a few cheap operations an element instead of two logarithms.

    -log(-log1p(-v)) ≤ -log(v), and for a float v = 2ᵉ(1 + f) the bit pattern read as an integer, (e + 127 + f)·2²³, is
    a lower bound of (log2(v) + 127)·2²³ because f ≤ log2(1 + f). `out` is float32, `scratch` int32, both of z's shape.
    """
    u = scratch.view(torch.float32)
    u.copy_(word)
    u += 0.5                       # v · 2³¹: the scale only moves the constant below
    out.copy_(scratch)
    ln2 = math.log(2)
    out *= -ln2 * 2.0**-23
    out += ln2 * (127 + 31)
    out += z
    return out
