"""Paged attention kernels against their references, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.attention import chunks as attention_chunks
from engine.kernels.attention import decode as attention_decode
from engine.kernels.attention import kernel_reference as attention_reference
from engine.kernels.runtime.gpu_target import Target

PAGE = 16
NAN = float("nan")


class Pages:
    """Caches of random keys and values for sequences of given lengths; every slot that no sequence owns is NaN."""

    def __init__(self, lengths, kv_heads, dim, dtype=torch.float32, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        rows = len(lengths) + 1
        num_pages = sum(-(-n // PAGE) for n in lengths) + 1
        order = (torch.randperm(num_pages - 1, generator=self.generator) + 1).tolist()  # page 0: the null page
        width = max(-(-n // PAGE) for n in lengths) + 1
        self.table = torch.zeros(rows, width, dtype=torch.int32)
        # One tensor for both caches: the kernels must follow the strides of a view.
        both = torch.full((num_pages, 2, PAGE, kv_heads, dim), NAN).to(dtype)
        self.k, self.v = both[:, 0], both[:, 1]
        for row, length in enumerate(lengths, 1):
            for start in range(0, length, PAGE):
                page = order.pop()
                self.table[row, start // PAGE] = page
                n = min(PAGE, length - start)
                self.k[page, :n] = self.randn(n, kv_heads, dim).to(dtype)
                self.v[page, :n] = self.randn(n, kv_heads, dim).to(dtype)
        self.rows = torch.arange(1, rows, dtype=torch.int32)

    def put(self, at, k, v):
        for cache, new in ((self.k, k), (self.v, v)):
            as_bits = torch.uint8 if cache.dtype.itemsize == 1 else cache.dtype
            cache.view(as_bits)[at] = new.to(cache.dtype).view(as_bits)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator)


def check_decode(lengths, group, *, splits, dim=32, kv_heads=2, dtype=torch.float32, cache=None, tol=2e-5, **options):
    pages = Pages(lengths, kv_heads, dim, cache or dtype)
    wide = pages.randn(len(lengths), (group + 2) * kv_heads * dim).to(dtype)  # q is a view of the fused projection
    q = wide[:, : group * kv_heads * dim].unflatten(1, (-1, dim))
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    args = (q, pages.k, pages.v, pages.rows, seq_lens, pages.table)
    shape = (len(lengths), group * kv_heads, dim)
    options = {"scale": dim**-0.5, **options}
    ours = attention_decode.decode(*args, torch.full(shape, NAN, dtype=dtype), splits=splits, **options)
    options.pop("shortest", None)  # changes the order of summation, not the result
    reference = attention_reference.decode(*args, torch.full(shape, NAN, dtype=dtype), **options)
    assert not reference.isnan().any()
    torch.testing.assert_close(ours, reference, rtol=tol, atol=tol)
    return ours


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_decode_at_every_kind_of_length(group, splits):
    check_decode([1, 2, 15, 16, 17, 63, 64, 65, 129, 200], group, splits=splits)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 512])
def test_decode_head_sizes(dim):
    check_decode([1, 70, 150], 2, splits=2, dim=dim, kv_heads=1)


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("window", [1, 5, 64, 100, 500])
def test_decode_window(window, splits):
    check_decode([1, 5, 64, 65, 130, 200], 4, splits=splits, window=window)


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_softcap_changes_the_result_as_the_reference_says(splits):
    capped = check_decode([40, 130], 2, splits=splits, scale=2.0, softcap=3.0)
    plain = check_decode([40, 130], 2, splits=splits, scale=2.0)
    assert (capped - plain).abs().max() > 0.05


def test_decode_float16_keeps_the_accuracy_of_its_dtype():
    check_decode([1, 100, 200], 4, splits=4, dtype=torch.float16, tol=2e-3)


def test_decode_fp8_cache_is_exact_on_what_the_cache_holds():
    check_decode([1, 100, 200], 4, splits=4, cache=torch.float8_e4m3fn, k_scale=0.7, v_scale=1.3)


@pytest.mark.parametrize("splits", [1, 8])
def test_padding_rows_spoil_nobody(splits):
    """Padding sequences point at row 0 (the null page) with length 1; length 0 gives zeros."""
    pages = Pages([90, 3], 2, 32)
    q = pages.randn(4, 8, 32)
    rows = torch.tensor([1, 0, 2, 0], dtype=torch.int32)
    lengths = torch.tensor([90, 1, 3, 0], dtype=torch.int32)
    args = (q, pages.k, pages.v, rows, lengths, pages.table)
    ours = attention_decode.decode(*args, torch.full_like(q, NAN), splits=splits, scale=0.2)
    reference = attention_reference.decode(*args, torch.full_like(q, NAN), scale=0.2)
    torch.testing.assert_close(ours[::2], reference[::2], rtol=2e-5, atol=2e-5)
    assert torch.equal(ours[3], torch.zeros_like(ours[3]))


@pytest.mark.parametrize("window", [30, 64])
def test_pages_that_left_the_window_may_hold_anything(window):
    """Their owner gave them back: somebody else's NaN may stand there."""
    pages = Pages([190], 1, 32)
    keep = 190 - window
    before = torch.arange(keep)
    at = pages.table[1, before // PAGE].long(), before % PAGE
    q = pages.randn(1, 2, 32)
    args = (q, pages.k, pages.v, pages.rows, torch.tensor([190], dtype=torch.int32), pages.table)
    clean = attention_decode.decode(*args, torch.empty_like(q), splits=2, scale=0.2, window=window)
    tiles = torch.zeros(1, 2, dtype=torch.int32)
    one = torch.tensor([1], dtype=torch.int32)
    chunk = (q, q[:, :1], q[:, :1], *args[1:3], tiles, pages.rows, one * 189, one * 0, one, pages.table)
    pages.k[at] = NAN
    pages.v[at] = NAN
    assert torch.equal(attention_decode.decode(*args, torch.empty_like(q), splits=2, scale=0.2, window=window), clean)
    mixed = attention_chunks.mixed(*chunk, torch.empty_like(q), block_q=8, scale=0.2, window=window)
    torch.testing.assert_close(mixed, clean, rtol=2e-5, atol=2e-5)


def test_every_split_count_gives_the_same_result():
    results = [check_decode([1, 33, 200], 4, splits=splits) for splits in (1, 2, 4, 16, 64)]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2e-5, atol=2e-5)


