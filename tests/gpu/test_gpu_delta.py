"""Gated DeltaNet's kernels on a GPU, in the shape of Qwen3.6-27B, against their references on the CPU."""

import itertools
from functools import cache

import pytest
import torch

from engine.kernels.recurrent import decode as delta_decode
from engine.kernels.recurrent import prefill as delta_prefill
from engine.kernels.recurrent import reference as recurrent_reference
from engine.kernels.recurrent.reference import RecurrentBatch
from engine.kernels.recurrent.shape import DeltaShape
from engine.kernels.runtime.compile_ahead import compile_ahead
from engine.kernels.runtime.launcher import recording

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

SHAPE = DeltaShape(16, 48, 128, 128)
CHANNELS, WIDTH = 2 * 16 * 128 + 48 * 128, 4
BATCHES, BLOCKS, DTYPES = (1, 37), (16, 32, 64, 128, None), (torch.float32, torch.bfloat16)


class Step:
    """A step's inputs, and states in slots that lie apart, as those of the worker's arena do."""

    def __init__(self, starts: list[int], counts: list[int], dtype: torch.dtype, *, same_keys: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        tokens, batch = sum(counts), len(counts)
        qkvz = random(tokens, CHANNELS + 48 * 128)
        if same_keys:  # every token with nearly the same key: the fullest systems there are
            qkvz[:, : 2 * 16 * 128] = qkvz[:1, : 2 * 16 * 128].abs() + 0.01 * qkvz[:, : 2 * 16 * 128]
        self.qkvz, self.ba, self.weight = (x.to(dtype) for x in (qkvz, random(tokens, 96), 0.5 * random(CHANNELS, 4)))
        self.a_log, self.dt_bias = random(48), random(48)
        self.state = 0.1 * random(batch + 2, 48 * 128 * 128 + 64)
        self.conv_state = random(batch + 2, WIDTH * CHANNELS + 64).to(dtype)
        self.counts = torch.tensor(counts)
        self.q_starts = self.counts.cumsum(0) - self.counts
        self.positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        self.slots = torch.randperm(batch + 2, generator=generator)[:batch]
        for slot, start in zip(self.slots.tolist(), starts, strict=True):
            if start == 0:
                self.state[slot] = self.conv_state[slot] = torch.nan

    def states(self, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.state.to(device, copy=True)[:, : 48 * 128 * 128].unflatten(1, (48, 128, 128))
        ring = self.conv_state.to(device, dtype, copy=True)[:, : WIDTH * CHANNELS].unflatten(1, (WIDTH, CHANNELS))
        return state, ring

    @cache  # noqa: B019 (steps live as long as the module)
    def reference(self) -> list[torch.Tensor]:
        """In float32, from the same numbers; computed on the CPU, and then where the kernels' results are."""
        state, ring = self.states("cpu", torch.float32)
        batch = RecurrentBatch.build(self.positions, self.slots, self.q_starts, self.counts)
        mixed = recurrent_reference.causal_conv(self.qkvz[:, :CHANNELS].float(), self.weight.float(), ring, batch)
        q, k, v = mixed.split((2048, 2048, 6144), -1)
        b, a = self.ba.float().chunk(2, -1)
        g, beta = recurrent_reference.decay_and_beta(a, b, self.a_log, self.dt_bias)
        heads = q.unflatten(-1, (16, 128)), k.unflatten(-1, (16, 128)), v.unflatten(-1, (48, 128))
        return [x.cuda() for x in (recurrent_reference.gated_delta_rule(*heads, g, beta, state, batch), state, ring)]

    def ours(self, *, block_v: int | None = None, kept_in: torch.dtype = torch.float32) -> list[torch.Tensor]:
        state, ring = self.states("cuda", self.qkvz.dtype)
        state = state.to(kept_in)
        out = torch.full((len(self.positions), 48, 128), torch.nan, dtype=self.qkvz.dtype, device="cuda")
        positions, slots, q_starts, counts = (
            x.cuda() for x in (self.positions, self.slots, self.q_starts, self.counts)
        )
        weights = self.weight.cuda(), self.a_log.cuda(), self.dt_bias.cuda()
        inputs = self.qkvz.cuda()[:, :CHANNELS], self.ba.cuda(), *weights, positions, slots, state, ring, SHAPE, out
        total = delta_prefill.num_chunks(self.counts.tolist())
        if total:
            chunks = delta_prefill.plan_chunks(counts, total)
            delta_prefill.prefill(*inputs, q_starts=q_starts, counts=counts, chunks=chunks)
            delta_decode.decode(*inputs, q_starts=q_starts, counts=counts, block_v=block_v)
        else:
            delta_decode.decode(*inputs, block_v=block_v)
        return [x.float() for x in (out, state, ring)]


# A step's numbers and its reference take seconds, and serve several tests.


@cache
def decode_step(batch: int, dtype: torch.dtype) -> Step:
    return Step([(5 * i) % 23 for i in range(batch)], [1] * batch, dtype)


@cache
def mixed_step(dtype: torch.dtype, *, same_keys: bool) -> Step:
    return Step([0, 9, 128, 0, 3, 0, 2], [1000, 1, 64, 65, 1, 3, 200], dtype, same_keys=same_keys)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The kernels of all these tests, compiled side by side: one after the other they take most of the time."""
    with recording() as jobs:
        for dtype, kept_in in itertools.product(DTYPES, DTYPES):
            for batch, block_v in itertools.product(BATCHES, BLOCKS):
                decode_step(batch, dtype).ours(block_v=block_v, kept_in=kept_in)
            mixed_step(dtype, same_keys=False).ours(kept_in=kept_in)
    compile_ahead(jobs, torch.cuda.get_device_capability())


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Of all numbers together, relative to them."""
    assert torch.equal(ours.isnan(), reference.isnan())
    return float((ours - reference).nan_to_num().norm() / reference.nan_to_num().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept_in", DTYPES)
@pytest.mark.parametrize("block_v", BLOCKS)
@pytest.mark.parametrize("batch", BATCHES)
def test_decode(batch: int, block_v: int | None, kept_in: torch.dtype, dtype: torch.dtype) -> None:
    step = decode_step(batch, dtype)
    limit = 1e-5 if dtype == kept_in == torch.float32 else 1e-2
    for ours, reference in zip(step.ours(block_v=block_v, kept_in=kept_in), step.reference(), strict=True):
        assert error(ours, reference) < limit


@pytest.mark.parametrize("same_keys", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept_in", DTYPES)
def test_mixed_steps(dtype: torch.dtype, kept_in: torch.dtype, *, same_keys: bool) -> None:
    step = mixed_step(dtype, same_keys=same_keys)
    limit = 2e-3 if dtype == kept_in == torch.float32 else 3e-2
    for ours, reference in zip(step.ours(kept_in=kept_in), step.reference(), strict=True):
        assert error(ours, reference) < limit
