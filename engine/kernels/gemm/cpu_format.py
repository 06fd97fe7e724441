"""The dtype that a CPU computes in: bf16 if it has instructions for it, else float32.

`--dtype` says how weights and the KV cache are stored. A CPU with AVX512-BF16 or AMX also multiplies bf16. Others would
emulate it, at a quarter of the speed of float32 or less; there activations, products, attention and logits are float32,
and weights stay in their 16 bits (fp16_weight.py). The instruction set decides, not a measurement: a model must not
answer differently after a restart because the machine was busy.
"""

import functools
import os
import platform
from pathlib import Path

import torch

from engine.kernels.gemm import fp16_weight

# Limits of oneDNN's (ONEDNN_MAX_CPU_ISA) under which it does not use bf16 instructions, though the CPU may have them.
_WITHOUT_BF16 = {"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni"}
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the first that is set counts


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """The dtype of activations and products on this CPU, of a model whose weights are `stored`."""
    if stored == torch.float32 or not fp16_weight.is_available():
        return stored
    return torch.bfloat16 if stored == torch.bfloat16 and has_bf16_products() else torch.float32


def has_bf16_products() -> bool:
    """Whether products of bf16 matrices run on instructions for them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    limit = next((value for name in _LIMITS if (value := os.environ.get(name))), "")
    return torch.cpu._is_avx512_bf16_supported() and limit.lower() not in _WITHOUT_BF16


@functools.cache
def reads_bf16_slowly(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether oneDNN reads bf16 weights at half the speed of the memory or less, for few rows: on a Zen 4, the only CPU
    of AMD's family 25 with bf16 instructions (docs/performance/cpu.md)."""
    try:
        first, _, _ = cpuinfo.read_text(encoding="ascii", errors="replace").partition("\n\n")
    except OSError:
        return False
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    return (facts.get("vendor_id"), facts.get("cpu family")) == ("AuthenticAMD", "25")


def least_rows() -> int:
    """The rows that oneDNN multiplies with a bf16 weight in the least time: there four take three quarters of the time
    of two."""
    return 4 if reads_bf16_slowly() else 2


def describe(stored: torch.dtype, compute: torch.dtype) -> str:
    """For the memory plan: how weights are stored, what multiplies them, and why."""
    name, products = _name(stored), _name(compute)
    if stored == compute == torch.bfloat16 and has_bf16_products():
        return f"{name}; computes in {products}: this CPU has bf16 instructions"
    if stored == compute:
        return f"{name}; computes in {products}"
    why = "no bf16 instructions" if stored == torch.bfloat16 else f"no fast {name} products"
    return f"{name}; computes in {products}: this CPU has {why}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