def test_num_splits_fills_the_card_and_no_more():
    assert attention_decode.num_splits(1, 8, 132) == 64
    assert attention_decode.num_splits(8, 8, 132) == 8
    assert attention_decode.num_splits(64, 8, 132) == 4
    assert attention_decode.num_splits(512, 8, 132) == 1


def test_slices_are_shorter_for_few_sequences():
    shortest = [attention_decode.shortest_slice(batch, 8, 128, 132) for batch in (1, 8, 16, 64, 256)]
    assert shortest == [32, 64, 128, 256, 256]
    assert attention_decode.shortest_slice(12, 2, 512, 132) == 64


@pytest.mark.parametrize("window", [None, 100])
def test_no_slice_is_shorter_than_wanted(window):
    lengths = [1, 33, 64, 65, 200]
    plain = check_decode(lengths, 4, splits=1, window=window)
    cut = check_decode(lengths, 4, splits=16, shortest=64, window=window)
    torch.testing.assert_close(cut, plain, rtol=2e-5, atol=2e-5)


def check_mixed(chunks, group, *, block_q, dim=32, kv_heads=2, dtype=torch.float32, cache=None, tol=2e-5, **options):
    """chunks: (start, count) a sequence. Their tokens stand in q one sequence after the other."""
    pages = Pages([start + count for start, count in chunks], kv_heads, dim, cache or dtype)
    starts, counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*chunks, strict=True))
    q_starts = (counts.cumsum(0) - counts).int()
    total = int(counts.sum())
    wide = pages.randn(total, (group + 2) * kv_heads * dim).to(dtype)
    q, k, v = wide.unflatten(1, (-1, dim)).split((group * kv_heads, kv_heads, kv_heads), 1)
    for row, (start, count) in enumerate(chunks, 1):  # the cache holds the chunk's own keys and values too
        position = torch.arange(start, start + count)
        at = pages.table[row, position // PAGE].long(), position % PAGE
        own = slice(int(q_starts[row - 1]), int(q_starts[row - 1]) + count)
        pages.put(at, k[own] / options.get("k_scale", 1.0), v[own] / options.get("v_scale", 1.0))
    tiles = [(i, first) for i, (_, count) in enumerate(chunks) for first in range(0, count, block_q)]
    tiles.append((0, 10_000))  # padding: past the chunk's end
    args = (q, k, v, pages.k, pages.v, torch.tensor(tiles, dtype=torch.int32), pages.rows, starts, q_starts, counts)
    options = {"scale": dim**-0.5, "block_q": block_q, **options}
    shape = (total, group * kv_heads, dim)
    ours = attention_chunks.mixed(*args, pages.table, torch.full(shape, NAN, dtype=dtype), **options)
    reference = attention_reference.mixed(*args, pages.table, torch.full(shape, NAN, dtype=dtype), **options)
    assert not reference.isnan().any()
    torch.testing.assert_close(ours, reference, rtol=tol, atol=tol)
    return ours


MIXED = [(0, 1), (70, 1), (0, 17), (150, 1), (33, 40), (64, 64), (199, 1), (0, 65)]


@pytest.mark.parametrize("group, block_q", [(1, 16), (1, 64), (4, 16), (7, 9), (7, 4), (3, 21)])
def test_one_launch_serves_prefill_and_decode_together(group, block_q):
    check_mixed(MIXED, group, block_q=block_q)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 512])
def test_mixed_head_sizes(dim):
    check_mixed([(70, 1), (20, 50)], 2, block_q=16, dim=dim, kv_heads=1)


