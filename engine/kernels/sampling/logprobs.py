"""Log-probability, rank and best alternatives of a token, on the GPU."""

import torch
import triton
import triton.language as tl

from engine.kernels.runtime.launcher import kernel
from engine.kernels.sampling.columns import INF, ONE, STREAM_BLOCK, STREAM_WARPS, key_of, value_of, weight_of


@kernel
def _logprobs_kernel(
    logits_ptr, index_ptr, tokens_ptr, out_ptr, V, logits_stride, out_stride, BLOCK: tl.constexpr
):
    """One row: token, bits of its log-probability, rank, K ids, bits of their log-probabilities."""
    K = (out_stride - 3) // 2
    i = tl.program_id(0).to(tl.int64)
    b = i
    if index_ptr is not None:
        b = tl.load(index_ptr + i).to(tl.int64)
    row_ptr = logits_ptr + b * logits_stride
    out_ptr += i * out_stride
    token = tl.load(tokens_ptr + b).to(tl.int32)
    tl.store(out_ptr, token)

    best = tl.full([BLOCK], -INF, tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + ids, mask=ids < V, other=-INF).to(tl.float32)
        best = tl.maximum(best, tl.where(z < INF, z, INF))
    top = tl.max(best, 0)
    good = (top > -INF) & (top < INF) & (token >= 0)
    shift = tl.where(good, top, 0.0)

    chosen = tl.load(row_ptr + tl.where(token >= 0, token, 0)).to(tl.float32)
    mass = tl.zeros([BLOCK], dtype=tl.int64)
    better = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + ids, mask=ids < V, other=-INF).to(tl.float32)
        mass += weight_of(tl.where(z <= shift, z, -INF), shift)
        better += (z > chosen).to(tl.int32)
    total = tl.maximum(tl.sum(mass, 0), 1)
    base = shift + tl.log(total.to(tl.float32) / ONE)
    base = tl.where(good, base, float("nan"))
    tl.store(out_ptr + 1, (chosen - base).to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2, tl.where(good, 1 + tl.sum(better, 0), 0))

    # In descending order, ties by ascending id: each is the largest (key, -id) below the previous one.
    previous = tl.full([], 2**63 - 1, tl.int64)
    for k in range(K):
        found = tl.full([BLOCK], -(2**63), tl.int64)
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            z = tl.load(row_ptr + ids, mask=ids < V, other=-INF).to(tl.float32)
            z = tl.where(z == 0, 0.0, z)  # -0 becomes 0
            pair = (key_of(z, 0) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
            found = tl.maximum(found, tl.where((pair < previous) & (ids < V), pair, -(2**63)))
        previous = tl.max(found, 0)
        tl.store(out_ptr + 3 + k, 0x7FFFFFFF - (previous & 0x7FFFFFFF).to(tl.int32))
        value = value_of(previous >> 32, 0)
        tl.store(out_ptr + 3 + K + k, (value - base).to(tl.int32, bitcast=True))


def logprobs(logits: torch.Tensor, index: torch.Tensor | None, tokens: torch.Tensor, out: torch.Tensor) -> None:
    """out int32 [N, 3 + 2k]: token, log-probability (bits), rank, k best ids, their log-probabilities (bits).

    Computed for rows `index` [N] of logits [B, V] and `tokens` [B], or for all if it is None. A row that holds NaN or
    +inf, or only -inf, or whose token is -1, gets NaN and rank 0."""
    vocab = logits.shape[1]
    block = min(STREAM_BLOCK, max(1024, triton.next_power_of_2(vocab)))
    _logprobs_kernel(
        (len(out),), logits, index, tokens, out, vocab, logits.stride(0), out.shape[1], BLOCK=block,
        num_warps=STREAM_WARPS,
    )  # fmt: skip
