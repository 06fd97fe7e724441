"""Of a chunk's own tokens the mixed kernel reads no page: the pool may give them none (KVManager.grow)."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.attention import chunks as attention_chunks
from engine.kernels.attention import kernel_reference as attention_reference

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 32
CHUNKS = [(0, 1), (70, 1), (0, 40), (33, 60), (48, 90)]  # of each sequence: first token, tokens


@pytest.mark.parametrize("window", [None, 24])
def test_own_tokens_are_not_read_from_pages(window):
    generator = torch.Generator().manual_seed(0)
    width = max(-(-(start + count) // PAGE) for start, count in CHUNKS)
    table = torch.zeros(len(CHUNKS), width, dtype=torch.int32)
    pages = 1 + torch.randperm(len(CHUNKS) * width, generator=generator).int()
    k_cache, v_cache = torch.full((2, len(pages) + 1, PAGE, KV_HEADS, DIM), float("nan"))
    for row, (start, count) in enumerate(CHUNKS):
        table[row] = pages[row * width : (row + 1) * width]
        held = start + count if count == 1 else start  # a single token's own key is in its page
        for cache in (k_cache, v_cache):
            slots = table[row].long()[torch.arange(held) // PAGE] * PAGE + torch.arange(held) % PAGE
            cache.view(-1, KV_HEADS, DIM)[slots] = torch.randn(held, KV_HEADS, DIM, generator=generator)
        if count > 1:  # what only the chunk itself sees has no page at all
            table[row, -(-start // PAGE) : (start + count - 24) // PAGE] = 0
    total = sum(count for _, count in CHUNKS)
    q, k, v = (torch.randn(total, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts, counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*CHUNKS, strict=True))
    q_starts = (counts.cumsum(0) - counts).int()
    block_q = attention_chunks.query_rows(DIM, q.device) // (HEADS // KV_HEADS)
    tiles = [(i, at) for i, (_, count) in enumerate(CHUNKS) for at in range(0, count, block_q)]
    arguments = (
        q, k, v, k_cache, v_cache, torch.tensor(tiles, dtype=torch.int32), torch.arange(len(CHUNKS)).int(), starts,
        q_starts, counts, table,
    )  # fmt: skip
    options = {"block_q": block_q, "scale": DIM**-0.5, "window": window}
    found = attention_chunks.mixed(*arguments, torch.empty_like(q), **options)
    assert not found.isnan().any()
    expected = attention_reference.mixed(*arguments, torch.empty_like(q), **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
