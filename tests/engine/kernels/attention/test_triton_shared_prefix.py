"""Decode attention that reads a shared prefix once, in Triton's interpreter, against attention in float64 that knows
nothing of pages."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.attention import decode as attention_decode
from engine.kernels.attention import shared_prefix
from engine.kernels.pointwise.reference import to_int8
from engine.selftest.checks.pages import int8_cache

PAGE, TILE = 16, 64
NAN = float("nan")
FP8 = torch.float8_e4m3fn


class Sequences:
    """Sequences, some of which begin with the same pages. Whatever no sequence owns is NaN, and so are the entries of
    the members' tables behind their own pages.

    lengths    of each sequence, with its newest token
    members    which ones share the first `prefix` tokens, a number of whole pages
    """

    def __init__(self, lengths, members, prefix, kv_heads, dim, dtype=torch.float32, cache=None, scales=(0.7, 1.3)):
        generator = torch.Generator().manual_seed(len(lengths) + prefix)
        common = prefix // PAGE
        counts = [-(-n // PAGE) - common * (i in members) for i, n in enumerate(lengths)]
        order = (torch.randperm(sum(counts) + common, generator=generator) + 1).tolist()
        shared_pages, self.lengths = [order.pop() for _ in range(common)], lengths
        pages = [
            (shared_pages if i in members else []) + [order.pop() for _ in range(count)]
            for i, count in enumerate(counts)
        ]
        self.rows = (torch.randperm(len(lengths), generator=generator) + 1).int()
        self.table = torch.zeros(len(lengths) + 1, max(map(len, pages)) + 1, dtype=torch.int32)
        both = torch.full((2, sum(counts) + common + 1, PAGE, kv_heads, dim), NAN)
        for row, length, own in zip(self.rows.tolist(), lengths, pages, strict=True):
            self.table[row, : len(own)] = torch.tensor(own)
            for i, page in enumerate(own):
                n = min(PAGE, length - i * PAGE)
                if both[:, page, :n].isnan().any():
                    both[:, page, :n] = torch.randn(2, n, kv_heads, dim, generator=generator)
        self.scales = {}
        if cache == torch.int8:
            (self.k, k_scale), (self.v, v_scale) = map(int8_cache, both)
            self.scales = {"k_scale": k_scale, "v_scale": v_scale}
            self.numbers = [stored.double() * factor[..., None].double() for stored, factor in map(to_int8, both)]
        else:
            self.k, self.v = both.to(cache or dtype)
            factors = scales if cache == FP8 else (1.0, 1.0)
            if cache == FP8:
                self.scales = dict(zip(("k_scale", "v_scale"), scales, strict=True))
            self.numbers = [kv.double() * factor for kv, factor in zip((self.k, self.v), factors, strict=True)]
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.shared = torch.tensor([prefix if i in members else 0 for i in range(len(lengths))], dtype=torch.int32)
        self.dtype, self.generator = dtype, generator

    def queries(self, group):
        """A view of a fused projection."""
        kv_heads, dim = self.k.shape[2:]
        wide = torch.randn(len(self.lengths), (group + 2) * kv_heads * dim, generator=self.generator).to(self.dtype)
        return wide[:, : group * kv_heads * dim].unflatten(1, (-1, dim))

    def expected(self, q, scale, softcap=None):
        outs = []
        for i, (row, length) in enumerate(zip(self.rows.tolist(), self.lengths, strict=True)):
            token = torch.arange(length)
            page = self.table[row, token // PAGE].long()
            k, v = (kv[page, token % PAGE].repeat_interleave(q.shape[1] // kv.shape[2], 1) for kv in self.numbers)
            scores = torch.einsum("hd,lhd->hl", q[i].double(), k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            outs.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v))
        return torch.stack(outs)


def check(sequences, group, *, splits=1, prefix_splits=2, tol=2e-5, softcap=None):
    q = sequences.queries(group)
    scale = q.shape[-1] ** -0.5 * (3 if softcap else 1)
    out = torch.full(q.shape, NAN, dtype=q.dtype)
    shared_prefix.decode_shared(
        q, sequences.k, sequences.v, sequences.rows, sequences.seq_lens, sequences.shared, sequences.table, out,
        splits=splits, prefix_splits=prefix_splits, scale=scale, softcap=softcap, **sequences.scales,
    )  # fmt: skip
    wanted = sequences.expected(q, scale, softcap)
    torch.testing.assert_close(out.double(), wanted, rtol=tol, atol=tol)
    return q, out


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("prefix", [PAGE, TILE, TILE + PAGE, 4 * TILE, 5 * TILE - PAGE])
def test_prefixes_of_any_number_of_pages(prefix, splits):
    lengths = [prefix + own for own in (1, 2, 15, 16, 17, 64, 65, 130)]
    check(Sequences(lengths, range(8), prefix, 2, 32), 4, splits=splits)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_groups_of_heads(group):
    """With 7 heads a program takes 18 sequences: the tile has unused rows, and the last program has few sequences."""
    count = 128 // group + 3
    check(Sequences([48 + 1 + i % 5 for i in range(count)], range(count), 48, 1, 16), group)


@pytest.mark.parametrize("members", [(), (0,), (2, 3, 9), range(1, 40)])
def test_sequences_that_share_nothing_are_beside_those_that_do(members):
    """A whole block of sequences without a member, blocks with some; the first of them not a member."""
    lengths = [100 + i for i in range(40)]
    check(Sequences(lengths, set(members), 96, 1, 16), 4, splits=2)


def test_nothing_shared_is_plain_decode_to_the_bit():
    sequences = Sequences([1, 5, 70, 200], (), 0, 2, 32)
    q, out = check(sequences, 4, splits=2)
    plain = attention_decode.decode(
        q, sequences.k, sequences.v, sequences.rows, sequences.seq_lens, sequences.table, torch.empty_like(q),
        splits=2, scale=32**-0.5,
    )  # fmt: skip
    assert torch.equal(out, plain)


@pytest.mark.parametrize("prefix_splits", [1, 2, 4, 16])
def test_slices_of_the_prefix(prefix_splits):
    """More slices than tiles leave some empty."""
    check(Sequences([150, 145, 190, 144 + 1], range(4), 144, 2, 32), 2, prefix_splits=prefix_splits, splits=2)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_head_sizes(dim):
    check(Sequences([100, 81, 200], range(3), 80, 1, dim), 2)


def test_softcap():
    check(Sequences([100, 81, 200], range(3), 80, 2, 32), 2, softcap=2.0)


def test_float16_keeps_the_accuracy_of_its_dtype():
    check(Sequences([100, 130, 200], range(3), 96, 2, 32, torch.float16), 4, splits=2, tol=2e-3)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("cache", [FP8, torch.int8])
def test_caches_of_8_bits_are_exact_on_what_they_hold(cache, splits):
    """Both the prefix and each sequence's own tokens carry the scale of values once."""
    check(Sequences([100, 130, 200], {0, 2}, 96, 2, 32, cache=cache), 4, splits=splits)


