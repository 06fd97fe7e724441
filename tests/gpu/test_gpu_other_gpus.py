"""The ways of other GPUs, forced upon this one: no fp8 units (A100), and a library without row-wise products."""

from pathlib import Path

import pytest
import torch
from gpu_kit import checkpoint, fp8_on_cpu, generated, model_of, on_cpu, on_gpu, prompts
from gpu_scores import lost

from engine import SamplingParams
from engine.kernels.gemm import autotune, scaled
from engine.kernels.gemm.scaled_kernel import scaled_product
from engine.kernels.pointwise import reference as pointwise_reference
from engine.kernels.runtime import launcher
from engine.kernels.runtime.gpu_target import Target
from engine.layers.linear import Linear
from engine.layers.quant.fp8 import ON_WIDENED_WEIGHT

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("this GPU goes these ways by itself", allow_module_level=True)

A100 = Target((8, 0), 166_912, 108)
DEVICE = torch.device("cuda")


@pytest.fixture
def like_an_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are an A100's, and kernels get e4m3 numbers as bytes; the machine code is still this GPU's."""
    monkeypatch.setattr(launcher, "_target_of", lambda device: A100)
    monkeypatch.setitem(launcher._POINTERS, torch.float8_e4m3fn, "*u8")
    monkeypatch.setattr(autotune, "_chosen", {})


def test_all_256_numbers_widen_exactly_in_registers(like_an_a100: None) -> None:
    """By the instructions that the interpreter does not run: a product with the identity, in bf16 and in fp16."""
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    numbers[(numbers & 0x7F) == 0x7F] = 0  # NaN: no weight has it
    weight = numbers.view(16, 16).repeat(4, 4).contiguous().view(torch.float8_e4m3fn)
    one = torch.ones(64, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float16):
        y = scaled_product(torch.eye(64, dtype=dtype, device=DEVICE), weight, one)
        torch.testing.assert_close(y.t().float(), weight.float(), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 40, 128, 129, 1000])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16 activations", "fp8 activations"])
def test_products_of_our_kernel(rows: int, fp8: bool, request: pytest.FixtureRequest) -> None:
    if not fp8:
        request.getfixturevalue("like_an_a100")
    torch.manual_seed(0)
    for outputs, inner in ((4096, 4096), (528, 976)):
        x = torch.randn(rows, inner, dtype=torch.bfloat16, device=DEVICE)
        weight, scale = pointwise_reference.quantize_rows(torch.randn(outputs, inner, device=DEVICE))
        bias, x_scale, wide = torch.randn(outputs, dtype=torch.bfloat16, device=DEVICE), None, x.float()
        if fp8:
            x, x_scale = pointwise_reference.quantize_rows(x)
            wide = x.float() * x_scale[:, None]
        y = scaled_product(x, weight, scale, bias, x_scale=x_scale, dtype=torch.bfloat16).float()
        plain = wide @ (weight.float() * scale[:, None]).t() + bias.float()
        assert float((y - plain).norm() / plain.norm()) < 8e-3


def test_this_library_is_tried_at_load(tmp_path: Path) -> None:
    assert scaled.refusal(torch.bfloat16) is None or torch.cuda.get_device_capability() != (9, 0)
    llm = on_gpu(checkpoint(tmp_path / "llama", "llama"), quantization="fp8", max_num_seqs=8)
    assert "fp8 weights, fp8 activations" in llm.engine.info()["memory_plan"]


@pytest.mark.parametrize("family", ["llama", "gemma4-26b", "qwen3.5"])
def test_a_model_keeps_its_scores_where_the_library_refuses(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No product of a step raises; scores are off by what the same roundings cost on the CPU."""

    def unsupported(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(autotune, "_chosen", {})
    monkeypatch.setattr(torch, "_scaled_mm", unsupported)
    scaled.refusal.cache_clear()
    try:
        model = checkpoint(tmp_path / family, family)
        steps = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
        exact, llm = on_cpu(model), on_gpu(model, quantization="fp8", kv_cache_dtype="fp8", **steps)
        found, due = lost(llm, exact), lost(fp8_on_cpu(model, **steps), exact)
        assert "CUBLAS_STATUS_NOT_SUPPORTED" in llm.engine.info()["memory_plan"]
        assert found[0] < 1.12 * due[0]
        assert found[1] < 1.6 * due[1]
    finally:
        scaled.refusal.cache_clear()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma4-26b", "qwen3.5"])
def test_a_model_runs_with_fp8_weights_and_wide_activations(family: str, tmp_path: Path, like_an_a100: None) -> None:
    """It loses less than with fp8 activations, with graphs and a KV cache in fp8."""
    model = checkpoint(tmp_path / family, family)
    steps = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
    llm = on_gpu(model, quantization="fp8", kv_cache_dtype="fp8", **steps)
    assert "fp8 weights, bf16 activations" in llm.engine.info()["memory_plan"]
    linears = [m for m in model_of(llm).modules() if isinstance(m, Linear) and m.scale is not None]
    assert linears
    assert all(m.gemm is ON_WIDENED_WEIGHT for m in linears)
    exact = on_cpu(model)
    found, due = lost(llm, exact), lost(fp8_on_cpu(model, **steps), exact)
    print(f"{family}: off by {found[0]:.2e} and {found[1]:.2e}; with fp8 activations {due[0]:.2e} and {due[1]:.2e}")
    assert found[0] < 1.12 * due[0]
    assert found[1] < 1.6 * due[1]
    answers = generated(llm, prompts(12, longest=200), SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert [len(answer) for answer in answers] == [8] * 12


def test_an_8b_share_of_24_gb_keeps_to_its_plan(tmp_path: Path) -> None:
    """With default flags and as much memory as a GPU of 24 GB gives: the plan holds, and requests are served."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    llm = on_gpu(checkpoint(tmp_path / "llama", "llama"), gpu_memory_utilization=0.9 * (24 << 30) / total)
    answers = generated(llm, prompts(8), SamplingParams(max_tokens=4, ignore_eos=True))
    assert [len(answer) for answer in answers] == [4] * 8
