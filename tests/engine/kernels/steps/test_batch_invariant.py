"""`--batch-invariant`: a request's numbers are the same bits alone, beside others, and however its prompt is cut up."""

import json
from pathlib import Path

import pytest
import torch
from forks import Forks

pytest.importorskip("triton")

from engine.capabilities import check_capabilities
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels.attention.batch_invariant import attention, tile_tokens
from engine.kernels.gemm.batch_invariant import matmul
from engine.kernels.pointwise import reference as pointwise_reference
from engine.kernels.pointwise.quantize import quantize_rows
from engine.layers.moe import RoutedExperts, Routing, choose_experts
from engine.models.batch_invariant import make_batch_invariant
from engine.models.config.model import ModelConfig
from engine.models.registry import model_class

HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="module")
def products_of_any_shape(mended_interpreter):
    from interpreter import exact_products

    with pytest.MonkeyPatch.context() as patch:
        exact_products(patch.setattr)
        yield


# gemma4-e2b: windows, keys that layers borrow, and layers that go on with the last tokens alone.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen3", "gemma4-e2b"])
def test_a_request_gives_the_same_bits_in_any_step(interpreting: Forks, family: str) -> None:
    done = interpreting.run(HERE / "run_invariant.py", family, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    alone, *others = said["invariant"]
    assert [len(request) for request in alone] == [2, 2 + 2, 2, 8 + 2]
    assert others == [alone, alone]
    usual, *others = said["usual"]
    if family == "qwen3":  # the library's sums of so few numbers depend on the batch on most CPUs, not in all shapes
        assert others != [usual], "the switch is what makes them equal"
    for ours, theirs in zip(alone, usual, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-3)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("outputs, inner", [(100, 200), (64, 512)])
def test_a_row_of_a_product_is_the_same_in_any_place(outputs: int, inner: int, fp8: bool) -> None:
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(150, inner, generator=generator)
    weight, bias = torch.randn(outputs, inner, generator=generator), torch.randn(outputs, generator=generator)
    scales = None
    wanted = x @ weight.t() + bias
    if fp8:
        (x, x_scale), (weight, scale) = quantize_rows(x), pointwise_reference.quantize_rows(weight)
        scales = x_scale, scale
        wanted = (x.float() * x_scale[:, None]) @ (weight.float() * scale[:, None]).t() + bias

    def rows(some: slice) -> torch.Tensor:
        of_rows = None if scales is None else (scales[0][some].contiguous(), scales[1])
        return matmul(x[some], weight, bias, scales=of_rows, dtype=torch.float32)

    whole = rows(slice(150))
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-3)
    for first, count in ((0, 1), (3, 2), (5, 64), (7, 65), (149, 1)):
        assert torch.equal(rows(slice(first, first + count)), whole[first : first + count])


def test_experts_have_the_same_tiles_for_any_number_of_tokens() -> None:
    generator = torch.Generator().manual_seed(2)
    experts = RoutedExperts(32, 16, 4)
    experts.batch_invariant = True
    for linear in (experts.gate_up_proj, experts.down_proj):
        weight = torch.randn(linear.weight.shape, generator=generator)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    x, logits = torch.randn(40, 32, generator=generator), torch.randn(40, 4, generator=generator)
    routing = choose_experts(logits, 2)

    def rows(some: slice) -> torch.Tensor:
        part = Routing(*(each[some].contiguous() for each in routing[:2]))
        return experts._on_gpu(x[some], part, None)

    whole = rows(slice(40))
    torch.testing.assert_close(whole, experts._by_expert(x, routing), rtol=1e-4, atol=1e-4)
    for first, count in ((0, 1), (3, 2), (5, 5), (39, 1)):
        assert torch.equal(rows(slice(first, first + count)), whole[first : first + count])


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("cache", [torch.float32, torch.float8_e4m3fn])
def test_attention_does_not_depend_on_how_a_prompt_is_cut(cache: torch.dtype, window: int | None) -> None:
    """Keys and values of a chunk come from the projection or from the cache, queries stand anywhere in a tile."""
    length, heads, kv_heads, dim, page = 90, 4, 2, 32, 16
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float16 if cache.itemsize == 1 else torch.float32
    q = torch.randn(length, heads, dim, generator=generator).to(dtype)
    k, v = (torch.randn(length, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    pages = -(-length // page)
    k_cache, v_cache = (torch.full((pages + 1, page, kv_heads, dim), float("nan")).to(cache) for _ in range(2))
    for new, old in ((k, k_cache), (v, v_cache)):
        old.view(-1, kv_heads, dim)[page : page + length] = new.to(cache)
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]

    def chunk(start: int, count: int, *, own: bool) -> torch.Tensor:
        part, size = slice(start, start + count), tile_tokens(heads // kv_heads)
        tiles = torch.tensor([(0, first) for first in range(0, count, size)], dtype=torch.int32)
        row, begin, place, many = (torch.tensor([n], dtype=torch.int32) for n in (0, start, 0, count))
        return attention(
            q[part], (k[part], v[part]) if own else None, k_cache, v_cache, tiles, row, begin, place, many, table,
            torch.empty(count, heads, dim, dtype=dtype), block_q=size, scale=0.2, window=window,
        )  # fmt: skip

    whole = chunk(0, length, own=True)
    rounded = [x.to(cache).float() for x in (k, v)]
    scores = torch.einsum("qhd,khd->hqk", q.float(), rounded[0].repeat_interleave(2, 1)) * 0.2
    at = torch.arange(length)
    seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - (window or length))
    wanted = torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), rounded[1].repeat_interleave(2, 1)
    )
    torch.testing.assert_close(whole.float(), wanted, rtol=2e-3, atol=2e-3)
    for start, count in ((0, 1), (0, 37), (13, 50), (64, 1), (70, 20), (89, 1)):
        for own in (True, False):
            assert torch.equal(chunk(start, count, own=own), whole[start : start + count]), (start, count, own)


def test_it_is_refused_where_it_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--batch-invariant is not available on cpu"):
        check_capabilities(EngineConfig(tmp_path, batch_invariant=True), "cpu")
    check_capabilities(EngineConfig(tmp_path, batch_invariant=True), "cuda")
    monkeypatch.syspath_prepend(str(HERE.parents[2] / "gpu"))
    from gpu_kit import FAMILIES, SHAPE  # pyright: ignore[reportMissingImports]

    (tmp_path / "config.json").write_text(json.dumps(SHAPE | FAMILIES["qwen3.5"]))
    config = ModelConfig.load(tmp_path)
    with pytest.raises(ConfigError, match="recurrent layers"):
        make_batch_invariant(model_class(config)(config, 64))
    with pytest.raises(ConfigError, match="without fp8 units"):
        make_batch_invariant(model_class(config)(config, 64), fp8=True, fp8_units=False)
