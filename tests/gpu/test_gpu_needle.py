"""A needle in 16,384 keys: paged attention still looks at the right place, and adds up right, in bf16 and fp8.

Random weights retrieve nothing, so this is one layer's attention alone. The haystack is unit noise; the needle is a key
along the query that takes almost all of the softmax, and its value is a marker of plus and minus ones.
"""

import pytest
import torch
from gpu_kit import DEVICE

from engine.kernels.attention import decode as attention_decode
from engine.layers.attention import Attention, tile_tokens
from engine.layers.context import DeviceBatch, ForwardContext, forward_context
from engine.layers.rope import Rope

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

LENGTH, PAGE = 16384, 16
KV_HEADS, GROUP, DIM = 2, 4, 128
SCALE = DIM**-0.5
PULL = 1.6  # the needle is the query times this: a score of about 18, where the haystack's log-sum is about 10.2
# Ends, borders of pages and of the kernels' tiles, and of slices of a split sequence.
PLACES = [
    0, 1, 15, 16, 17, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 4096, 5000, 8191, 8192, 16367, 16368, 16382, 16383,
]  # fmt: skip
CACHES = [torch.bfloat16, torch.float8_e4m3fn]


def tolerance(cache: torch.dtype, bf16: float, fp8: float) -> float:
    return bf16 if cache == torch.bfloat16 else fp8


