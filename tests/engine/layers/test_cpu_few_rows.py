"""Few rows on a Zen 4: weights are kept in fp16, too, where memory allows it. Both ways give the same numbers, and a
request with a seed meets only one of them."""

import pytest
import torch
from torch import nn

from engine import LLM, SamplingParams
from engine.kernels.gemm import cpu_format, fp16_weight
from engine.layers.linear import Linear
from engine.layers.quant import cpu_few_rows
from engine.layers.quant.unquantized import ON_PACKED
from engine.layers.repeatable import repeatable

MEMORY = 1 << 30
needs_both = pytest.mark.skipif(
    not (fp16_weight.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this CPU has no bf16 instructions, or PyTorch has no FBGEMM",
)


def linear(bias=False, batch_invariant=False):
    layer = Linear(600, 512, bias=bias)
    layer.batch_invariant = batch_invariant
    layer.weight = nn.Parameter((torch.randn(512, 600) * 0.05).bfloat16(), requires_grad=False)
    if bias:
        layer.bias = nn.Parameter(torch.randn(512).bfloat16(), requires_grad=False)
    layer.finalize()
    assert layer.gemm is ON_PACKED
    return layer


@pytest.fixture
def model(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(cpu_format, "reads_bf16_slowly", lambda: True)
    return nn.ModuleList(linear(bias=i == 3) for i in range(4))


def kept(model):
    return [layer.few_rows is not None for layer in model]


@needs_both
def test_the_plan_counts_copies(model):
    before = [layer.packed_bytes for layer in model]
    cpu_few_rows.keep_copies(model, MEMORY)
    assert kept(model) == [True] * 4
    assert all(layer.packed_bytes > 1.9 * size for layer, size in zip(model, before, strict=True))


@needs_both
def test_other_cpus_keep_one_form(model, monkeypatch):
    monkeypatch.setattr(cpu_format, "reads_bf16_slowly", lambda: False)
    cpu_few_rows.keep_copies(model, MEMORY)
    assert kept(model) == [False] * 4


@needs_both
def test_copies_need_memory_to_spare(model, monkeypatch):
    need = sum(layer.packed.nbytes for layer in model)
    cpu_few_rows.keep_copies(model, 4 * need - 1)
    assert kept(model) == [False] * 4
    monkeypatch.setattr(cpu_few_rows, "_MOST_BYTES", need - 1)
    cpu_few_rows.keep_copies(model, MEMORY)
    assert kept(model) == [False] * 4


@needs_both
def test_a_weight_that_fp16_cannot_hold_stays_alone(model):
    wild = linear()
    wild.packed = torch.ops.mkldnn._reorder_linear_weight(torch.full((512, 600), float("inf")).bfloat16(), 1)
    model.append(wild)
    cpu_few_rows.keep_copies(model, MEMORY)
    assert kept(model) == [True] * 4 + [False]
    assert wild(torch.randn(1, 600).bfloat16()).shape == (1, 512)


@needs_both
def test_batch_invariant_layers_have_one_way_for_all_rows(model):
    model.append(linear(batch_invariant=True))
    cpu_few_rows.keep_copies(model, MEMORY)
    assert kept(model) == [True] * 4 + [False]


@needs_both
@pytest.mark.parametrize("rows", range(1, 5))
def test_all_ways_give_the_same_numbers(model, rows):
    """In bf16: where a sum lies between two of its numbers, the order of summation may decide."""
    torch.manual_seed(1)
    x = torch.randn(rows, 600).bfloat16()
    with torch.inference_mode():
        due = [layer(x) for layer in model]
        cpu_few_rows.keep_copies(model, MEMORY)
        with repeatable(True):
            assert all(torch.equal(layer(x), y) for layer, y in zip(model, due, strict=True)), "as without copies"
        for layer, y in zip(model, due, strict=True):
            found = layer(x)
            torch.testing.assert_close(found, y, rtol=2.0**-7, atol=1e-3)
            assert (found == y).float().mean() > 0.97
            for row in range(rows if rows < 4 else 0):
                assert torch.equal(layer(x[row : row + 1]), found[row : row + 1]), "a row's result is its own"


@needs_both
def test_a_seed_is_answered_alike_alone_and_beside_others(smollm2_dir, monkeypatch):
    monkeypatch.setattr(cpu_format, "reads_bf16_slowly", lambda: True)
    used = []
    run = fp16_weight.Fp16Weight.__call__
    monkeypatch.setattr(fp16_weight.Fp16Weight, "__call__", lambda self, x: used.append(len(x)) or run(self, x))
    llm = LLM(model=smollm2_dir, dtype="bfloat16", device="cpu", max_model_len=256, kv_cache_memory_bytes=64 << 20)
    prompts = [f"Tell me about the number {i}." for i in range(6)]
    free, seeded = (SamplingParams(temperature=1, max_tokens=40, seed=seed) for seed in (None, 7))
    [alone] = llm.generate(prompts[:1], seeded, use_tqdm=False)
    assert not used
    first, *_ = llm.generate(prompts, [seeded] + [free] * 5, use_tqdm=False)
    assert first.outputs[0].token_ids == alone.outputs[0].token_ids
    used.clear()
    llm.generate(prompts[:1], free, use_tqdm=False)
    assert set(used) <= {1, 2, 3}
    assert used
