"""What this device has and what the model takes of it: the measured half of the memory plan."""

import numpy as np
import torch
from torch import nn

from engine.config import EngineConfig
from engine.core.kv.planner import GIB, MemoryBudget
from engine.core.kv.spec import AttentionSpec
from engine.layers.linear import Linear
from engine.models.config import ModelConfig

_DEFAULT_CPU_KV = 4 * GIB
_GRAPH_BYTES = 1 * GIB      # decode graphs: their records, and their shared activations
_HOST_RESERVE = GIB // 2   # left to the rest of the machine on CPU


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and tables, shared ones once, packed copies included."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers()) if t.numel()}
    packed = [m.packed_bytes for m in model.modules() if isinstance(m, Linear)]
    return sum(t.nbytes for t in tensors.values()) + sum(packed)


def activation_bytes(config: ModelConfig, dtype: torch.dtype, num_tokens: int, num_seqs: int) -> int:
    """An upper bound for one step: residual, fused projections, attention's gathered pages aside, float logits."""
    width = 4 * config.hidden_size + 3 * config.intermediate_size
    width += 3 * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return num_tokens * width * dtype.itemsize + 3 * num_seqs * config.vocab_size * 4


def cpu_budget(config: EngineConfig, weights: int, activations: int) -> MemoryBudget:
    """The weights are in memory already; what is still available is shared out.

    Without `kv_cache_memory_bytes` the pages get at most 4 GiB: the CPU path is for demonstration and tests, and should
    not take a workstation's memory because it is there. They are mapped, not touched: unused ones cost nothing.
    """
    info = _meminfo()
    usable = weights + max(0, int(info["MemAvailable"] * config.gpu_memory_utilization) - _HOST_RESERVE)
    limit = config.kv_cache_memory_bytes or _DEFAULT_CPU_KV
    return MemoryBudget(info["MemTotal"], usable, weights, activations, limit)


def gpu_budget(config: EngineConfig, weights: int, activations: int, device: torch.device) -> MemoryBudget:
    """`gpu_memory_utilization` of the card, less what others and the CUDA context hold there."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    not_ours = total - free - torch.cuda.memory_reserved(device)
    usable = int(total * config.gpu_memory_utilization) - not_ours
    if config.enforce_eager:
        return MemoryBudget(total, usable, weights, activations, config.kv_cache_memory_bytes)
    return MemoryBudget(total, usable, weights, activations, config.kv_cache_memory_bytes, _GRAPH_BYTES)


def allocate_kv(spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[layers, 2, num_pages, page_size, Hkv, D] zeros.

    Zeros matter: attention reads whole pages and masks afterwards, and a stray NaN times zero is NaN. On CPU the zeros
    are the kernel's own (calloc), so a page costs memory only once it is written.
    """
    shape = (spec.num_layers, 2, num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
    if device.type != "cpu":
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device).view(dtype).view(shape)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes, `MemAvailable` lowered to the cgroup's limit if there is one."""
    info = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, value = line.split(":", 1)
            info[name] = int(value.split()[0]) * 1024
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit, \
                open("/sys/fs/cgroup/memory.current", encoding="ascii") as used:
            info["MemAvailable"] = min(info["MemAvailable"], int(limit.read()) - int(used.read()))
    except (OSError, ValueError):
        pass  # no cgroup v2 limit ("max" is no number)
    return info
