"""Finds out which one-row GEMMs a model's decode step runs, by running the model's own code.

The model is built on the meta device. One decode step runs on `meta` tensors that claim to be on a GPU, and its kernels
are recorded instead of launched. So this needs neither a GPU nor weights.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from engine.core.kv.spec import CacheSpec
from engine.kernels.gemm.tiles import GemmShape
from engine.layers.context import DeviceBatch, ForwardContext, StateBatch, forward_context
from engine.layers.quant.head import copied_head, keep_copy
from engine.layers.token_bytes import token_bytes
from engine.models.base import CausalLM
from engine.models.config.model import read_json
from engine.models.loading.loader import quantize
from engine.models.registry import empty_model
from engine.worker.cache import Cache

if TYPE_CHECKING:
    from engine.kernels.runtime.launcher import Job

_SMALLEST = 1_000_000  # bytes of a weight: smaller ones finish before their tiles matter
_BOTH_FORMS = 20 * 10**9  # bytes in bf16: models up to this size are served in bf16 or in fp8, larger ones in fp8
_ANY_MEMORY = 1 << 60
_PAGE_SIZE = 16
_MULTIPROCESSORS = 132  # has an effect on attention kernels only


class Subject(NamedTuple):
    """A GEMM, with the operations that the model fuses into it."""

    gemm: GemmShape
    models: tuple[str, ...]
    gate: str | None = None
    bias: bool = False
    residual: bool = False

    @property
    def num_bytes(self) -> int:
        return self.gemm.outputs * self.gemm.inner * self.gemm.itemsize

    def __str__(self) -> str:
        gemm = self.gemm
        words = [f"{gemm.outputs}x{gemm.inner}", "fp8" if gemm.itemsize == 1 else "bf16"]
        return " ".join(words + ["gated"] * gemm.gated + ["normed"] * gemm.normed + ["in blocks"] * bool(gemm.block))


def find_subjects(configs: Iterable[Path], quantization: str | None) -> list[Subject]:
    """Every distinct GEMM of these models once, the largest weight first. `quantization`: "fp8", "none", or None for
    both, but only fp8 for large models."""
    found: dict[GemmShape, Subject] = {}
    for config in configs:
        for form in [quantization] if quantization else sensible_forms(config):
            for subject in of_step(empty_model(config), form, config.name):
                before = found.setdefault(subject.gemm, subject)
                names = dict.fromkeys((*before.models, config.name))
                found[subject.gemm] = before._replace(models=tuple(names))
    large = [subject for subject in found.values() if subject.num_bytes >= _SMALLEST]
    return sorted(large, key=lambda subject: (-subject.num_bytes, subject.gemm))


def sensible_forms(config: Path) -> Sequence[str]:
    """The weight formats in which a model is usually served: a quantised checkpoint as it is, others by their size."""
    if "quantization_config" in read_json(config / "config.json"):
        return ("none",)
    numbers = sum(parameter.numel() for parameter in empty_model(config).parameters())
    return ("fp8", "none") if 2 * numbers <= _BOTH_FORMS else ("fp8",)


def head_has_copy(config: Path, quantization: str) -> bool:
    """Whether few rows read a copy of the model's output head."""
    model = empty_model(config)
    if quantization == "fp8":
        quantize(model, "fp8")
    return copied_head(model, token_bytes(model)) is not None


def of_step(model: CausalLM, quantization: str, name: str) -> list[Subject]:
    """The GEMMs of a one-sequence decode step, including the output head. `model` has no memory; its modules are
    finalised here."""
    from engine.kernels.runtime.launcher import recording

    model.set_state_dtype("auto", "cuda")
    if quantization == "fp8":
        quantize(model, "fp8")
    with torch.inference_mode(), _AsOnGpu(), recording() as jobs:
        _finalize(model)
        keep_copy(model, token_bytes(model), _ANY_MEMORY)
        model.logits(_hidden(model))
    return subjects_of(jobs, name)


def subjects_of(jobs: "Iterable[Job]", name: str) -> list[Subject]:
    """The GEMMs among the kernels of a decode step, each once."""
    from engine.kernels.gemm import small_batch

    found: dict[GemmShape, Subject] = {}
    for job in sorted((job for job in jobs if job.kernel is small_batch._vector_kernel), key=repr):
        types, constants = dict(zip(job.kernel.arguments, job.types, strict=True)), dict(job.constants)
        gate = constants["GATE"]
        gemm = GemmShape(
            constants["N"] * (1 if gate is None else 2), constants["K"], 1 if types["scale_ptr"] else 2,
            gate is not None, types["norm_ptr"] is not None, constants["BLOCK"],
        )  # fmt: skip
        around = {"bias": types["bias_ptr"] is not None, "residual": types["residual_ptr"] is not None}
        found.setdefault(gemm, Subject(gemm, (name,), gate, **around))
    return list(found.values())


class _AsOnGpu(TorchFunctionMode):
    """Makes tensors claim to be on a GPU, so that layers take their GPU path."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func == _IS_CUDA else func(*args, **(kwargs or {}))


_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def _finalize(model: CausalLM) -> None:
    """Finalise all modules as after loading: children before their parents."""
    for module in reversed(list(model.modules())):
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to("meta"))
        settle = getattr(module, "finalize", None)
        if settle is not None:
            settle()


def _hidden(model: CausalLM) -> torch.Tensor:
    """The hidden states of a decode step of one sequence."""
    device = torch.device("meta")
    spec = CacheSpec(tuple(model.cache_layers()), torch.bfloat16.itemsize, _PAGE_SIZE)
    Cache(spec, 1, torch.bfloat16, device).bind(model.cache_modules())
    number = torch.zeros(1, dtype=torch.int64, device=device)
    index = number.int()
    batch = DeviceBatch(index, index, torch.zeros(1, 1, dtype=torch.int32, device=device), _MULTIPROCESSORS)
    groups = [(number, batch)] * len(spec.groups)
    state = StateBatch(number, index, index, index) if spec.slot_bytes else None
    with forward_context(ForwardContext(number, *groups[0], groups[1:], state)):
        return model(number)
