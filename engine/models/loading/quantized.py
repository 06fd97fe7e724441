"""Give each layer of a model the format that the checkpoint has it in. Models know nothing of this.

Every matrix of a layer is found by the tensor that the model would load if nothing were quantised: `weights()` says
which checkpoint name fills which rows of which layer. The plan says how a module of that name is stored, and the
tensors that are there decide whether it is: lists of exceptions in published configs are sometimes incomplete.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from engine.errors import ModelError
from engine.layers.linear import Linear
from engine.layers.moe import ExpertLinear, RoutedExperts
from engine.layers.quant.base import ExpertMethod
from engine.layers.quant.stored import Found, Part, Spec, StoredExperts, StoredFormat, StoredLinear
from engine.message import msg
from engine.models.base import CausalLM
from engine.models.config.model import ModelConfig
from engine.models.config.quantization import QuantizationPlan, read_quantization, unreadable
from engine.models.loading.checkpoint import TensorInfo
from engine.models.loading.reader import DTYPES

_KINDS = frozenset({
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale",
    "weight_scale_inv", "weight_scale_2", "input_scale", "input_zero_point", "input_global_scale", "qweight", "qzeros",
    "scales", "g_idx",
})  # fmt: skip


def plain_name(name: str) -> str:
    """The tensor that a model asks for when nothing is quantised."""
    module, _, kind = name.rpartition(".")
    return f"{module}.weight" if kind in _KINDS else name


def use_stored_formats(
    model: CausalLM, config: ModelConfig, model_dir: Path, tensors: Mapping[str, TensorInfo] | None
) -> QuantizationPlan | None:
    """Before loading. `tensors`: those of the checkpoint; None while planning without one. Returns the plan, or None if
    nothing is quantised. Raises ModelError that names the module or tensor which cannot be read."""
    plan = read_quantization(config, model_dir)
    if plan is None:
        return None
    model.stored = plan
    model.adapt([plain_name(name) for name in tensors or ()])
    found = _by_module(tensors or {})
    layers = {id(m.weight): m for m in model.modules() if isinstance(m, Linear | ExpertLinear) and not _is_tied(m)}
    parts: dict[int, list[Part]] = {}
    dtype = _dtype(model)
    for name, view in model.weights().items():
        base = view if view._base is None else view._base
        layer = layers.get(id(base))
        if layer is None:
            continue
        if layer.weight.dim() == 3 and not name.endswith(".weight"):
            _refuse_stacked(name, tensors)
            continue
        module = name.removesuffix(".weight")
        count, start = view.shape[0], view.storage_offset() // layer.in_features
        stored = _format(plan, layer, module, found.get(module, {}), count, is_planned=tensors is None)
        of_module = found.get(module, {})
        adds_bias = stored is not None and stored.adds_biases and getattr(layer, "bias", None) is None
        part = Part(module, start, count, stored, of_module, has_zero_bias=adds_bias and "bias" in of_module)
        parts.setdefault(id(base), []).append(part)
    for key, of_layer in parts.items():
        if all(part.format is None for part in of_layer):
            continue
        layer = layers[key]
        if isinstance(layer, Linear):
            layer.use(StoredLinear(of_layer, layer.in_features, dtype))
        else:
            layer.use(StoredExperts(of_layer, layer.in_features, dtype))
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            _agree(module.gate_up_proj.method, module.down_proj.method)
    return plan


def _agree(*methods: ExpertMethod) -> None:
    """The kernels want both products of an expert in one form."""
    forms = {(m.form, m.stays_fp8) if isinstance(m, StoredExperts) else (None, False) for m in methods}
    if len(forms) > 1:
        for method in methods:
            if isinstance(method, StoredExperts):
                method.form = None


def stays_fp8(model: CausalLM) -> bool:
    """Whether some weight of a quantised checkpoint is multiplied as `--quantization fp8` does."""
    methods = (m.method for m in model.modules() if isinstance(m, Linear | ExpertLinear))
    return any(isinstance(method, StoredLinear | StoredExperts) and method.stays_fp8 for method in methods)


def _by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, Spec]]:
    found: dict[str, dict[str, Spec]] = {}
    for name, info in tensors.items():
        module, _, kind = name.rpartition(".")
        found.setdefault(module, {})[kind] = Spec(DTYPES[info.dtype], info.shape)
    return found


def _is_tied(layer: nn.Module) -> bool:
    return bool(getattr(layer, "tied", False))


def _dtype(model: CausalLM) -> torch.dtype:
    return next(m.weight.dtype for m in model.modules() if isinstance(m, Linear))


def _format(
    plan: QuantizationPlan, layer: Linear | ExpertLinear, module: str, found: Found, count: int, *, is_planned: bool
) -> StoredFormat | None:
    stored = plan.format_of(module)
    if stored is None or (is_planned and not layer.quantizable):
        return None
    weight = found.get("weight")
    is_plain = weight is not None and weight.dtype.is_floating_point and weight.dtype.itemsize > 1
    if is_plain and not any(kind in _KINDS for kind in found):
        return None
    if (problem := stored.refusal(count, layer.in_features)) is not None:
        raise unreadable(module, problem)
    return stored


def _refuse_stacked(name: str, tensors: Mapping[str, TensorInfo] | None) -> None:
    if tensors is not None and name in tensors and DTYPES[tensors[name].dtype].itemsize == 1:
        raise ModelError(
            msg("The experts of this checkpoint are quantised and stacked in one tensor ({name}); Atoll reads "
                "quantised experts with a matrix for each.", name=name))
