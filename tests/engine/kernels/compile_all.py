"""Compiles every kernel of a model's layers for GPUs that need not be here.

    python compile_all.py PROCESSES RESULTS DAY MAJOR.MINOR-MULTIPROCESSORS-KIB...

Each GPU is named by its compute capability, its multiprocessors, and the KiB of shared memory that a program may have.
Prints a line of JSON for each variant: the GPU, the kernel, its constants, the shared memory it takes, and the bytes of
stack that a thread needs for values that did not fit into registers.

RESULTS is the file of earlier results, kept in git (`compiled_kernels.py`). Only variants that have changed since are
compiled, and one in forty of the others, a different one each DAY: a wrong result is found within six weeks. Each run
writes the file anew, so it does not grow.

Run by test_triton_compile.py in a process of its own, without the interpreter.
"""

import gc
import json
import struct
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import compiled_kernels
import torch

from engine.kernels.attention import batch_invariant as attention_batch_invariant
from engine.kernels.attention import chunks as attention_chunks
from engine.kernels.attention import decode as attention_decode
from engine.kernels.attention import heads as attention_heads
from engine.kernels.attention import shared_prefix
from engine.kernels.gemm import batch_invariant, scaled_kernel, small_batch
from engine.kernels.gemm.packed import block_few_rows, block_gemv, block_wgmma, group_scaled, int4_gemv, matmul
from engine.kernels.gemm.packed.group_scaled import GroupScaled
from engine.kernels.gemm.packed.weight import Packed
from engine.kernels.moe import decode as moe_decode
from engine.kernels.moe import experts as moe_experts
from engine.kernels.moe import few_tokens as moe_few_tokens
from engine.kernels.pointwise import fused, host_rows, norm, quantize
from engine.kernels.recurrent import decode as delta_decode
from engine.kernels.recurrent import prefill as delta_prefill
from engine.kernels.recurrent.shape import DeltaShape
from engine.kernels.runtime import compile_ahead, launcher
from engine.kernels.runtime.gpu_target import Target

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def blank(*shape, dtype=BF16):
    """Nobody reads what stands there."""
    return torch.empty(*shape, dtype=dtype)


