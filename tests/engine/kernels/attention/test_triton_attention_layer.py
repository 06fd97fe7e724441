"""An attention layer of each kind: the GPU's path (in the interpreter) against the CPU's, over a chunk, then a step."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.attention.reference import AttentionBatch
from engine.layers.attention import Attention
from engine.layers.context import DeviceBatch, ForwardContext, forward_context
from engine.layers.norm import RMSNorm, WideRMSNorm
from engine.layers.rope import Rope, RotaryEmbedding

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 16
WHOLE = {"rope_theta": 1e4}
PARTIAL = WHOLE | {"partial_rotary_factor": 0.5}
PROPORTIONAL = PARTIAL | {"rope_type": "proportional"}
# Two sequences: 20 tokens after 13, and 1 after 30; then one token each; then 1 before 6.
CHUNK, STEP, BOTH = [(13, 20), (30, 1)], [(33, 1), (31, 1)], [(34, 1), (26, 6)]
ROWS = [2, 1]


def weighted(norm):
    norm.weight = torch.nn.Parameter(torch.randn(DIM), requires_grad=False)
    return norm


def wide(offset):
    return {f"{name}_norm": weighted(WideRMSNorm(DIM, 1e-6, offset=offset)) for name in "qk"}


LAYERS = {
    "llama": (WHOLE, {}),
    "qwen3": (WHOLE, {f"{name}_norm": weighted(RMSNorm(DIM, 1e-6)) for name in "qk"}),
    "qwen3.5": (PARTIAL, wide(1.0)),
    "gemma2": (WHOLE, {"softcap": 2.0, "window": 9}),
    "gemma3": (WHOLE, wide(1.0) | {"window": 9}),
    "gemma4 sliding": (WHOLE, wide(0.0) | {"v_norm_eps": 1e-6, "window": 9}),
    "gemma4 full": (PROPORTIONAL, wide(0.0) | {"v_norm_eps": 1e-6, "k_eq_v": True}),
}


def layer(options, **more):
    options = {"window": None} | options | more
    return Attention(HEADS, KV_HEADS, DIM, 0.3, **options)


def contexts(seqs, table, block_table):
    """(the CPU's, the GPU's) of a step whose sequences have (start, tokens), and RoPE for both."""
    starts, counts = zip(*seqs, strict=True)
    q_starts = [sum(counts[:i]) for i in range(len(counts))]
    positions = torch.cat([torch.arange(s, s + n) for s, n in seqs])
    row = torch.tensor([r for r, n in zip(ROWS, counts, strict=True) for _ in range(n)])
    slots = block_table[row, positions // PAGE].long() * PAGE + positions % PAGE
    cpu = AttentionBatch.build(q_starts, list(starts), list(counts), ROWS, block_table, PAGE)

    def ints(numbers):
        return torch.tensor(numbers, dtype=torch.int32)

    device = DeviceBatch(ints(ROWS), ints([s + n for s, n in seqs]), block_table, 8)
    if max(counts) > 1:
        single = 1 if counts[0] == 1 else 0
        tiles = [(i, at) for i, n in enumerate(counts) if i >= single for at in range(0, n, 8)]
        device = DeviceBatch(
            ints(ROWS), ints([s + n for s, n in seqs]), block_table, 8, ints(tiles), 8, ints(starts), ints(q_starts),
            ints(counts), single,
        )  # fmt: skip
    ropes = table.rows(positions, torch.float32), Rope(table.cos, table.sin, table.distance)
    return [(ForwardContext(positions, slots, batch), rope) for batch, rope in zip((cpu, device), ropes, strict=True)]


def width(attention):
    if not attention.own_kv:
        return HEADS * DIM
    return (HEADS + (2 - attention.k_eq_v) * KV_HEADS) * DIM


@pytest.mark.parametrize(
    ("kind", "borrower"),
    [*((kind, False) for kind in LAYERS), *((kind, True) for kind in LAYERS if kind.startswith("gemma4"))],
)
def test_device_path_equals_cpu_path(kind, borrower):
    torch.manual_seed(0)
    rope, options = LAYERS[kind]
    layers = [layer(options)]
    if borrower:  # a second layer, which reads what the first one caches
        fewer = {name: value for name, value in options.items() if name not in ("k_norm", "k_eq_v")}
        layers.append(layer(fewer, own_kv=False))
        layers[1].borrow_from(layers[0])
    table = RotaryEmbedding(DIM, 64, rope)
    block_table = torch.tensor([[0, 0, 0], [3, 5, 0], [1, 4, 2]], dtype=torch.int32)
    filled = torch.randn(2, 6, PAGE, KV_HEADS, DIM)
    caches = filled.clone(), filled.clone()
    for seqs in (CHUNK, STEP, BOTH):
        tokens = sum(n for _, n in seqs)
        inputs = [torch.randn(tokens, width(attention)) for attention in layers]
        results = []
        for (context, turn), (k_cache, v_cache) in zip(contexts(seqs, table, block_table), caches, strict=True):
            outs = []
            for attention, x in zip(layers, inputs, strict=True):
                attention.k_cache, attention.v_cache = k_cache, v_cache
                with forward_context(context):
                    outs.append(attention(x.clone(), turn))
            results.append(outs)
        for ours, reference in zip(*results, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(*caches, rtol=1e-4, atol=1e-4)
    assert not torch.equal(caches[0], filled)


K_SCALE, V_SCALE = 0.02, 0.05


def scaled_layers(kind, *, borrower):
    rope, options = LAYERS[kind]
    layers = [layer(options)]
    if borrower:
        fewer = {name: value for name, value in options.items() if name not in ("k_norm", "k_eq_v")}
        layers.append(layer(fewer, own_kv=False))
        layers[1].borrow_from(layers[0])
    layers[0].k_scale, layers[0].v_scale = K_SCALE, V_SCALE
    return rope, layers


def as_fp8(numbers, scale):
    return (numbers / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("kind", "borrower"), [
    ("llama", False), ("qwen3", False), ("qwen3.5", False), ("gemma2", False), ("gemma4 full", True),
])  # fmt: skip
def test_an_fp8_cache_with_scales_is_the_cache_that_it_stands_for(kind, borrower):
    """Both paths over an fp8 cache, beside the CPU's over a cache that holds the same numbers in float32."""
    torch.manual_seed(0)
    rope, layers = scaled_layers(kind, borrower=borrower)
    table = RotaryEmbedding(DIM, 64, rope)
    block_table = torch.tensor([[0, 0, 0], [3, 5, 0], [1, 4, 2]], dtype=torch.int32)
    before = [as_fp8(torch.randn(6, PAGE, KV_HEADS, DIM), scale) for scale in (K_SCALE, V_SCALE)]
    for seqs in (CHUNK, STEP):
        inputs = [torch.randn(sum(n for _, n in seqs), width(attention)) for attention in layers]
        (cpu, cpu_rope), (device, device_rope) = contexts(seqs, table, block_table)

        def run(context, turn, caches, inputs=inputs):
            outs = []
            for attention, x in zip(layers, inputs, strict=True):
                attention.k_cache, attention.v_cache = caches
                with forward_context(context):
                    outs.append(attention(x.clone(), turn))
            return torch.stack([out.float() for out in outs])

        by_cpu, by_device = ([cache.clone() for cache in before] for _ in range(2))
        ours, on_device = run(cpu, cpu_rope, by_cpu), run(device, device_rope, by_device)
        for one, other in zip(by_cpu, by_device, strict=True):
            close = (one.float() - other.float()).abs() <= other.float().abs() / 8 + 2**-9  # a rounding apart at most
            assert close.all()
        wide = [cache.float() * scale for cache, scale in zip(by_cpu, (K_SCALE, V_SCALE), strict=True)]
        layers[0].k_scale = layers[0].v_scale = 1.0
        reference = run(cpu, cpu_rope, wide)
        layers[0].k_scale, layers[0].v_scale = K_SCALE, V_SCALE
        # The reference attends to the step's own keys before they are rounded to fp8; a chunk on the GPU does, too.
        for outputs in (ours, on_device):
            assert (outputs - reference).norm() < 0.2 * reference.norm()
        if seqs is STEP:
            assert (on_device - ours).norm() < 0.05 * ours.norm()
        before = by_cpu
