"""The memory of the device, and what the model takes of it: the measured part of the memory plan (steps:
memory_profile.py)."""

from dataclasses import dataclass

import torch
from torch import nn

from engine.config import EngineConfig
from engine.core.kv.planner import GIB, MemoryBudget, MemoryPlan, gib
from engine.errors import OutOfMemoryPlanError
from engine.kernels.gemm import scaled
from engine.layers.embed import Embedding, LMHead
from engine.layers.linear import Linear
from engine.layers.moe import ExpertLinear
from engine.message import joined, msg
from engine.models.base import CausalLM
from engine.models.config.model import ModelConfig
from engine.worker.startup.host import host_memory

_DEFAULT_CPU_KV = 4 * GIB
_HOST_RESERVE = GIB // 2    # left to the rest of the machine on CPU
_CONTEXT = 3 * GIB // 4     # a CUDA context takes 0.4 to 0.7 GiB before anything runs in it
_ROUNDING = 32 << 20        # pages and tables are rounded up to the allocator's segments


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """Bytes on a GPU, as measured by memory_profile.py."""

    activations: int   # allocated and freed by each step
    graphs: int        # all graphs: the pool that they share, and the driver's records
    buffers: int       # the runner's buffers, which grow with the rows and tokens of a step, not with the context
    in_use: int        # on the whole GPU, by all processes, with the weights loaded but without the above


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU as it was before the engine took any of it. Bytes."""

    device: torch.device
    total: int
    others: int   # held by other processes, and by other engines in this process

    @classmethod
    def now(cls, device: torch.device) -> "GpuMemory":
        """Memory in use when the engine starts belongs to others, except this process's CUDA context. (In a container
        the driver does not report usage by process, so everything beyond a usual context counts as others'.)"""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return cls(device, total, reserved + max(0, total - free - reserved - _CONTEXT))

    def usable(self, utilization: float) -> int:
        """Bytes that this engine may use: a share of the whole GPU, as in vLLM, or what others leave, if that is
        less."""
        return min(int(self.total * utilization), self.total - self.others)

    def taken(self) -> int:
        """Bytes in use now by this engine: tensors, the allocator's cache, CUDA context and code."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - self.others


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and tables, with shared ones counted once and packed copies included, but without tables in
    host memory."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers()) if t.numel()}
    for table in _on_host(model):
        tensors.pop(table.weight.data_ptr(), None)
    packed = [m.packed_bytes for m in model.modules() if isinstance(m, Linear | ExpertLinear)]
    return sum(t.nbytes for t in tensors.values()) + sum(packed)


def loaded_bytes(model: nn.Module) -> int:
    """The value that `weight_bytes` will have on a GPU, for a model whose weights are not loaded yet."""
    sizes = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        if isinstance(module, LMHead) and module.tied:
            if module.method.converts:  # a copy beside the embedding
                sizes[id(module)] = module.loaded_bytes
        elif isinstance(module, Linear | ExpertLinear):
            for name, parameter in module._parameters.items():  # the checkpoint's format does not matter
                if name != "bias" and parameter is not None:
                    sizes.pop(id(parameter), None)
            sizes[id(module.weight)] = module.loaded_bytes
    return sum(sizes.values()) - host_bytes(model)


def host_bytes(model: nn.Module) -> int:
    """Bytes of the tables that stay in host memory (embedding_offload.py)."""
    return sum(table.weight.nbytes for table in _on_host(model))


def _on_host(model: nn.Module) -> list[Embedding]:
    return [module for module in model.modules() if isinstance(module, Embedding) and module.on_host]


def check_weights_fit(model: CausalLM, config: EngineConfig, gpu: GpuMemory) -> None:
    """Check before any weight is read. Raises OutOfMemoryPlanError."""
    weights, usable = loaded_bytes(model), gpu.usable(config.gpu_memory_utilization)
    if weights >= usable:
        ways = [msg("raise --gpu-memory-utilization")] if config.gpu_memory_utilization < 0.9 else []
        ways += [msg("--quantization fp8 halves most of the weights")] if config.quantization is None else []
        tables = sum(table.weight.nbytes for table in model.lookup_tables() if not table.on_host)
        if tables:
            ways.append(msg("--per-layer-embeddings host keeps {size} of them in host memory", size=gib(tables)))
        hint = msg("What helps: {ways}.", ways=joined([*ways, msg("a smaller model or a larger GPU")], "; "))
        raise OutOfMemoryPlanError(
            msg("The model does not fit: its weights take {weights}; {usable} of the {total} on "
                "{device} are usable (--gpu-memory-utilization {gpu_memory_utilization}; other processes hold "
                "{others}).", weights=gib(weights), usable=gib(usable), total=gib(gpu.total), device=gpu.device,
                gpu_memory_utilization=config.gpu_memory_utilization, others=gib(gpu.others)),
            "--gpu-memory-utilization", hint,
        )  # fmt: skip


def activation_bytes(config: ModelConfig, dtype: torch.dtype, num_tokens: int, num_seqs: int) -> int:
    """An upper bound for one step: residual, fused projections and float logits, without attention's gathered pages."""
    width = 4 * config.hidden_size + 3 * config.intermediate_size
    width += 3 * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return num_tokens * width * dtype.itemsize + 3 * num_seqs * config.vocab_size * 4