def numbers(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def of_int8(cache):
    """Scales for a cache, if it has some of its own."""
    scale = torch.zeros(cache.shape[:3])
    return {"k_scale": scale, "v_scale": scale} if cache.dtype == torch.int8 else {}


def attend(dim, group, cache, *, batch=4, **options):
    q, kv = blank(batch, group, dim), blank(2, 16, 1, dim, dtype=cache)
    options |= of_int8(kv)
    n, table = numbers(batch), numbers(batch, 4)
    options = {"scale": 0.1, **options}
    attention_decode.decode(q, kv, kv, n, n, table, torch.empty_like(q), splits=4, **options)
    if dim <= shared_prefix.LARGEST_HEAD and "window" not in options:
        for splits in (4,) if batch <= attention_decode.SMALL_BATCH else (1, 4):  # few sequences are sliced
            shared_prefix.decode_shared(
                q, kv, kv, n, n, n, table, torch.empty_like(q), splits=splits, prefix_splits=8, **options
            )
    if batch > attention_decode.SMALL_BATCH:
        return
    block_q = attention_chunks.query_rows(dim, q.device) // group
    own, tiles = q[:, :1], numbers(4, 2)
    for splits in (1,) if "window" in options else (1, attention_chunks.SLICES):
        options["splits"] = splits
        attention_chunks.mixed(
            q, own, own, kv, kv, tiles, n, n, n, n, table, torch.empty_like(q), block_q=block_q, **options
        )
    del options["splits"]
    if cache == torch.int8 or (cache == FP8 and not launcher.target_of(q.device).fp8_units):
        return  # --batch-invariant is refused
    block_q = attention_batch_invariant.tile_tokens(group)
    attention_batch_invariant.attention(
        q, (own, own), kv, kv, tiles, n, n, n, n, table, torch.empty_like(q), block_q=block_q, **options
    )


def rope(dim, cache, normed):
    kv, angle = blank(2, 16, 2, dim, dtype=cache), torch.zeros(32, 1, dim // 2)
    weight = blank(dim) if normed else None
    fused.rope_and_write_kv(
        blank(3, 8 * dim), angle, angle, numbers(3).long(), numbers(3).long(), kv, kv, 4, q_norm=weight, k_norm=weight,
        **of_int8(kv),
    )  # fmt: skip


def heads(dim, cache, pairs, distance, **options):
    kv, angle, weight = blank(2, 16, 2, dim, dtype=cache), torch.zeros(32, 1, pairs), blank(dim)
    i = numbers(3).long()
    attention_heads.heads_and_write_kv(
        blank(3, 8 * dim), angle, angle, distance, i, i, kv, kv, 4, q_norm=weight, k_norm=weight, **of_int8(kv),
        **options,
    )  # fmt: skip


def post_norm(size, following, **options):
    x, weight = blank(3, size), blank(size)
    branch = (weight, x, weight) if following > 1 else None
    norm.post_norm(
        x, weight, x, [weight] * following, 1e-6, 0.0, branch=branch, scalar=blank(1), **options
    )


def experts(num_experts, top_k, hidden, inner, dtype, tokens, **options):
    w13, w2 = blank(num_experts, 2 * inner, hidden, dtype=dtype), blank(num_experts, hidden, inner, dtype=dtype)
    scales = [torch.zeros(w.shape[:2]) for w in (w13, w2)] if dtype.itemsize == 1 else []
    routing = moe_experts.choose_experts(blank(tokens, num_experts), top_k)
    moe_experts.routed_experts(blank(tokens, hidden), *routing, w13, w2, *scales, **options)


def few_tokens(num_experts, top_k, hidden, inner, width, dtype, tokens, *, factor, **options):
    def weight(*shape):
        return blank(*shape, dtype=dtype), torch.zeros(shape[:-1]) if dtype.itemsize == 1 else None

    (w13, scale13), (w2, scale2) = weight(num_experts, 2 * inner, hidden), weight(num_experts, hidden, inner)
    x, dense = blank(tokens, hidden), None
    if width:
        extra = blank(1, hidden) if factor else None
        dense = moe_decode.DenseBranch(*weight(2 * width, hidden), *weight(hidden, width), extra)
    moe_few_tokens.sparse_block(
        x, blank(num_experts, hidden), w13, w2, scale13, scale2, for_router=x, top_k=top_k, dense=dense, **options
    )


def sparse_block(num_experts, top_k, hidden, inner, width, dtype, tokens, *, factor, **options):
    def weight(*shape):
        return blank(*shape, dtype=dtype), torch.zeros(shape[:-1]) if dtype.itemsize == 1 else None

    (w13, scale13), (w2, scale2) = weight(num_experts, 2 * inner, hidden), weight(num_experts, hidden, inner)
    x, dense = blank(tokens, hidden), None
    if width:
        extra = blank(1, hidden) if factor else None
        dense = moe_decode.DenseBranch(*weight(2 * width, hidden), *weight(hidden, width), extra)
    if factor:
        options |= {"norm": moe_decode.Norm(blank(hidden), 1e-6, 1.0), "residual": x}
    moe_decode.sparse_block(
        x, blank(num_experts, hidden), w13, w2, scale13, scale2, top_k=top_k, dense=dense, **options
    )


def head_in_int8(dtype):
    weight, scale = blank(40000, 2816, dtype=torch.int8), torch.zeros(40000)
    small_batch.gemv(blank(1, 2816, dtype=dtype), weight, scale)
    for rows in (2, 32, 64, 200):
        scaled_kernel.scaled_product(blank(rows, 2816, dtype=dtype), weight, scale)


def experts_in_int8():
    for tokens in (2, 9, 300, 4100):
        experts(128, 8, 2048, 768, torch.int8, tokens)
        experts(128, 8, 2816, 704, torch.int8, tokens, gate="gelu_tanh", int8_activations=True)
    sparse_block(8, 2, 2048, 768, 0, torch.int8, 2, factor=False)
    few_tokens(128, 8, 2048, 768, 0, torch.int8, 9, factor=False)
    quantize.quantize_rows_to_int8(blank(3, 960))
    quantize.quantize_rows_to_int8(blank(3, 6144))


def packed_experts(num_experts, top_k, hidden, inner, kind, group, tokens, **options):
    """`kind`: nvfp4, mxfp4, int8, or int8 with zero points."""
    fp4, scales = kind.endswith("fp4"), {"nvfp4": FP8, "mxfp4": torch.uint8}.get(kind, BF16)

    def weight(rows, columns):
        codes = blank(num_experts, rows, columns // 2 if fp4 else columns, dtype=torch.uint8 if fp4 else torch.int8)
        return codes, blank(num_experts, rows, columns // group, dtype=scales)

    (w13, scale13), (w2, scale2) = weight(2 * inner, hidden), weight(hidden, inner)
    routing = moe_experts.choose_experts(blank(tokens, num_experts), top_k)
    if kind == "nvfp4":
        options["factors"] = torch.zeros(w13.shape[:2]), torch.zeros(w2.shape[:2])
    elif kind == "zeros":
        options["zeros"] = tuple(blank(*scale.shape, dtype=torch.int8) for scale in (scale13, scale2))
    moe_experts.routed_experts(blank(tokens, hidden), *routing, w13, w2, scale13, scale2, **options)


def all_packed_experts():
    for tokens in (2, 9, 300, 4100):
        for kind, group in (("nvfp4", 16), ("mxfp4", 32), ("int8", 128), ("zeros", 32)):
            packed_experts(128, 8, 2048, 768, kind, group, tokens)
        packed_experts(128, 8, 2816, 704, "nvfp4", 16, tokens, gate="gelu_tanh")


def experts_in_blocks(num_experts, top_k, hidden, inner, width, tokens, **options):
    def weight(first, halves, rows, columns):
        scale = torch.zeros(*first, halves * -(-rows // 128), -(-columns // 128))
        return blank(*first, halves * rows, columns, dtype=FP8), scale

    (w13, scale13), (w2, scale2) = weight((num_experts,), 2, inner, hidden), weight((num_experts,), 1, hidden, inner)
    x, routing = blank(tokens, hidden), moe_experts.choose_experts(blank(tokens, num_experts), top_k)
    moe_experts.routed_experts(x, *routing, w13, w2, scale13, scale2, **options)
    if width:
        dense = moe_decode.DenseBranch(*weight((), 2, width, hidden), *weight((), 1, hidden, width), blank(1, hidden))
        norm = moe_decode.Norm(blank(hidden), 1e-6, 1.0)
        moe_decode.sparse_block(
            x, blank(num_experts, hidden), w13, w2, scale13, scale2, top_k=top_k, dense=dense, norm=norm, residual=x
        )


def experts_in_int4(num_experts, top_k, hidden, inner, group, tokens, *, with_zeros=False, **options):
    def weight(rows, columns):
        return blank(num_experts, rows, columns // 2, dtype=torch.uint8), blank(num_experts, rows, columns // group)

    (w13, scale13), (w2, scale2) = weight(2 * inner, hidden), weight(hidden, inner)
    routing = moe_experts.choose_experts(blank(tokens, num_experts), top_k)
    if with_zeros:
        options["zeros"] = tuple(blank(*scale.shape, dtype=torch.uint8) for scale in (scale13, scale2))
    moe_experts.routed_experts(blank(tokens, hidden), *routing, w13, w2, scale13, scale2, **options)


def delta():
    shape = DeltaShape(16, 48, 128, 128)
    qkv, ba, conv = blank(70, 16384)[:, :10240], blank(70, 96), blank(10240, 4)
    heads, i = torch.zeros(48), numbers(70).long()
    states = torch.zeros(3, 48, 128, 128), blank(3, 4, 10240)
    arguments = qkv, ba, conv, heads, heads, i, i[:2], *states, shape, blank(70, 48, 128)
    delta_decode.decode(*arguments)
    delta_decode.decode(*arguments, early=True)
    mixed = {"q_starts": i[:2], "counts": i[:2]}
    delta_decode.decode(*arguments, **mixed, block_v=64)
    delta_prefill.prefill(*arguments, **mixed, chunks=delta_prefill.plan_chunks(i[:2], 2))
    norm.gated_rms_norm(blank(3, 48, 128), blank(3, 16384)[:, 10240:], blank(128), 1e-6)


def run_all(gpu):
    delta()
    attend(64, 3, BF16)
    attend(80, 7, BF16, window=100, softcap=30.0)
    attend(128, 4, BF16)
    attend(128, 4, BF16, batch=64)
    attend(256, 2, BF16)
    attend(256, 2, BF16, batch=64)
    attend(512, 8, BF16)
    rope(128, BF16, normed=True)
    rope(96, BF16, normed=False)
    heads(256, BF16, 32, 32, offset=1.0)
    heads(512, BF16, 64, 256, v_norm=True, k_eq_v=True, keep=True)
    heads(512, BF16, 64, 256, own_kv=False)
    small_batch.gemv(blank(1, 1024), blank(96, 1024))
    small_batch.gemv(blank(4, 960), blank(100, 960), None, blank(100), gate="silu")
    small_batch.gemv(blank(1, 4096), blank(24576, 4096), norm=(blank(4096), 1e-6), gate="silu")
    small_batch.gemv(blank(2, 5376), blank(512, 5376), norm=(blank(5376), 1e-6), wide_offset=1.0, gate="gelu_tanh")
    small_batch.gemv(blank(2, 3072), blank(1024, 3072), residual=blank(2, 1024))
    small_batch.gemv(blank(1, 5120), blank(96, 5120), norm=(blank(5120), 1e-6), in_order=True)
    small_batch.small_batch_gemm(blank(40, 960), blank(100, 960), blank(100))
    head_in_int8(BF16)
    head_in_int8(torch.float16)
    batch_invariant.matmul(blank(40, 960), blank(100, 960), blank(100))
    batch_invariant.matmul(blank(40, 960, dtype=torch.float32), blank(100, 960, dtype=torch.float32))
    small_batch.small_batch_gemm(blank(128, 4096), blank(4096, 4096))
    norm.rms_norm(blank(3, 960), blank(960), 1e-6)
    norm.rms_norm(blank(3, 4096), blank(4096), 1e-6, blank(3, 4096))
    fused.gate_mul(*blank(3, 3000).chunk(2, -1), "silu")
    fused.softcap(blank(3, 262144), 30.0)
    host_rows.gather_rows(blank(4, 8960), numbers(3).long(), 16.0)
    post_norm(5376, 1)
    post_norm(2816, 3)
    experts(4, 2, 2048, 768, BF16, 2)
    experts(4, 2, 2816, 704, BF16, 9, gate="gelu_tanh")
    experts(4, 2, 2048, 768, BF16, 4100)
    sparse_block(8, 2, 2048, 512, 512, BF16, 1, factor=True)
    sparse_block(8, 2, 2048, 768, 0, BF16, 2, factor=False)
    few_tokens(128, 8, 2048, 768, 0, BF16, 9, factor=False)
    few_tokens(8, 2, 2048, 512, 512, BF16, 40, factor=True)
    for tokens in (2, 9, 300, 4100):
        experts_in_int4(128, 8, 2816, 704, 32, tokens, gate="gelu_tanh")
        experts_in_int4(128, 8, 2048, 512, 128, tokens)
        experts_in_int4(128, 8, 2048, 512, 128, tokens, with_zeros=True)
    for kind, group, scales in (
        ("int4", 32, BF16), ("int4", 128, torch.float16), ("int4", 4096, BF16), ("int8", 64, BF16), ("fp8", 128, BF16),
        ("fp8", 128, torch.float32), ("fp4", 16, FP8), ("fp4", 32, torch.uint8),
    ):
        packed_products(kind, group, scales)
    experts_in_int8()
    all_packed_experts()
    with_int8_cache()
    with_fp8_weights(gpu.fp8_units)
    if gpu.fp8_units:
        with_fp8_activations()
        for kind in ("int4", "fp8"):
            group_scaled_products(kind)
    products_in_blocks(gpu)


def group_scaled_products(kind):
    for outputs in (4096, 6144, 24576):
        values = blank(outputs, 4096, dtype=FP8) if kind == "fp8" else blank(outputs, 2048, dtype=torch.uint8)
        weight = group_scaled.group_scaled(Packed(kind, 128, values, blank(outputs, 32)))
        for rows in (8, 32, 64, 128, 200):
            group_scaled.gemm(blank(rows, 4096, dtype=FP8), blank(rows, dtype=torch.float32), weight, dtype=BF16)
        if kind == "int4":
            group_scaled.as_e4m3(weight)
    if kind == "fp8":
        small_batch.gemv(blank(1, 4096), weight.values, weight.scale, norm=(blank(4096), 1e-6), gate="silu", block=128)


def products_in_blocks(gpu):
    for bias in (None, blank(4096)) if gpu.wgmma else ():
        x, weight = blank(300, 5120, dtype=FP8), blank(4096, 5120, dtype=FP8)
        scale, ratio = blank(300, dtype=torch.float32), blank(32, 40, dtype=torch.float32)
        block_wgmma.gemm(x, scale, weight, ratio, bias, dtype=BF16)
        for gate in ("silu", "gelu_tanh"):
            block_wgmma.gemm(x, scale, weight, ratio, bias, dtype=BF16, gate=gate)
        if bias is None:
            block_wgmma.gemm(x, scale, weight, ratio, dtype=BF16, onto=blank(300, 4096))
    if gpu.wgmma:
        weight = GroupScaled(blank(4096, 5120, dtype=FP8), blank(32, 40, dtype=torch.float32), 128, 128, 0)
        for rows in (8, 16, 32, 64, 128):
            few, few_scale = blank(rows, 5120, dtype=FP8), blank(rows, dtype=torch.float32)
            block_few_rows.gemm(few, few_scale, weight, blank(4096) if rows == 8 else None, dtype=BF16)
            block_few_rows.gemm(few, few_scale, weight, dtype=BF16, gate="silu" if rows < 128 else "gelu_tanh")
        for tiles in (128, 272):  # a tile for each program, and more than two
            more = GroupScaled(blank(128 * tiles, 5120, dtype=FP8), blank(tiles, 40, dtype=torch.float32), 128, 128, 0)
            block_few_rows.gemm(few, few_scale, more, dtype=BF16)
        for gate in ("silu", "gelu_tanh"):
            block_gemv.gated_row(blank(1, 5120), weight, gate)


def packed_products(kind, group, scales):
    width = 4096 if kind in ("int8", "fp8") else 2048
    values = blank(4096, width, dtype=FP8 if kind == "fp8" else torch.uint8)
    scale = blank(4096, 4096 // group, dtype=scales)
    zero = blank(4096, 4096 // group, dtype=torch.uint8) if scales == torch.float16 else None
    factor = torch.zeros(4096) if scales == FP8 else None
    weight = Packed(kind, group, values, scale, zero, factor=factor, divides=True)
    for rows in (1, 2, 8, 32, 64, 200):
        matmul.matmul(blank(rows, 4096), weight)
    if kind == "int4":
        int4_gemv.gemv(blank(2, 4096), weight, norm=(blank(4096), 1e-6), gate="silu")
        int4_gemv.gemv(blank(1, 4096), weight, blank(4096), residual=blank(1, 4096))
    matmul.unpacked(weight, BF16)


def with_int8_cache():
    attend(128, 4, torch.int8)
    attend(128, 4, torch.int8, batch=64)
    attend(256, 7, torch.int8, window=100, softcap=30.0)
    attend(512, 8, torch.int8)
    rope(80, torch.int8, normed=True)
    rope(128, torch.int8, normed=False)
    heads(256, torch.int8, 128, 128, v_norm=True, keep=True)


def with_fp8_weights(units):
    """And with a KV cache in fp8. `units`: what meets such weights on matrix units is fp8, too."""
    sparse_block(8, 4, 2048, 512, 512, FP8, 1, factor=True)
    sparse_block(8, 4, 2816, 704, 2112, FP8, 4, factor=False, gate="gelu_tanh", expert_scale=blank(8))
    experts(4, 2, 2048, 512, FP8, 2)
    experts(4, 2, 2048, 512, FP8, 9)
    experts(4, 2, 2816, 704, FP8, 300)
    experts(128, 8, 2816, 704, FP8, 96)  # of a shape that was measured
    few_tokens(256, 8, 2048, 512, 512, FP8, 64, factor=True)
    few_tokens(128, 8, 2816, 704, 2112, FP8, 8, factor=False, gate="gelu_tanh", expert_scale=blank(128))
    experts_in_blocks(8, 4, 2048, 512, 512, 1)
    experts_in_blocks(8, 4, 2048, 512, 512, 4)
    experts_in_blocks(8, 4, 2816, 704, 0, 2, gate="gelu_tanh")
    for tokens in (9, 100, 4100):
        experts_in_blocks(128, 8, 2048, 512, 0, tokens)
        experts_in_blocks(128, 8, 2816, 704, 0, tokens, gate="gelu_tanh")
    experts_in_blocks(128, 8, 2048, 512, 0, 4100, fp8_activations=False)
    attend(128, 4, FP8)
    attend(128, 4, FP8, batch=64)
    attend(256, 7, FP8, window=100)
    attend(512, 8, FP8)
    rope(80, FP8, normed=True)
    heads(256, FP8, 128, 128, v_norm=True, keep=True)
    small_batch.gemv(blank(4, 1024), blank(100, 1024, dtype=FP8), torch.zeros(100))
    weight = blank(24576, 4096, dtype=FP8)
    small_batch.gemv(blank(1, 4096), weight, torch.zeros(24576), norm=(blank(4096), 1e-6), gate="silu")
    weight, scale = blank(4096, 4096, dtype=FP8), torch.zeros(4096)
    for rows in (8, 32, 64, 4096):
        if units:
            x, x_scale = blank(rows, 4096, dtype=FP8), torch.zeros(rows)
            scaled_kernel.scaled_product(x, weight, scale, x_scale=x_scale, dtype=BF16)
        else:
            scaled_kernel.scaled_product(blank(rows, 4096), weight, scale)
    if not units:
        scaled_kernel.scaled_product(blank(300, 976), blank(112, 976, dtype=FP8), torch.zeros(112), blank(112))


def with_fp8_activations():
    both = torch.zeros(64), torch.zeros(100)
    batch_invariant.matmul(blank(64, 1024, dtype=FP8), blank(100, 1024, dtype=FP8), scales=both, dtype=BF16)
    scales = {"x_scale": torch.zeros(64), "scale": torch.zeros(100)}
    small_batch.small_batch_gemm(blank(64, 1024, dtype=FP8), blank(100, 1024, dtype=FP8), dtype=BF16, **scales)
    quantize.quantize_rows(blank(3, 960))
    quantize.quantize_rows(blank(3, 6144))
    post_norm(5376, 1, quantize=[True])
    post_norm(1536, 0, quantize=[True])
    post_norm(2816, 3, quantize=[True, True])
    norm.rms_norm(blank(3, 5120), blank(5120), 1e-6, wide_offset=1.0, quantize=True, plain=blank(3, 5120))
    fused.gate_mul(blank(3, 21504), blank(3, 21504), "gelu_tanh", quantize=True)
    fused.gate_mul(blank(3, 6144), blank(3, 6144), "sigmoid", quantize=True)
    norm.gated_rms_norm_to_fp8(blank(3, 48, 128), blank(3, 16384)[:, 10240:], blank(128), 1e-6)
    norm.rms_norm(blank(3, 4096), blank(4096), 1e-6, blank(3, 4096), quantize=True)
    fused.gate_mul(*blank(3, 24576).chunk(2, -1), "silu", quantize=True)


def stack_bytes(cubin):
    """The most stack that a thread of this machine code needs: values that ptxas found no register for.

    ELF64: each section `.nv.info*` is a list of attributes; EIATTR_FRAME_SIZE (0x11) has a function and its bytes.
    """
    sections, size, count, names = struct.unpack_from("<Q", cubin, 0x28)[0], *struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    most = 0
    for name, _, _, _, offset, length in headers:
        at = headers[names][4] + name
        if not cubin[at : cubin.index(b"\0", at)].startswith(b".nv.info"):
            continue
        here = offset
        while here < offset + length:
            form, attribute, value = struct.unpack_from("<BBH", cubin, here)
            if form == 4:  # followed by `value` bytes
                if attribute == 0x11:
                    most = max(most, struct.unpack_from("<I", cubin, here + 8)[0])
                here += value
            here += 4
    return most


def compiled(job, capability):
    binary = launcher.compile_for(
        job.kernel, job.types, dict(job.constants), job.num_warps, job.num_stages, capability
    )
    return [binary.metadata.shared, stack_bytes(binary.asm["cubin"]), binary.metadata.global_scratch_size]


def variants(gpu):
    """The kernels that `run_all` starts on a GPU, as jobs of the compiler, by their hash."""
    with launcher.recording(gpu) as found:
        run_all(gpu)
    lines = {compile_ahead.line_of(job, gpu.capability): job for job in found}
    return {compiled_kernels.hash_of(job.kernel, line): (line, job, gpu) for line, job in lines.items()}


_jobs: list = []  # children find them here: kernels cannot be pickled


def _compiled(index):
    _, job, gpu = _jobs[index]
    return compiled(job, gpu.capability)


def main(processes, results, day, *names):
    wanted = {}
    for name in names:
        capability, multiprocessors, kib = name.split("-")
        gpu = Target(tuple(map(int, capability.split("."))), int(kib) << 10, int(multiprocessors))
        wanted |= {key: (name, *each) for key, each in variants(gpu).items()}
    path = Path(results)
    known = compiled_kernels.read(path)
    found = {key: known[key] for key in wanted if key in known}
    sample = {key for key in found if compiled_kernels.is_due(key, int(day))}
    jobs = {key: each for key, (_, *each) in wanted.items() if key in sample or key not in found}
    ranks = {line: i for i, line in enumerate(compile_ahead.longest_first({line for line, _, _ in jobs.values()}))}
    keys = sorted(jobs, key=lambda key: ranks[jobs[key][0]])
    _jobs[:] = [jobs[key] for key in keys]
    launcher.load_compiler()
    torch.set_num_threads(1)
    gc.freeze()
    different = []
    try:
        with ProcessPoolExecutor(int(processes), mp_context=get_context("fork")) as pool:
            for key, result in zip(keys, pool.map(_compiled, range(len(keys))), strict=True):
                if found.setdefault(key, result) != result:
                    different.append(f"{wanted[key][2].kernel.name} {key}: {found[key]} on file, {result} compiled")
    finally:  # an interrupted run keeps what it has
        compiled_kernels.write(path, {key: (wanted[key][2].kernel.name, result) for key, result in found.items()})
    sys.stderr.write(f"{len(keys)} of {len(wanted)} variants were compiled; the others had not changed.\n")
    if different:
        said = f"{path.name} does not agree with the compiler; delete it, then run make test-compile"
        sys.exit("\n".join([said, *different]))
    for key, (name, _, job, _) in wanted.items():
        shared, stack, scratch = found[key]
        facts = {"shared": shared, "stack": stack, "scratch": scratch}
        print(json.dumps({"gpu": name, "kernel": job.kernel.name, "constants": dict(job.constants), **facts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
