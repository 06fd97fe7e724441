"""The kernels of recurrent layers (Gated DeltaNet) against their references, in the dimensions of Qwen3.5 and 3.6.

    1 token     convolution and rule from a state in float32; sequences near their start, and far behind it
    chunks      prompts of several chunks, continued ones, and single tokens between them, with states in bfloat16
    norm        the same for few sequences, with norm and gate fused into the kernel; states in bfloat16
    gated norm  the separate kernel that follows otherwise, also with fp8 output

Slots of sequences at their start hold NaN, and so do all unused slots, to expose a state that was not set to zero.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from engine.kernels.pointwise import reference as pointwise_reference
from engine.kernels.recurrent import reference as recurrent_reference
from engine.kernels.recurrent.reference import RecurrentBatch
from engine.selftest.checks.check import Check, Side
from engine.selftest.compare import Result, exact, fp8_rows, numbers

_KEY_HEADS, _VALUE_HEADS, _DIM, _WIDTH = 2, 4, 128, 4
_KEYS, _VALUES = _KEY_HEADS * _DIM, _VALUE_HEADS * _DIM
_CHANNELS = 2 * _KEYS + _VALUES
# Inputs, U, W, scores and corrections are rounded once per chunk. The resulting error, relative to a row, by dtype.
_CHUNK_BOUNDS = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-3}
_STATE_BOUND = 1e-2  # for a state in bfloat16


@dataclass
class Inputs:
    """The inputs of a step: each sequence's position and number of new tokens, random weights, old contents of
    slots."""

    steps: list[tuple[int, int]]
    qkv: torch.Tensor
    ba: torch.Tensor
    weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    state: torch.Tensor
    ring: torch.Tensor

    @classmethod
    def draw(cls, side: Side, steps: list[tuple[int, int]], state_dtype: torch.dtype) -> "Inputs":
        num_slots, total = len(steps) + 2, sum(count for _, count in steps)
        slots = [num_slots - 1 - i for i in range(len(steps))]  # slots 0 and 1 are unused
        drawn = cls(
            steps,
            side.strided(total, _CHANNELS),
            side.strided(total, 2 * _VALUE_HEADS),
            side.randn(_CHANNELS, _WIDTH) * 0.5,
            side.randn(_VALUE_HEADS).float(),
            side.randn(_VALUE_HEADS).float(),
            side.ints([start + i for start, count in steps for i in range(count)]).long(),
            side.ints(slots).long(),
            (side.randn(num_slots, _VALUE_HEADS, _DIM, _DIM) * 0.1).to(state_dtype),
            side.randn(num_slots, _WIDTH, _CHANNELS),
        )
        for stale in (0, *[slot for slot, (start, _) in zip(slots, steps, strict=True) if start == 0]):
            drawn.state[stale] = torch.nan
            drawn.ring[stale] = torch.nan
        return drawn

    @property
    def counts(self) -> list[int]:
        return [count for _, count in self.steps]

    @property
    def q_starts(self) -> list[int]:
        return [end - count for end, count in zip(accumulate(self.counts), self.counts, strict=True)]


def rule(side: Side, steps: list[tuple[int, int]], state_dtype: torch.dtype, *, early: bool = False) -> list[Result]:
    """Compare outputs, states and the convolution's newest inputs, and check that unused slots are unchanged. `early`:
    the kernel reads before it waits, as it does when few sequences run."""
    inputs = Inputs.draw(side, steps, state_dtype)
    with side.clock():
        out = _reference(inputs) if side.is_reference else _kernels(side, inputs, early)
    owned = inputs.slots
    bound = _CHUNK_BOUNDS[side.dtype] if max(inputs.counts) > 1 else numbers(out, 2).bound
    state_bound = max(bound, _STATE_BOUND) if state_dtype == torch.bfloat16 else bound
    return [
        Result(out.flatten(1), bound, "rms"),  # over all heads: a single head's output may be close to zero
        Result(inputs.state[owned].float().flatten(2), state_bound, "rms"),
        exact(inputs.ring[owned].nan_to_num(0.0)),  # rows that no token was written to
        exact(inputs.state[1]),
        exact(inputs.ring[1]),
    ]


def _kernels(side: Side, inputs: Inputs, early: bool) -> torch.Tensor:
    from engine.kernels.recurrent import decode, prefill
    from engine.kernels.recurrent.shape import DeltaShape

    shape = DeltaShape(_KEY_HEADS, _VALUE_HEADS, _DIM, _DIM)
    out = torch.full((len(inputs.positions), _VALUE_HEADS, _DIM), torch.nan, dtype=side.dtype, device=side.device)
    arguments = (
        inputs.qkv, inputs.ba, inputs.weight, inputs.a_log, inputs.dt_bias, inputs.positions, inputs.slots,
        inputs.state, inputs.ring, shape, out,
    )  # fmt: skip
    total = prefill.num_chunks(inputs.counts)
    if not total:
        decode.decode(*arguments, early=early)
        return out
    q_starts, counts = side.ints(inputs.q_starts), side.ints(inputs.counts)
    chunks = prefill.plan_chunks(counts, total)
    prefill.prefill(*arguments, q_starts=q_starts, counts=counts, chunks=chunks)
    decode.decode(*arguments, q_starts=q_starts, counts=counts)
    return out


def _reference(inputs: Inputs) -> torch.Tensor:
    """The reference's results, on the CPU: a GPU would first have to load libraries for convolutions and linear
    systems."""
    for name in ("qkv", "ba", "weight", "a_log", "dt_bias", "positions", "slots", "state", "ring"):
        setattr(inputs, name, getattr(inputs, name).cpu())
    batch = RecurrentBatch.build(
        inputs.positions, inputs.slots, torch.tensor(inputs.q_starts), torch.tensor(inputs.counts)
    )
    mixed = recurrent_reference.causal_conv(inputs.qkv, inputs.weight, inputs.ring, batch)
    q, k, v = (x.unflatten(-1, (-1, _DIM)) for x in mixed.split((_KEYS, _KEYS, _VALUES), -1))
    b, a = inputs.ba.chunk(2, -1)
    g, beta = recurrent_reference.decay_and_beta(a, b, inputs.a_log, inputs.dt_bias)
    return recurrent_reference.gated_delta_rule(q, k, v, g, beta, inputs.state, batch)


def gated_norm(side: Side, *, quantize: bool) -> list[Result]:
    """The norm of 16 heads, gated by columns of a wider matrix."""
    heads = 16
    x = side.randn(9, heads, _DIM)
    z, weight = side.strided(9, heads * _DIM), 1 + side.randn(_DIM) * 0.1
    with side.clock():
        if side.is_reference:
            y = recurrent_reference.gated_rms_norm(x, z.unflatten(-1, (heads, _DIM)), weight, 1e-6).flatten(1)
            return fp8_rows(pointwise_reference.quantize_rows(y)) if quantize else [numbers(y, 4)]
        from engine.kernels.pointwise import norm as pointwise_norm

        if quantize:
            return fp8_rows(pointwise_norm.gated_rms_norm_to_fp8(x, z, weight, 1e-6))
        return [numbers(pointwise_norm.gated_rms_norm(x, z, weight, 1e-6), 4)]


_ONE_TOKEN = [(0, 1), (1, 1), (2, 1), (3, 1), (500, 1)]
_CHUNKS = [(0, 130), (77, 1), (3, 2), (0, 1), (41, 64)]

CHECKS = [
    Check("delta rule, 1 token", partial(rule, steps=_ONE_TOKEN, state_dtype=torch.float32)),
    Check("delta rule, early", partial(rule, steps=_ONE_TOKEN[1:4], state_dtype=torch.bfloat16, early=True)),
    Check("delta rule, chunks", partial(rule, steps=_CHUNKS, state_dtype=torch.bfloat16)),
    Check("gated norm", partial(gated_norm, quantize=False)),
    Check("gated norm to fp8", partial(gated_norm, quantize=True), True),
]
