"""Gated DeltaNet's kernels against their references in plain torch, in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from engine.kernels.pointwise import norm as pointwise_norm
from engine.kernels.recurrent import decode as delta_decode
from engine.kernels.recurrent import prefill as delta_prefill
from engine.kernels.recurrent import reference as recurrent_reference
from engine.kernels.recurrent.chunk_solve import inverse_64
from engine.kernels.recurrent.reference import DeviceRecurrentBatch, RecurrentBatch
from engine.kernels.recurrent.shape import DeltaShape
from engine.kernels.runtime.launcher import kernel
from engine.layers.gated_delta import GatedDeltaNet

SHAPES = [DeltaShape(2, 4, 16, 32), DeltaShape(1, 4, 32, 16), DeltaShape(2, 2, 16, 16)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def strided(rows, width):
    """Rows of a wider matrix, as the views of fused projections are."""
    return torch.randn(rows, width + 24)[:, :width]


class Layer:
    """Random weights and inputs of a step, and states that others have left in the slots."""

    def __init__(self, shape, starts, counts, width=4, num_slots=9):
        self.shape = shape
        heads, key_size = shape.value_heads, shape.key_heads * shape.key_dim
        self.sizes = [key_size, key_size, heads * shape.value_dim]
        channels, tokens = sum(self.sizes), sum(counts)
        self.qkv, self.ba = strided(tokens, channels), strided(tokens, 2 * heads)
        self.weight = torch.randn(channels, width)
        self.a_log, self.dt_bias = torch.randn(heads), torch.randn(heads)
        self.state = torch.randn(num_slots, heads, shape.value_dim, shape.key_dim)
        self.conv_state = torch.randn(num_slots, width, channels)
        self.counts = torch.tensor(counts)
        self.q_starts = self.counts.cumsum(0) - self.counts
        self.positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        self.slots = torch.randperm(num_slots)[: len(counts)]
        for slot, start in zip(self.slots.tolist(), starts, strict=True):
            if start == 0:
                self.state[slot] = self.conv_state[slot] = torch.nan

    def reference(self):
        """(outputs, states, newest inputs of the convolution)."""
        shape, state, conv_state = self.shape, self.state.clone(), self.conv_state.clone()
        batch = RecurrentBatch.build(self.positions, self.slots, self.q_starts, self.counts)
        q, k, v = recurrent_reference.causal_conv(self.qkv, self.weight, conv_state, batch).split(self.sizes, -1)
        b, a = self.ba.chunk(2, -1)
        keys, values = (shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim)
        out = recurrent_reference.gated_delta_rule(
            q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, values),
            *recurrent_reference.decay_and_beta(a, b, self.a_log, self.dt_bias), state, batch,
        )  # fmt: skip
        return out, state, conv_state

    def keep_in(self, dtype):
        """States as another dtype: both sides compute in float32 and round once."""
        self.state = self.state.to(dtype)
        return self

    def ours(self, function, **options):
        state, conv_state = self.state.clone(), self.conv_state.clone()
        out = torch.full((self.qkv.shape[0], self.shape.value_heads, self.shape.value_dim), torch.nan)
        function(
            self.qkv, self.ba, self.weight, self.a_log, self.dt_bias, self.positions, self.slots, state, conv_state,
            self.shape, out, **options,
        )  # fmt: skip
        return out, state, conv_state


def close(ours, reference, tol=1e-4):
    for found, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(found, expected, rtol=tol, atol=tol, equal_nan=True)


@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape, width):
    """Sequences at positions where the convolution still looks before their start, and well behind it."""
    starts = [0, 1, 2, 3, 4, 77]
    layer = Layer(shape, starts, [1] * len(starts), width)
    for block_v in (16, None):
        close(layer.ours(delta_decode.decode, block_v=block_v), layer.reference())


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_that_reads_before_it_waits(shape):
    layer = Layer(shape, [0, 3, 77], [1] * 3)
    close(layer.ours(delta_decode.decode, early=True), layer.reference())


def test_states_in_bfloat16():
    """Outputs come from the state before it is rounded; a state may round the other way where both are close to the
    middle, so it may be off by one in its eighth bit."""
    starts, counts = [5, 0, 9, 3, 0], [1, 70, 1, 2, 1]
    layer = Layer(SHAPES[0], starts, counts).keep_in(torch.bfloat16)
    chunks = delta_prefill.plan_chunks(layer.counts, delta_prefill.num_chunks(counts))

    def both(*args):
        delta_prefill.prefill(*args, q_starts=layer.q_starts, counts=layer.counts, chunks=chunks)
        delta_decode.decode(*args, q_starts=layer.q_starts, counts=layer.counts)

    (out, state, ring), (reference_out, reference_state, reference_ring) = layer.ours(both), layer.reference()
    assert state.dtype == torch.bfloat16
    close((out, ring), (reference_out, reference_ring), 5e-4)
    torch.testing.assert_close(state, reference_state, rtol=2**-7, atol=1e-4, equal_nan=True)
    assert (state != reference_state)[~state.isnan()].float().mean() < 0.05


def test_decode_in_a_mixed_step_leaves_longer_sequences_alone():
    layer = Layer(SHAPES[0], [5, 0, 9], [1, 7, 1])
    out, state, conv_state = layer.ours(delta_decode.decode, q_starts=layer.q_starts, counts=layer.counts)
    expected, *states = layer.reference()
    prompt = layer.slots[1]
    torch.testing.assert_close(out[[0, 8]], expected[[0, 8]], rtol=1e-4, atol=1e-4)
    assert out[1:8].isnan().all()
    for found, reference, before in zip((state, conv_state), states, (layer.state, layer.conv_state), strict=True):
        torch.testing.assert_close(found[prompt], before[prompt], equal_nan=True)
        reference[prompt] = found[prompt]
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("counts", [[2], [1, 64, 1, 65, 128, 3], [500] + [1, 70] * 150])
def test_chunks_cover_all_longer_sequences(counts):
    expected = [[i, first] for i, n in enumerate(counts) if n > 1 for first in range(0, n, recurrent_reference.CHUNK)]
    total = delta_prefill.num_chunks(counts)
    assert total == len(expected)
    assert delta_prefill.plan_chunks(torch.tensor(counts), total).tolist() == expected
    more = delta_prefill.plan_chunks(torch.tensor(counts), total + 3)[total:]
    assert (more[:, 1] >= sum(counts)).all(), "a larger list goes on behind all tokens"


@triton.jit
def _tile(x_ptr, row, column):
    return x_ptr + (row * 16 + tl.arange(0, 16))[:, None] * 64 + column * 16 + tl.arange(0, 16)[None, :]


@kernel
def _invert_kernel(x_ptr, y_ptr):
    l00, l11 = tl.load(_tile(x_ptr, 0, 0)), tl.load(_tile(x_ptr, 1, 1))
    l22, l33 = tl.load(_tile(x_ptr, 2, 2)), tl.load(_tile(x_ptr, 3, 3))
    x00, x10, x11, x20, x21, x22, x30, x31, x32, x33 = inverse_64(
        l00, tl.trans(l00), l11, tl.trans(l11), l22, tl.trans(l22), l33, tl.trans(l33),
        tl.load(_tile(x_ptr, 1, 0)), tl.load(_tile(x_ptr, 2, 0)), tl.load(_tile(x_ptr, 2, 1)),
        tl.load(_tile(x_ptr, 3, 0)), tl.load(_tile(x_ptr, 3, 1)), tl.load(_tile(x_ptr, 3, 2)),
    )  # fmt: skip
    tl.store(_tile(y_ptr, 0, 0), x00)
    tl.store(_tile(y_ptr, 1, 0), x10)
    tl.store(_tile(y_ptr, 1, 1), x11)
    tl.store(_tile(y_ptr, 2, 0), x20)
    tl.store(_tile(y_ptr, 2, 1), x21)
    tl.store(_tile(y_ptr, 2, 2), x22)
    tl.store(_tile(y_ptr, 3, 0), x30)
    tl.store(_tile(y_ptr, 3, 1), x31)
    tl.store(_tile(y_ptr, 3, 2), x32)
    tl.store(_tile(y_ptr, 3, 3), x33)


def invert(lower):
    found = torch.zeros(64, 64)
    _invert_kernel((1,), lower, found)
    return found.double(), (torch.eye(64, dtype=torch.float64) + lower.double()).inverse()


def test_the_inverse_of_a_full_triangle():
    """Entries near 1 in all places: powers of such a matrix reach 10**17, its inverse stays below 2."""
    torch.testing.assert_close(*invert((0.9 + 0.1 * torch.rand(64, 64)).tril(-1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("same", [0.0, 0.5, 1.0])
def test_the_inverse_for_keys(same):
    """Of what keys make, from nearly orthogonal to equal ones, entries and inverse have none above 1."""
    k = torch.nn.functional.normalize(same * torch.randn(1, 32) + torch.randn(64, 32) * (1.01 - same), dim=1)
    found, expected = invert((torch.rand(64, 1) * (k @ k.t())).tril(-1))
    assert expected.abs().max() < 1 + 1e-6
    assert (found - expected).abs().max() < 2e-6


@pytest.mark.parametrize(("shape", "width"), [(SHAPES[0], 4), (SHAPES[1], 4), (SHAPES[2], 3)])
def test_prefill(shape, width):
    """New and old sequences, of less than a chunk and of several, from positions where the convolution looks back
    before their start too."""
    starts, counts = [0, 1, 2, 40], [130, 2, 65, 64]
    layer = Layer(shape, starts, counts, width)
    chunks = delta_prefill.plan_chunks(layer.counts, delta_prefill.num_chunks(counts))
    ours = layer.ours(delta_prefill.prefill, q_starts=layer.q_starts, counts=layer.counts, chunks=chunks)
    close(ours, layer.reference(), 5e-4)


def test_both_together_do_a_mixed_step():
    starts, counts = [5, 0, 9, 3, 0], [1, 70, 1, 2, 1]
    layer = Layer(SHAPES[0], starts, counts)
    chunks = delta_prefill.plan_chunks(layer.counts, delta_prefill.num_chunks(counts))

    def both(*args):
        delta_prefill.prefill(*args, q_starts=layer.q_starts, counts=layer.counts, chunks=chunks)
        delta_decode.decode(*args, q_starts=layer.q_starts, counts=layer.counts)

    close(layer.ours(both), layer.reference(), 5e-4)


def test_a_step_that_is_filled_up_is_the_same_step():
    """As graphs of mixed steps are: sequences without tokens, and more chunks than there are."""
    starts, counts = [5, 0, 9, 0, 0], [1, 70, 2, 0, 0]
    layer = Layer(SHAPES[0], starts, counts)
    chunks = delta_prefill.plan_chunks(layer.counts, delta_prefill.num_chunks(counts) + 2)

    def both(*args):
        delta_prefill.prefill(*args, q_starts=layer.q_starts, counts=layer.counts, chunks=chunks)
        delta_decode.decode(*args, q_starts=layer.q_starts, counts=layer.counts)

    out, state, ring = layer.ours(both)
    kept = layer.counts > 0
    layer.q_starts, layer.counts, slots = layer.q_starts[kept], layer.counts[kept], layer.slots
    layer.slots = slots[kept]
    close((out, state, ring), layer.reference(), 5e-4)


@pytest.mark.parametrize("tokens", [3, 65])
def test_gated_norm(tokens):
    x, z, weight = torch.randn(tokens, 5, 32), strided(tokens, 160), torch.randn(32)
    expected = recurrent_reference.gated_rms_norm(x, z.unflatten(-1, (5, 32)), weight, 1e-3)
    close([pointwise_norm.gated_rms_norm(x, z, weight, 1e-3)], [expected.flatten(1)], 1e-5)


def test_the_layer_is_the_same_on_both_devices():
    """A mixed step, then a decode step, by the CPU's kernels and by the GPU's in the interpreter."""
    layer = GatedDeltaNet(48, key_heads=2, value_heads=4, key_dim=16, value_dim=32, conv_width=4, eps=1e-5)
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(torch.randn(parameter.shape) * 0.5, requires_grad=False))
    shapes = layer.cache_layer().shapes
    before = [torch.randn(5, *shape) for shape in shapes]
    slots, starts, counts = torch.tensor([3, 0, 4]), torch.tensor([0, 7, 1]), torch.tensor([70, 1, 3])
    q_starts = counts.cumsum(0) - counts
    mixed = torch.cat([torch.arange(s, s + n) for s, n in zip(starts.tolist(), counts.tolist(), strict=True)])
    after = starts + counts
    inputs = torch.randn(74, 48), torch.randn(3, 48)

    def run(first, second):
        layer.state = tuple(x.clone() for x in before)
        return [layer(inputs[0], first), layer(inputs[1], second), *layer.state]

    ones = torch.ones_like(counts)
    close(
        run(
            DeviceRecurrentBatch(mixed, slots, q_starts, counts, delta_prefill.plan_chunks(counts, 3)),
            DeviceRecurrentBatch(after, slots),
        ),
        run(
            RecurrentBatch.build(mixed, slots, q_starts, counts),
            RecurrentBatch.build(after, slots, ones.cumsum(0) - 1, ones),
        ),
        1e-3,
    )
