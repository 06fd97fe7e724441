"""int8 weights on a CPU that multiplies bytes: exact sums, and activations that keep 16 bits."""

import pytest
import torch

from engine.kernels.gemm import cpu_int8
from engine.kernels.gemm.cpu_int8 import RoundedInt8Weight, SplitInt8Weight
from engine.kernels.runtime.cpu_threads import num_threads
from engine.layers.quant.rounded_inputs import round_rows

needs_bytes = pytest.mark.skipif(not cpu_int8.is_exact(), reason="this CPU does not multiply bytes exactly")


@pytest.fixture(params=["FBGEMM", "oneDNN"])
def library(request, monkeypatch):
    """Both on every CPU: only the choice between them depends on it."""
    monkeypatch.setattr(cpu_int8, "_has_amx", lambda: request.param == "oneDNN")


def numbers(outputs, inner, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-127, 128, (outputs, inner), dtype=torch.int8, generator=generator)
    return q, (torch.rand(outputs, generator=generator) * 0.01 + 0.001).bfloat16()


def rows(count, inner, seed=1):
    return torch.randn(count, inner, generator=torch.Generator().manual_seed(seed))


@needs_bytes
@pytest.mark.parametrize(("outputs", "inner"), [(64, 32), (192, 576), (100, 1000), (1088, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_products(library, outputs, inner, bias):
    q, scale = numbers(outputs, inner)
    added = torch.arange(outputs).float() if bias else None
    weight = SplitInt8Weight(q, scale, added)
    exact = q.double() * scale.double()[:, None]
    assert torch.equal(weight.dequantized(), exact.float())
    for count in (1, 2, 7, 130):
        x = rows(count, inner)
        expected = x.double() @ exact.T + (0 if added is None else added.double())
        found = weight(x)
        assert found.dtype == torch.float32
        # At most half a low of each activation, and what float32 rounds.
        bound = x.abs().amax(1, keepdim=True).double() / 64516 * exact.abs().sum(1)
        assert ((found - expected).abs() <= bound + 1e-6 * expected.abs() + 1e-9).all()


@needs_bytes
def test_it_is_exactly_what_is_stated(library):
    """The arithmetic of the docstring, with the sums in float64, which hold them."""
    q, scale = numbers(96, 320)
    x = rows(5, 320)
    step = x.abs().amax(1, keepdim=True) / 127
    high = (x / step).round()
    low = ((x / step - high) * 254 + 128).round() - 128
    assert low.abs().max() <= 127
    sums = [((part.double() @ q.double().T).float() * scale.float()) for part in (high, low)]
    assert torch.equal(SplitInt8Weight(q, scale)(x), torch.add(*sums, alpha=1 / 254) * step)


@needs_bytes
def test_activations_of_8_bits_are_those_of_checkpoints(library):
    q, scale = numbers(96, 320)
    q[0] = -128
    x = rows(5, 320)
    x[1, 3], x[2, 3] = 9, -9  # 127.5 and -127.5 steps
    step = x.abs().amax(1, keepdim=True) / 127.5
    codes = (x / step).round().clamp(-128, 127)
    assert torch.equal(codes * step, round_rows(x, "int8"))
    sums = (codes.double() @ q.double().T).float() * scale.float()
    assert torch.equal(RoundedInt8Weight(q, scale)(x), sums * step)


@needs_bytes
def test_a_row_is_the_same_alone_and_in_any_batch(library):
    q, scale = numbers(1000, 640)
    weight, x = SplitInt8Weight(q, scale), rows(200, 640).bfloat16()
    whole = weight(x)
    assert whole.dtype == torch.bfloat16
    for count in (1, 2, 3, 16, 77):
        assert torch.equal(weight(x[:count]), whole[:count])
    with num_threads(1):
        assert torch.equal(weight(x), whole)


@needs_bytes
def test_rows_of_zeros_and_of_no_numbers(library):
    q, scale = numbers(64, 96)
    weight, x = SplitInt8Weight(q, scale), rows(6, 96)
    expected = weight(x)
    x[0], x[1, 3], x[2, 5], x[3] = 0, float("inf"), float("nan"), x[3] * 1e-38
    found = weight(x)
    assert (found[0] == 0).all()
    assert not found[1:3].isfinite().any()
    assert found[3].isfinite().all()
    assert found[3].abs().max() < 1e-36
    assert torch.equal(found[4:], expected[4:])


def test_a_cpu_whose_sums_are_cut_off_is_noticed(monkeypatch):
    """As AVX2's instructions do, which add two products in 16 bits."""

    class Saturating:
        def __init__(self, q, scale):
            self.q = q.float()

        def __call__(self, x):
            pairs = torch.einsum("mkp,nkp->mnk", (x + 128).unflatten(1, (-1, 2)), self.q.unflatten(1, (-1, 2)))
            return pairs.clamp(-32768, 32767).sum(-1) - 128 * self.q.sum(1)

    for pack, exact in ((Saturating, False), (broken, False)):
        monkeypatch.setattr(cpu_int8, "_pack", pack)
        assert cpu_int8.is_exact.__wrapped__() is exact


def broken(q, scale):
    raise RuntimeError("Didn't find engine for operation quantized::linear_prepack")


def test_rows_too_long_for_the_sums_are_left_to_others(monkeypatch):
    monkeypatch.setattr(cpu_int8, "is_exact", lambda: True)
    assert cpu_int8.supports(40_000)
    assert not cpu_int8.supports(1 << 16)