class Haystack:
    """One sequence of LENGTH random keys and values, and a copy of it for each of PLACES that holds a needle there.

    The copies share all pages but the needle's, through their block tables. Pages stand in random order.
    """

    def __init__(self, cache: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(11)
        own = LENGTH // PAGE
        self.keys, self.values = torch.randn(2, LENGTH, KV_HEADS, DIM, generator=generator).bfloat16()
        # The heads of a group ask along one direction, each at its own strength.
        direction = torch.randn(KV_HEADS, 1, DIM, generator=generator)
        strength = torch.linspace(1.0, 1.2, GROUP)[None, :, None]
        self.query = (direction * strength).reshape(KV_HEADS * GROUP, DIM).bfloat16()
        self.needle = (direction[:, 0] * PULL).bfloat16()  # [Hkv, D]
        self.marker = torch.where(torch.rand(KV_HEADS, DIM, generator=generator) < 0.5, -1.0, 1.0).bfloat16()

        order = torch.randperm(own, generator=generator) + 1  # page 0 is the null page
        both = torch.zeros(1 + own + len(PLACES), 2, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16)
        both[order, 0] = self.keys.view(own, PAGE, KV_HEADS, DIM)
        both[order, 1] = self.values.view(own, PAGE, KV_HEADS, DIM)
        table = torch.zeros(2 + len(PLACES), own, dtype=torch.int32)
        table[1:] = order
        for i, place in enumerate(PLACES):
            page = 1 + own + i
            both[page] = both[table[1, place // PAGE]]
            both[page, 0, place % PAGE], both[page, 1, place % PAGE] = self.needle, self.marker
            table[2 + i, place // PAGE] = page
        self.exact = both.to(DEVICE)
        stored = self.exact.to(cache)
        self.k_cache, self.v_cache = stored[:, 0], stored[:, 1]
        self.table = table.to(DEVICE)
        self.multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        self.plain_row, self.needle_rows = 1, list(range(2, 2 + len(PLACES)))

    def share_of_the_needle(self, place: int) -> float:
        """Its smallest share of the softmax over the heads, in float32."""
        keys = self.keys.float()
        keys[place] = self.needle.float()
        query = self.query.float().view(KV_HEADS, GROUP, DIM)
        scores = torch.einsum("hgd,lhd->hgl", query, keys) * SCALE
        return float(scores.softmax(-1)[..., place].min())

    def expected(self) -> torch.Tensor:
        """[Hq, D]: the marker, for each head of the group."""
        return self.marker.repeat_interleave(GROUP, 0).to(DEVICE)

    def decode(self, query: torch.Tensor, rows: list[int], splits: int, **options: int) -> torch.Tensor:
        """The query [Hq, D] as the last token of each of `rows`: [B, Hq, D]."""
        q = query.to(DEVICE).expand(len(rows), *query.shape).contiguous()
        return attention_decode.decode(
            q, self.k_cache, self.v_cache, ints(rows), ints([LENGTH] * len(rows)), self.table,
            torch.full_like(q, float("nan")), splits=splits, scale=SCALE, **options,
        )  # fmt: skip

    def layer(self, queries: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """A layer's step: the queries [T, Hq, D] with their keys and values as the last T tokens of each of `rows`;
        a decode step if T is 1, else a mixed one. RoPE turns by nothing. Returns [B, T, Hq, D]."""
        count, batch = len(queries), len(rows)
        at = torch.arange(LENGTH - count, LENGTH, device=DEVICE)
        page = self.table[rows][:, at // PAGE].long()
        slots = page * PAGE + at % PAGE
        own = [cache.flatten(0, 1)[slots].to(torch.bfloat16) for cache in (self.exact[:, 0], self.exact[:, 1])]
        qkv = torch.cat((queries.to(DEVICE).expand(batch, *queries.shape), *own), 2).flatten(0, 1).flatten(1)
        step = DeviceBatch(ints(rows), ints([LENGTH] * batch), self.table, self.multiprocessors)
        if count > 1:
            tile = tile_tokens(KV_HEADS * GROUP, KV_HEADS, DIM, DEVICE)
            tiles = [[i, first] for i in range(batch) for first in range(0, count, tile)]
            step = DeviceBatch(
                ints(rows), ints([LENGTH] * batch), self.table, self.multiprocessors, ints(tiles), tile,
                ints([LENGTH - count] * batch), ints([i * count for i in range(batch)]), ints([count] * batch),
            )  # fmt: skip
        layer = Attention(KV_HEADS * GROUP, KV_HEADS, DIM, SCALE, None)
        layer.k_cache, layer.v_cache = self.k_cache, self.v_cache
        angles = LENGTH, 1, DIM // 2
        rope = Rope(torch.ones(angles, device=DEVICE), torch.zeros(angles, device=DEVICE), DIM // 2)
        with torch.inference_mode(), forward_context(ForwardContext(at.repeat(batch), slots.flatten(), step)):
            return layer(qkv, rope).view(batch, count, KV_HEADS * GROUP, DIM)


def ints(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.fixture(scope="module", params=CACHES, ids=["bf16", "fp8"])
def haystack(request: pytest.FixtureRequest) -> Haystack:
    if request.param == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    return Haystack(request.param)


def assert_found(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """`got` [len(PLACES), Hq, D] is the marker at every place."""
    errors = (got.float() - want.float()).abs().amax((1, 2)).tolist()
    lost = {place: round(e, 3) for place, e in zip(PLACES, errors, strict=True) if not e < 5e-2}
    print(f"{what}: largest error {max(errors):.4f}")
    assert not lost, f"{what}: needle's place: largest error {lost}"


def test_the_needle_dominates_the_softmax(haystack: Haystack) -> None:
    shares = {place: haystack.share_of_the_needle(place) for place in PLACES}
    assert min(shares.values()) > 0.98, shares  # else the tests below would ask too much


@pytest.mark.parametrize("splits, options", [
    (1, {}), (8, {}), (64, {}), (64, {"tile": 32}), (2, {"tile": 128}),
])  # fmt: skip
def test_decode_finds_the_needle_wherever_it_is(haystack: Haystack, splits: int, options: dict) -> None:
    got = haystack.decode(haystack.query, haystack.needle_rows, splits, **options)
    assert_found(got, haystack.expected(), f"decode, {splits} splits, {options}")


def test_a_layer_finds_the_needle_in_a_decode_step(haystack: Haystack) -> None:
    alone = [[row] for row in haystack.needle_rows]  # split into many slices
    for rows in (haystack.needle_rows, *alone):
        got = haystack.layer(haystack.query[None], rows)[:, 0]
        errors = (got.float() - haystack.expected().float()).abs().amax((1, 2)).tolist()
        places = [PLACES[haystack.needle_rows.index(row)] for row in rows]
        lost = {place: round(e, 3) for place, e in zip(places, errors, strict=True) if not e < 5e-2}
        assert not lost, f"a batch of {len(rows)}: needle's place: largest error {lost}"


def test_a_layer_finds_the_needle_in_a_mixed_step_and_no_query_sees_it_too_early(haystack: Haystack) -> None:
    count = 40  # more than a tile
    queries = haystack.query.expand(count, *haystack.query.shape)
    got = haystack.layer(queries, haystack.needle_rows)
    assert_found(got[:, -1], haystack.expected(), "mixed step, last query")
    first = LENGTH - count
    for i, place in enumerate(PLACES):
        before = max(0, place - first)  # queries that stand before the needle
        late = (got[i, before:].float() - haystack.expected().float()).abs().amax((1, 2))
        assert bool((late < 5e-2).all()), f"needle at {place}, from query {first + before} on: {late.tolist()}"
        if before:
            early = got[i, :before].float().abs().max().item()
            assert early < 0.5, f"needle at {place}: a query before it got {early:.2f}, far from the mean of noise"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float().cpu() - want).norm() / want.norm())


def reference(haystack: Haystack, queries: torch.Tensor) -> torch.Tensor:
    """float32 attention over what was meant, before any rounding to fp8: queries [T, Hq, D], the last T tokens."""
    count = len(queries)
    q = queries.float().view(count, KV_HEADS, GROUP, DIM)
    scores = torch.einsum("thgd,lhd->hgtl", q, haystack.keys.float()) * SCALE
    at = torch.arange(LENGTH)
    scores = scores.masked_fill(at[None, :] > (LENGTH - count + torch.arange(count))[:, None], -torch.inf)
    return torch.einsum("hgtl,lhd->thgd", scores.softmax(-1), haystack.values.float()).reshape(queries.shape)


def test_random_data_follows_float32(haystack: Haystack) -> None:
    """A mean over 16k values, where small errors would add up: also with a peaked and with a flat softmax."""
    limit = tolerance(haystack.k_cache.dtype, 2e-2, 1e-1)
    generator = torch.Generator().manual_seed(2)
    errors = {}
    for sharpness in (0.2, 1.0, 2.5):
        queries = (torch.randn(40, KV_HEADS * GROUP, DIM, generator=generator) * sharpness).bfloat16()
        want = reference(haystack, queries)
        row = [haystack.plain_row]
        errors["mixed step", sharpness] = relative_error(haystack.layer(queries, row)[0], want)
        errors["decode step", sharpness] = relative_error(haystack.layer(queries[-1:], row)[0], want[-1:])
        for splits in (1, 16, 64):
            got = haystack.decode(queries[-1], row, splits)
            errors[f"decode, {splits} splits", sharpness] = relative_error(got[0], want[-1])
    print({f"{what} at {sharpness}": f"{e:.1e}" for (what, sharpness), e in errors.items()})
    wrong = {key: e for key, e in errors.items() if not e < limit}
    assert not wrong, f"relative errors above {limit}: {wrong}; all: {errors}"
