"""Scales of an fp8 KV cache that a quantised checkpoint carries: the cache holds k / k_scale and v / v_scale.

    self_attn.k_scale               self_attn.v_scale               compressed-tensors, fp8
    self_attn.k_proj.output_scale   self_attn.v_proj.output_scale   compressed-tensors, older
    self_attn.k_proj.k_scale        self_attn.v_proj.v_scale        ModelOpt

One number for the keys of a layer, and one for its values. A cache in 16 bits has no use for them.
"""

import logging
import re
from collections.abc import Mapping

from safetensors import safe_open

from engine.errors import ModelError
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.quant.stored import bad_values
from engine.message import msg
from engine.models.base import CausalLM
from engine.models.config.quantization import unreadable
from engine.models.loading.checkpoint import TensorInfo

log = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<prefix>.*?)(?:\.(?P<of>[kv])_proj\.output_scale|(?:\.[kv]_proj)?\.(?P<kind>[kv])_scale)")
_FLOATS = ("F32", "F16", "BF16")


def use_kv_scales(model: CausalLM, tensors: Mapping[str, TensorInfo], *, is_fp8: bool) -> None:
    """Before loading: give every attention layer its scales. `is_fp8`: of the KV cache. Raises ModelError that names
    a scale which is missing, of no layer, or no positive number."""
    if model.stored is None:
        return  # such tensors are then refused as unknown
    found = {name: match for name in tensors if (match := _NAME.fullmatch(name)) is not None}
    promised = model.stored.kv_scales
    if not found and promised is None:
        return
    if not is_fp8:
        log.info("The checkpoint has scales for an fp8 KV cache; another one does not use them.")
        return
    if promised == "other":
        raise unreadable("quantization_config.kv_cache_scheme", msg("scales for another KV cache than fp8 with one "
                                                                    "number for each layer"))
    layers = _attention_layers(model)
    scales: dict[str, dict[str, str]] = {prefix: {} for prefix in layers}
    for name, match in found.items():
        if match["prefix"] not in layers:
            if not model.ignores(name):
                raise ModelError(msg("The checkpoint holds tensor {name}, a scale of a KV cache that this architecture "
                                     "does not have.", name=name))
        elif (before := scales[match["prefix"]].setdefault(match["kind"] or match["of"], name)) != name:
            raise ModelError(msg("The checkpoint holds a scale of the KV cache twice: {name} and {name_2}.",
                                 name=before, name_2=name))
    owners = [prefix for prefix, layer in layers.items() if layer.own_kv]
    for prefix in owners:
        for kind in "kv":
            if kind not in scales[prefix]:
                raise ModelError(msg("The checkpoint has scales for the KV cache, but lacks {missing}.",
                                     missing=f"{prefix}.{kind}_scale"))
        layers[prefix].k_scale, layers[prefix].v_scale = (_read(scales[prefix][k], tensors) for k in "kv")
    model.kv_scales = frozenset(scales[prefix][kind] for prefix in owners for kind in "kv")
    log.info("The fp8 KV cache uses the checkpoint's scales (%d layers).", len(owners))


def _attention_layers(model: CausalLM) -> dict[str, Attention]:
    """By the beginning of their tensors' names in the checkpoint: "model.layers.0.self_attn"."""
    of_parameter: dict[int, Attention] = {}
    for module in model.modules():
        children = list(module.children())
        for attention in (child for child in children if isinstance(child, Attention)):
            for linear in (child for child in children if isinstance(child, Linear)):
                of_parameter |= {id(p): attention for p in linear._parameters.values() if p is not None}
    layers: dict[str, Attention] = {}
    for name, view in model.weights().items():
        attention = of_parameter.get(id(view if view._base is None else view._base))
        if attention is not None:
            layers[name.rsplit(".", 2)[0]] = attention
    return layers


def _read(name: str, tensors: Mapping[str, TensorInfo]) -> float:
    info = tensors[name]
    module, _, kind = name.rpartition(".")
    if info.dtype not in _FLOATS or info.shape not in ((), (1,)):
        raise bad_values(module, kind, msg("it is {dtype} of shape {shape}, not one number", dtype=info.dtype,
                                           shape=list(info.shape)))
    with safe_open(info.shard, framework="pt") as file:
        scale = float(file.get_tensor(name))
    if not 0 < scale < float("inf"):
        raise bad_values(module, kind, msg("it is {value}, not a positive number", value=scale))
    return scale