def cpu_budget(config: EngineConfig, weights: int, activations: int, weights_text: str = "") -> MemoryBudget:
    """The budget on a CPU, where the weights are loaded already. `weights_text` names their format.

    Without `kv_cache_memory_bytes` the pages get at most 4 GiB: the CPU path is for demonstrations and tests, and
    should not take all of a workstation's memory. Pages are mapped but not touched, so unused ones cost nothing.
    """
    total, available = host_memory()
    usable = weights + max(0, int(available * config.gpu_memory_utilization) - _HOST_RESERVE)
    limit = config.kv_cache_memory_bytes or _DEFAULT_CPU_KV
    return MemoryBudget(total, usable, weights, activations, limit, weights_text=weights_text)


def arithmetic_notes(model: nn.Module, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Lines for the plan: how this GPU multiplies fp8 weights, if the model has any."""
    quantized = any(isinstance(m, Linear | ExpertLinear) and m.scale is not None for m in model.modules())
    return [scaled.explained(device, dtype)] if quantized else []


def gpu_budget(config: EngineConfig, weights: int, needs: StepNeeds, gpu: GpuMemory, on_host: int = 0) -> MemoryBudget:
    """The budget on a GPU: its `gpu_memory_utilization`, and the needs that were measured with the weights loaded.
    `on_host` bytes of the weights stay in host memory."""
    return MemoryBudget(
        gpu.total,
        gpu.usable(config.gpu_memory_utilization),
        weights,
        needs.activations,
        config.kv_cache_memory_bytes,
        needs.graphs,
        max(0, needs.in_use - gpu.others - weights) + _ROUNDING,
        needs.buffers,
        on_host,
    )


def outcome(plan: MemoryPlan, gpu: GpuMemory) -> str:
    """One line for the log after everything is allocated: planned against actual memory."""
    torch.cuda.synchronize(gpu.device)
    torch.cuda.empty_cache()
    taken, reserved = gpu.taken(), torch.cuda.memory_reserved(gpu.device)
    return (
        f"Memory on {gpu.device}: {gib(taken)} taken, {gib(plan.resident_bytes)} planned "
        f"({'+' if taken > plan.resident_bytes else '-'}{gib(abs(taken - plan.resident_bytes))}); "
        f"allocated {gib(torch.cuda.memory_allocated(gpu.device))}, reserved {gib(reserved)}; "
        f"{gib(plan.budget.usable - taken)} left for steps, {gib(plan.budget.activations)} planned"
    )