@pytest.mark.parametrize("splits", [2, 8])
@pytest.mark.parametrize("group, block_q, dim", [(4, 16, 32), (7, 9, 32), (2, 16, 80), (2, 8, 512)])
def test_several_programs_share_a_tile(splits, group, block_q, dim):
    """Contexts of none to all slices, which end with and within a tile of keys."""
    chunks = [(0, 9), (63, 5), (64, 3), (128, 40), (200, 2), (700, 1), (700, 17)]
    whole = check_mixed(chunks, group, block_q=block_q, dim=dim)
    cut = check_mixed(chunks, group, block_q=block_q, dim=dim, splits=splits, shortest=64)
    torch.testing.assert_close(cut, whole, rtol=2e-5, atol=2e-5)
    assert not attention_chunks._arrivals(cut.device).any(), "every tile's counter is ready for the next launch"


def test_several_programs_share_a_tile_of_an_fp8_cache():
    """Its scales apply to what each of them read from it, not to the chunk's own values."""
    options = {"cache": torch.float8_e4m3fn, "k_scale": 0.7, "v_scale": 1.3}
    check_mixed([(300, 20), (64, 9)], 4, block_q=8, splits=8, shortest=64, **options)


def test_slices_are_for_steps_with_few_tiles():
    def slices(tokens: int, kv_heads: int, dim: int) -> int:
        return attention_chunks.num_slices(tokens, 32, kv_heads, dim, 132, torch.device("cpu"))

    assert [slices(tokens, 8, 128) for tokens in (64, 256, 608, 1024, 8192)] == [8, 8, 8, 1, 1]
    assert slices(512, 8, 128) == 1  # 128 tiles are one wave, in slices as without




@pytest.mark.parametrize("window", [1, 7, 64, 90, 500])
def test_mixed_window(window):
    check_mixed(MIXED, 4, block_q=8, window=window)


def test_mixed_softcap_changes_the_result_as_the_reference_says():
    capped = check_mixed(MIXED, 2, block_q=16, scale=2.0, softcap=3.0)
    plain = check_mixed(MIXED, 2, block_q=16, scale=2.0)
    assert (capped - plain).abs().max() > 0.05


def test_mixed_float16_keeps_the_accuracy_of_its_dtype():
    check_mixed(MIXED, 4, block_q=16, dtype=torch.float16, tol=2e-3)


def test_mixed_fp8_cache_is_exact_on_what_the_cache_holds():
    check_mixed(MIXED, 4, block_q=16, cache=torch.float8_e4m3fn, k_scale=0.7, v_scale=1.3)


def test_mixed_shrinks_its_tile_to_the_shared_memory_of_the_card(monkeypatch):
    """A head of 256 numbers needs more than the 99 KiB of consumer cards at the usual tile size."""
    tiles = []
    launched = attention_chunks._mixed_kernel

    def watch(*args, **constants):
        tiles.append(constants["TILE"])
        launched(*args, **constants)

    monkeypatch.setattr(attention_chunks, "_mixed_kernel", watch)
    for limit in (227 << 10, 99 << 10):
        monkeypatch.setattr(attention_chunks, "target_of", lambda device, limit=limit: Target((9, 0), limit, 132))
        check_mixed([(20, 33)], 2, block_q=64, dim=256, kv_heads=1)
    assert tiles == [64, 16]


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dim", [32, 24])
def test_programs_that_share_a_tile_each_write_their_part(cache, window, dim, monkeypatch):
    """As for heads of 512 numbers on a card with much shared memory: here with parts of 16."""
    monkeypatch.setattr(attention_chunks, "_shares_tiles", lambda dim, gpu: True)
    monkeypatch.setattr(attention_chunks, "LARGEST_OUTPUT", 16)
    grids = []
    launched = attention_chunks._mixed_kernel

    def watch(grid, *args, **constants):
        grids.append((grid[2], constants["DV"]))
        launched(grid, *args, **constants)

    monkeypatch.setattr(attention_chunks, "_mixed_kernel", watch)
    chunks, tol = [(40, 30), (0, 50), (17, 1)], 2e-5 if cache is None else 1e-2
    check_mixed(chunks, 2, block_q=8, dim=dim, window=window, cache=cache, tol=tol)
    assert grids == [(2, 16)]
    if window is None:
        longer = [(200, 30), (0, 50), (17, 1), (70, 9)]
        check_mixed(longer, 2, block_q=8, dim=dim, cache=cache, tol=tol, splits=4, shortest=64)


def test_the_references_agree_with_torch():
    """The reference's own arithmetic, against SDPA."""
    pages = Pages([50], 2, 32)
    q = pages.randn(50, 8, 32)
    tiles = torch.zeros(1, 2, dtype=torch.int32)
    zero, count = torch.zeros(1, dtype=torch.int32), torch.tensor([50], dtype=torch.int32)
    token = torch.arange(50)
    at = pages.table[1, token // PAGE].long(), token % PAGE
    own = pages.k[at], pages.v[at]
    reference = attention_reference.mixed(
        q, *own, pages.k, pages.v, tiles, pages.rows, zero, zero, count, pages.table, torch.empty_like(q),
        block_q=50, scale=0.3,
    )  # fmt: skip
    heads = (x.transpose(0, 1)[None] for x in (q, *own))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(reference, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
