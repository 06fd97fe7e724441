"""A KV cache in int8 with a scale for each token and head: kernels that write and read it, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from test_triton_attention_layer import CHUNK, DIM, HEADS, KV_HEADS, LAYERS, STEP, contexts, layer, width

from engine.kernels.attention import chunks as attention_chunks
from engine.kernels.attention import decode as attention_decode
from engine.kernels.attention import heads as attention_heads
from engine.kernels.attention import kernel_reference as attention_reference
from engine.kernels.pointwise import fused
from engine.kernels.pointwise import reference as pointwise_reference
from engine.layers.context import forward_context
from engine.layers.rope import RotaryEmbedding

PAGE = 16
NAN = float("nan")
ORDERS = {"cpu": False, "gpu": True}  # whether a page has heads before tokens


def int8_caches(num_pages, kv_heads, dim, heads_first):
    """(k, v), (scales of k, scales of v) in one memory, as the worker cuts it: engine/worker/cache.py."""
    half = PAGE * kv_heads * (dim + 4)
    memory = torch.zeros(num_pages * 2 * half, dtype=torch.uint8)
    token, head = (1, PAGE) if heads_first else (kv_heads, 1)
    caches, scales = [], []
    for at in (0, half):
        strides = (2 * half, token * dim, head * dim, 1)
        caches.append(memory.view(torch.int8).as_strided((num_pages, PAGE, kv_heads, dim), strides, at))
        behind = (at + PAGE * kv_heads * dim) // 4
        scales.append(memory.view(torch.float32).as_strided(
            (num_pages, PAGE, kv_heads), (half // 2, token, head), behind))  # fmt: skip
    return caches, scales


class Pages:
    """Random keys and values of sequences of these lengths. What no sequence owns has a scale of NaN."""

    def __init__(self, lengths, kv_heads, dim, order="gpu", seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        num_pages = sum(-(-n // PAGE) for n in lengths) + 1
        order_of_pages = (torch.randperm(num_pages - 1, generator=self.generator) + 1).tolist()
        self.table = torch.zeros(len(lengths) + 1, max(-(-n // PAGE) for n in lengths) + 1, dtype=torch.int32)
        (self.k, self.v), (self.k_scale, self.v_scale) = int8_caches(num_pages, kv_heads, dim, ORDERS[order])
        for scale in (self.k_scale, self.v_scale):
            scale.fill_(NAN)
        for row, length in enumerate(lengths, 1):
            for start in range(0, length, PAGE):
                self.table[row, start // PAGE] = order_of_pages.pop()
            at = torch.arange(length)
            # Magnitudes that differ from token to token, so that another token's scale would be noticed.
            size = torch.rand(2, length, kv_heads, 1, generator=self.generator) * 3 + 0.01
            self.put(row, at, self.randn(length, kv_heads, dim) * size[0], self.randn(length, kv_heads, dim) * size[1])
        self.rows = torch.arange(1, len(lengths) + 1, dtype=torch.int32)

    @property
    def scales(self):
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def put(self, row, at, k, v):
        page, offset = self.table[row, at // PAGE].long(), at % PAGE
        pointwise_reference.store_kv(k, self.k, self.k_scale, page, offset)
        pointwise_reference.store_kv(v, self.v, self.v_scale, page, offset)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator)


def check_decode(
    lengths, group, *, splits=2, dim=32, kv_heads=2, dtype=torch.float32, tol=2e-5, order="gpu", **options
):
    pages = Pages(lengths, kv_heads, dim, order)
    q = pages.randn(len(lengths), group * kv_heads, dim).to(dtype)
    args = (q, pages.k, pages.v, pages.rows, torch.tensor(lengths, dtype=torch.int32), pages.table)
    options = {"scale": dim**-0.5, **pages.scales, **options}
    ours = attention_decode.decode(*args, torch.full_like(q, NAN), splits=splits, **options)
    reference = attention_reference.decode(*args, torch.full_like(q, NAN), **options)
    assert not reference.isnan().any()
    torch.testing.assert_close(ours, reference, rtol=tol, atol=tol)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("group", [1, 7])
def test_decode_at_every_kind_of_length(group, splits, order):
    check_decode([1, 2, 15, 16, 17, 63, 64, 65, 129, 200], group, splits=splits, order=order)


@pytest.mark.parametrize("dim", [64, 80, 128, 512])
def test_decode_head_sizes(dim):
    check_decode([1, 70, 150], 2, dim=dim, kv_heads=3)


@pytest.mark.parametrize("options", [{"window": 5}, {"window": 100}, {"scale": 2.0, "softcap": 3.0}])
def test_decode_window_and_softcap(options):
    check_decode([1, 5, 64, 130, 200], 4, **options)


def test_decode_float16_keeps_the_accuracy_of_its_dtype():
    check_decode([1, 100, 200], 4, dtype=torch.float16, tol=2e-3)


MIXED = [(0, 1), (70, 1), (0, 17), (150, 1), (33, 40), (64, 64), (199, 1), (0, 65)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "options", [{}, {"window": 7}, {"window": 90}, {"scale": 2.0, "softcap": 3.0}, {"dim": 80, "kv_heads": 3},
                {"splits": 4, "shortest": 64}]
)
def test_chunks_and_single_tokens_in_one_launch(options, order):
    options = dict(options)
    dim, kv_heads, group, block_q = options.pop("dim", 32), options.pop("kv_heads", 2), 4, 16
    pages = Pages([start + count for start, count in MIXED], kv_heads, dim, order)
    starts, counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*MIXED, strict=True))
    q_starts = (counts.cumsum(0) - counts).int()
    wide = pages.randn(int(counts.sum()), (group + 2) * kv_heads * dim)
    q, k, v = wide.unflatten(1, (-1, dim)).split((group * kv_heads, kv_heads, kv_heads), 1)
    for row, (start, count) in enumerate(MIXED, 1):
        own = slice(int(q_starts[row - 1]), int(q_starts[row - 1]) + count)
        pages.put(row, torch.arange(start, start + count), k[own], v[own])
    tiles = [(i, first) for i, (_, count) in enumerate(MIXED) for first in range(0, count, block_q)]
    args = (q, k, v, pages.k, pages.v, torch.tensor(tiles, dtype=torch.int32), pages.rows, starts, q_starts, counts,
            pages.table)  # fmt: skip
    options = {"scale": dim**-0.5, "block_q": block_q, **pages.scales, **options}
    ours = attention_chunks.mixed(*args, torch.full_like(q, NAN), **options)
    reference = attention_reference.mixed(*args, torch.full_like(q, NAN), **options)
    assert not reference.isnan().any()
    torch.testing.assert_close(ours, reference, rtol=2e-5, atol=2e-5)


def same_cache(ours, reference):
    """Both caches hold the same scales, and the same numbers but for those that lie between two integers."""
    for (cache, scale), (other, other_scale) in zip(ours, reference, strict=True):
        torch.testing.assert_close(scale, other_scale, rtol=1e-5, atol=0, equal_nan=True)
        assert (cache.int() - other.int()).abs().max() <= 1
        assert (cache != other).float().mean() < 0.01


SLOTS = torch.tensor([17, 0, 63, 31, 32, 5])
POSITIONS = torch.tensor([0, 99, 7, 7, 41, 3])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim, heads, kv_heads", [(64, 4, 2), (80, 2, 3), (128, 2, 1)])
def test_rope_writes_numbers_and_their_scales(dim, heads, kv_heads, order):
    torch.manual_seed(0)
    qkv = torch.randn(6, (heads + 2 * kv_heads) * dim) * torch.rand(6, 1) * 20
    qkv[3] = 0
    angle = torch.rand(100, 1, dim // 2) * 6
    found = []
    for kernels in (fused, pointwise_reference):
        caches, scales = int8_caches(4, kv_heads, dim, ORDERS[order])
        data = qkv.clone()
        q = kernels.rope_and_write_kv(data, angle.cos(), angle.sin(), POSITIONS, SLOTS, *caches, heads,
                                      k_scale=scales[0], v_scale=scales[1])  # fmt: skip
        found.append((q, data, list(zip(caches, scales, strict=True))))
    (q, data, ours), (other_q, other_data, reference) = found
    torch.testing.assert_close(q, other_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(data, other_data, rtol=1e-5, atol=1e-5)
    same_cache(ours, reference)
    for cache, scale in ours:
        assert int((scale > 0).sum()) == 6 * kv_heads  # and nothing else is written
        assert (cache[1, 1].abs().amax(-1) == 127).all()  # slot 17: the whole range is used
        assert not cache[1, 15].any()  # slot 31: zeros stay zeros
    values = qkv[:, (heads + kv_heads) * dim :].unflatten(1, (kv_heads, dim))
    stored = ours[1][0][1, 1].float() * ours[1][1][1, 1][:, None]
    assert ((stored - values[0]).abs() <= ours[1][1][1, 1][:, None] * 0.501).all()


@pytest.mark.parametrize("broken", [NAN, float("inf")])
@pytest.mark.parametrize("kernels", [fused, pointwise_reference], ids=["triton", "reference"])
def test_a_number_that_is_none_spoils_its_own_row_alone(kernels, broken):
    qkv = torch.randn(6, 4 * 64)
    qkv[2, 3 * 64 + 5] = broken  # a value of slot 63
    angle = torch.rand(100, 1, 32)
    caches, scales = int8_caches(4, 1, 64, heads_first=True)
    kernels.rope_and_write_kv(qkv, angle.cos(), angle.sin(), POSITIONS, SLOTS, *caches, 2, k_scale=scales[0],
                              v_scale=scales[1])  # fmt: skip
    assert scales[1][3, 15].isnan().all()
    assert int(scales[1].isnan().sum()) == 1
    assert not scales[0].isnan().any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{"v_norm": True}, {"v_norm": True, "k_eq_v": True}, {}])
def test_heads_write_numbers_and_their_scales(options, order):
    torch.manual_seed(0)
    dim, heads, kv_heads = 24, 4, 3
    x = torch.randn(6, (heads + (2 - options.get("k_eq_v", False)) * kv_heads) * dim)
    table = RotaryEmbedding(dim, 100, {"rope_theta": 1e4})
    found = []
    for kernels in (attention_heads, attention_reference):
        caches, scales = int8_caches(4, kv_heads, dim, ORDERS[order])
        q, own = kernels.heads_and_write_kv(
            x, table.cos, table.sin, table.distance, POSITIONS, SLOTS, *caches, heads, keep=True, k_scale=scales[0],
            v_scale=scales[1], **options,
        )  # fmt: skip
        found.append((q, own, list(zip(caches, scales, strict=True))))
    torch.testing.assert_close(found[0][:2], found[1][:2], rtol=1e-5, atol=1e-5)
    same_cache(found[0][2], found[1][2])


@pytest.mark.parametrize(("kind", "borrower"), [
    ("llama", False), ("qwen3", False), ("qwen3.5", False), ("gemma2", False), ("gemma4 full", True),
])  # fmt: skip
def test_a_layer_on_a_gpu_and_on_a_cpu(kind, borrower):
    """Both paths over an int8 cache, beside the CPU's over a cache in float32."""
    torch.manual_seed(0)
    rope, options = LAYERS[kind]
    layers = [layer(options)]
    if borrower:
        fewer = {name: value for name, value in options.items() if name not in ("k_norm", "k_eq_v")}
        layers.append(layer(fewer, own_kv=False))
        layers[1].borrow_from(layers[0])
    table = RotaryEmbedding(DIM, 64, rope)
    block_table = torch.tensor([[0, 0, 0], [3, 5, 0], [1, 4, 2]], dtype=torch.int32)
    before = torch.randn(2, 6, PAGE, KV_HEADS, DIM)
    plain = before.clone()
    every = torch.arange(6 * PAGE)
    by_cpu, by_device = (int8_caches(6, KV_HEADS, DIM, first) for first in (False, True))
    for caches, scales in (by_cpu, by_device):
        for cache, scale, numbers in zip(caches, scales, before, strict=True):
            pointwise_reference.store_kv(numbers.flatten(0, 1), cache, scale, every // PAGE, every % PAGE)
    for seqs in (CHUNK, STEP):
        inputs = [torch.randn(sum(n for _, n in seqs), width(attention)) for attention in layers]
        (cpu, cpu_rope), (device, device_rope) = contexts(seqs, table, block_table)

        def run(context, turn, caches, scales, inputs=inputs):
            outs = []
            for attention, x in zip(layers, inputs, strict=True):
                (attention.k_cache, attention.v_cache), (attention.k_scale, attention.v_scale) = caches, scales
                with forward_context(context):
                    outs.append(attention(x.clone(), turn))
            return torch.stack(outs)

        ours, on_device = run(cpu, cpu_rope, *by_cpu), run(device, device_rope, *by_device)
        reference = run(cpu, cpu_rope, plain, (1.0, 1.0))
        same_cache(zip(*by_device, strict=True), zip(*by_cpu, strict=True))
        assert ours.shape[-1] == HEADS * DIM
        for outputs in (ours, on_device):
            assert (outputs - reference).norm() < 0.02 * reference.norm()
        # A chunk on a GPU attends to its own keys before they are rounded; a single token is read from the cache.
        assert (on_device - ours).norm() < (1e-3 if seqs is STEP else 0.02) * ours.norm()
