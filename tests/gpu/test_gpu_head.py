"""Output heads in int8 on a GPU: each way against float32 arithmetic with the same numbers, and in a model."""

from pathlib import Path

import pytest
import torch
from gpu_kit import FAMILIES, checkpoint, generated, model_of, on_gpu, prompts
from torch import nn

from engine import SamplingParams
from engine.layers.embed import LMHead
from engine.layers.quant import head
from engine.layers.quant.head import BESIDE_FP8, BESIDE_INT4, FEW_ROWS

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
LIMIT = 4e-3  # relative error; rounding the result to bf16 alone costs 1.7e-3
SHAPES = [(40_000, 2816), (33_001, 976), (1000, 1024)]  # many outputs, a side that no block divides, few outputs


def head_of(method, outputs: int, inner: int, dtype: torch.dtype) -> LMHead:
    torch.manual_seed(0)
    layer = LMHead(inner, outputs)
    layer.use(method)
    layer.weight = nn.Parameter(torch.randn(outputs, inner, device=DEVICE, dtype=dtype), requires_grad=False)
    layer.finalize()
    return layer


def off(found: torch.Tensor, due: torch.Tensor) -> float:
    return float((found.float() - due).norm() / due.norm())


@pytest.mark.parametrize(("outputs", "inner"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_every_number_of_rows(outputs: int, inner: int, dtype: torch.dtype) -> None:
    beside_fp8, beside_int4 = (head_of(method, outputs, inner, dtype) for method in (BESIDE_FP8, BESIDE_INT4))
    exact = beside_fp8.weight.float()
    head.keep_copy(beside_fp8, beside_fp8.loaded_bytes, 1 << 40)
    copy = beside_fp8.few_rows
    assert torch.equal(beside_int4.weight, copy.values)
    assert beside_int4.scale is not None
    numbers = copy.values.float() * copy.scale[:, None]
    assert off(numbers, exact) < 0.01
    for rows in (1, 2, 3, 4, 8, 17, 33, FEW_ROWS, FEW_ROWS + 1, 130, 300):
        x = torch.randn(rows, inner, device=DEVICE, dtype=dtype)
        assert off(beside_int4(x), x.float() @ numbers.T) < LIMIT, rows
        due = numbers if rows <= FEW_ROWS else exact
        assert off(beside_fp8(x), x.float() @ due.T) < LIMIT, rows


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_fp8_answers_with_the_copy(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows read the copy, whose numbers are taken away here: then every score is the same."""
    monkeypatch.setattr(head, "_LEAST_SHARE", 1000)
    llm = on_gpu(checkpoint(tmp_path / family, family), quantization="fp8", max_num_seqs=8)
    copies = [module.few_rows for module in model_of(llm).modules() if isinstance(module, LMHead)]
    assert len(copies) == 1
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    assert any(any(answer) for answer in generated(llm, prompts(4), params))
    with torch.inference_mode():
        copies[0].scale.zero_()
    assert not any(any(answer) for answer in generated(llm, prompts(4), params))