@pytest.mark.parametrize("splits", [1, 4])
def test_padding_reads_nothing_of_the_prefix(splits):
    """A graph's padding has row 0, one token and shares nothing; its neighbours' results are theirs."""
    sequences = Sequences([100, 90, 120], range(3), 80, 2, 32)
    q = sequences.queries(4)
    padded = torch.cat((q, torch.full_like(q[:2], NAN)))
    none = torch.zeros(2, dtype=torch.int32)
    rows, shared = torch.cat((sequences.rows, none)), torch.cat((sequences.shared, none))
    lengths = torch.cat((sequences.seq_lens, none + 1))
    out = shared_prefix.decode_shared(
        padded, sequences.k, sequences.v, rows, lengths, shared, sequences.table, torch.full_like(padded, NAN),
        splits=splits, prefix_splits=2, scale=0.2,
    )  # fmt: skip
    torch.testing.assert_close(out[:3].double(), sequences.expected(q, 0.2), rtol=2e-5, atol=2e-5)


def test_num_splits_fills_the_card_and_no_more():
    assert shared_prefix.num_splits(256, 32, 8, 132) == 2
    assert shared_prefix.num_splits(64, 32, 8, 132) == 8
    assert shared_prefix.num_splits(8, 32, 8, 132) == 16
    assert shared_prefix.num_splits(1024, 32, 8, 132) == 1


def test_few_sequences_or_tokens_do_not_pay():
    assert not shared_prefix.pays(7, 1 << 20)
    assert not shared_prefix.pays(256, 16)
    assert shared_prefix.pays(256, 2048)
