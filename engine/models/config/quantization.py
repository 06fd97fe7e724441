"""Reads what config.json says about quantised weights into one plan, which gives the format of each module by its name.

    quantization_config.quant_method   compressed-tensors   config_groups with targets, and names to ignore
                                       gptq                 bits, group_size, sym; `dynamic` rules by regular expression
                                       awq                  bits, group_size
                                       fp8                  weight_block_size; Qwen's and DeepSeek's own
                                       modelopt             quant_algo; older ones in hf_quant_config.json

Everything that Atoll cannot read is refused here, before any weight is read: a guess would yield fluent nonsense.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelError
from engine.layers.quant.awq import Awq
from engine.layers.quant.float4 import Mxfp4, Nvfp4
from engine.layers.quant.float8 import Float8
from engine.layers.quant.gptq import Gptq
from engine.layers.quant.integers import Int8, PackQuantized
from engine.layers.quant.stored import Inputs, StoredFormat
from engine.message import msg
from engine.models.config.fields import get_field
from engine.models.config.model import ModelConfig, read_json

Rule = Callable[[str], StoredFormat | None]
KvScales = Literal["fp8", "other"] | None  # what config.json says that the KV cache's scales are for

_MAX_RULES, _MAX_RULE_LENGTH = 20_000, 1000
_GPTQ_BITS, _PACKED_BITS = (4, 8), (2, 4, 8)
_INT8_LAYOUTS = ("int-quantized", "naive-quantized", "")
_PLAIN = re.compile(r".*\.(k_scale|v_scale|q_scale|k_proj\.output_scale|v_proj\.output_scale|kv_cache_scale)")


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """Raises ModelError, naming the module, if a module is stored in a way that Atoll cannot read."""

    method: str
    rule: Rule
    kv_scales: KvScales = None
    whole_head: bool = False  # whether the output head may be quantised by a rule that names no module

    def format_of(self, module: str) -> StoredFormat | None:
        """None: the module is not quantised."""
        return self.rule(module)

    def ignores(self, name: str) -> bool:
        """Tensors that no layer loads: scales for a quantised KV cache (loading/kv_scales.py)."""
        return _PLAIN.fullmatch(name) is not None


def read_quantization(config: ModelConfig, model_dir: Path) -> QuantizationPlan | None:
    """None if the weights are not quantised. Raises ModelError with the field or module."""
    raw = config.quantization
    if raw is None:
        beside = model_dir / "hf_quant_config.json"
        if not beside.exists():
            return None
        raw = get_field(read_json(beside), "quantization", dict) | {"quant_method": "modelopt"}
    method = get_field(raw, "quant_method", str, "an unnamed method")
    if method not in _READERS:
        raise ModelError(
            msg("config.json: the weights are quantised with {method}, which Atoll does not read.", method=method),
            msg("It reads {methods}, and checkpoints in 16 bits.", methods=", ".join(sorted(_READERS))),
        )  # fmt: skip
    return QuantizationPlan(method, _READERS[method](raw), _kv_scales(raw))


def _kv_scales(raw: Mapping[str, Any]) -> KvScales:
    scheme = raw.get("kv_cache_scheme")
    if scheme is None:
        return None
    fits = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    if not fits or scheme.get("dynamic") or not scheme.get("symmetric", True):
        return "other"
    return "fp8" if scheme.get("strategy", "tensor") == "tensor" else "other"


def unreadable(where: str, problem: str) -> ModelError:
    return ModelError(
        msg("config.json: {where} is quantised in a way that Atoll does not read: {problem}.", where=where,
            problem=problem),
        msg("Use another quantisation of this model, or the model in bfloat16."),
    )  # fmt: skip


# -- Qwen's and DeepSeek's fp8 -----------------------------------------------------------------------------------------


def _read_fp8(raw: Mapping[str, Any]) -> Rule:
    if raw.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise unreadable("quantization_config.fmt", msg("{value}, not e4m3", value=raw["fmt"]))
    skipped = _names(raw, "modules_to_not_convert") + _names(raw, "ignored_layers")
    block = raw.get("weight_block_size")
    stored: StoredFormat
    if block is None:
        stored = Float8("tensor", inputs="fp8")
    else:
        stored = Float8("block", _block(block, "weight_block_size"), "weight_scale_inv")
    return lambda module: None if any(_is_part(name, module) for name in skipped) else stored


def _block(value: Any, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(_is_size(n) for n in value):
        raise unreadable(where, msg("{value} is not a block size", value=f"{value!r:.60}"))
    return value[0], value[1]


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def _read_compressed_tensors(raw: Mapping[str, Any]) -> Rule:
    groups = get_field(dict(raw), "config_groups", dict, {})
    ignored = _names(raw, "ignore")
    if raw.get("sparsity_config") and get_field(raw["sparsity_config"], "format", str, "dense") != "dense":
        raise unreadable("sparsity_config", msg("sparse weights"))
    if raw.get("transform_config") and raw["transform_config"].get("config_groups"):
        raise unreadable("transform_config", msg("weights that are transformed while the model runs"))
    rules: list[tuple[str, StoredFormat]] = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise unreadable(f"config_groups.{name}", msg("it is no object"))
        stored = _scheme(group, str(group.get("format") or raw.get("format") or ""), f"config_groups.{name}")
        rules += [(target, stored) for target in _names(group, "targets")]
    # As in the library: an exact name goes before a regular expression, and both before a class.
    rules.sort(key=lambda rule: 2 if rule[0] == "Linear" else int(rule[0].startswith("re:")))
    for target in {target for target, _ in rules} | set(ignored):
        _check_pattern(target.removeprefix("re:"), target.startswith("re:"))

    def rule(module: str) -> StoredFormat | None:
        if any(_matches(name, module) for name in ignored):
            return None
        return next((stored for target, stored in rules if target == "Linear" or _matches(target, module)), None)

    return rule


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def _scheme(group: Mapping[str, Any], layout: str, where: str) -> StoredFormat:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict):
        raise unreadable(where, msg("it has no weights"))
    if weights.get("dynamic") or group.get("output_activations"):
        raise unreadable(where, msg("scales of weights or outputs that are found while the model runs"))
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    group_size = weights.get("group_size")
    strategy = strategy or ("tensor" if group_size is None else "channel" if group_size == -1 else "group")
    symmetric = weights.get("symmetric", True)
    if kind == "float" and bits == 4 and strategy in ("group", "tensor_group") and symmetric:
        if group_size == 16 and layout in ("nvfp4-pack-quantized", ""):
            return Nvfp4()
        if group_size == 32 and layout in ("mxfp4-pack-quantized", ""):
            return Mxfp4()
    if kind == "float" and bits == 8 and symmetric and layout in ("float-quantized", "naive-quantized", ""):
        if strategy == "block":
            return Float8("block", _block(weights.get("block_structure"), f"{where}.block_structure"))
        if strategy in ("tensor", "channel"):
            return Float8("tensor" if strategy == "tensor" else "channel", inputs=_inputs(inputs, "float", where))
    grouped = strategy in ("group", "channel")
    if kind == "int" and grouped and bits in _PACKED_BITS and (layout == "pack-quantized" or not (layout or bits == 8)):
        return PackQuantized(bits, _group_size(group_size, strategy, where), bool(symmetric),
                             inputs=_inputs(inputs, "int", where))  # fmt: skip
    if kind == "int" and bits == 8 and (grouped or strategy == "tensor") and layout in _INT8_LAYOUTS:
        size = -1 if strategy == "tensor" else _group_size(group_size, strategy, where)
        return Int8(size, bool(symmetric), inputs=_inputs(inputs, "int", where))
    words = {"format": layout, "num_bits": bits, "type": kind, "strategy": strategy, "group_size": group_size}
    raise unreadable(where, ", ".join(f"{name} {value}" for name, value in words.items() if value is not None))


def _inputs(raw: Any, kind: str, where: str) -> Inputs:
    """The format to which activations are rounded, if they have 8 bits; wider ones are not rounded."""
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise unreadable(f"{where}.input_activations", msg("it is no object"))
    if raw.get("num_bits") != 8 or raw.get("type", "int") != kind:
        raise unreadable(f"{where}.input_activations", msg("{bits} bits of type {kind}", bits=raw.get("num_bits"),
                                                           kind=raw.get("type", "int")))
    if not raw.get("symmetric", True):
        return None  # 16 bits: not rounded
    return "fp8" if kind == "float" else "int8"


def _group_size(value: Any, strategy: str, where: str) -> int:
    if strategy == "channel" or value == -1:
        return 0
    if not _is_size(value):
        raise unreadable(where, msg("group_size {value}", value=f"{value!r:.60}"))
    return value


# -- GPTQ and AWQ ------------------------------------------------------------------------------------------------------


def _read_gptq(raw: Mapping[str, Any]) -> Rule:
    layout = raw.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise unreadable("quantization_config.checkpoint_format", msg("{value}, not gptq or gptq_v2", value=layout))
    offset = 1 if layout == "gptq" else 0
    dynamic = raw.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(v, dict) for v in dynamic.values()):
        raise unreadable("quantization_config.dynamic", msg("it must map patterns to settings"))
    _check_count(dynamic, "dynamic")
    for pattern in dynamic:
        _check_pattern(pattern.removeprefix("-:").removeprefix("+:"), True)
    has_head = get_field(dict(raw), "lm_head", bool, False)
    _gptq(raw, offset, "quantization_config")

    def rule(module: str) -> StoredFormat | None:
        settings = dict(raw)
        if module.endswith("lm_head") and not has_head:
            return None
        for pattern, overrides in dynamic.items():
            if pattern.startswith("-:"):
                if re.match(pattern.removeprefix("-:"), module):
                    return None
            elif re.match(pattern.removeprefix("+:"), module):
                settings |= overrides
                break
        return _gptq(settings, offset, module)

    return rule


def _gptq(raw: Mapping[str, Any], offset: int, where: str) -> Gptq:
    bits, group, symmetric = raw.get("bits"), raw.get("group_size", -1), raw.get("sym", True)
    if bits not in _GPTQ_BITS:
        raise unreadable(where, msg("{bits} bits", bits=bits))
    in_order = not raw.get("desc_act")
    return Gptq(int(bits), _group_size(group, "group", where), bool(symmetric), offset, in_order=in_order)


def _read_awq(raw: Mapping[str, Any]) -> Rule:
    bits, version = raw.get("bits", raw.get("w_bit")), str(raw.get("version", "gemm")).lower()
    if bits != 4:
        raise unreadable("quantization_config", msg("{bits} bits", bits=bits))
    if version != "gemm":
        raise unreadable("quantization_config.version", msg("{value}, not gemm", value=version))
    if not raw.get("zero_point", True):
        raise unreadable("quantization_config.zero_point", msg("AWQ without zero points"))
    stored = Awq(_group_size(raw.get("group_size", raw.get("q_group_size", -1)), "group", "quantization_config"))
    skipped = _names(raw, "modules_to_not_convert")
    return lambda module: None if any(name in module for name in skipped) else stored


# -- ModelOpt ----------------------------------------------------------------------------------------------------------


def _read_modelopt(raw: Mapping[str, Any]) -> Rule:
    skipped = _names(raw, "exclude_modules") + _names(raw, "ignore")
    patterns = [re.compile(".*".join(map(re.escape, name.split("*")))) for name in skipped]
    algorithm = raw.get("quant_algo")
    layers = raw.get("quantized_layers") or {}
    if algorithm == "MIXED_PRECISION":
        if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
            raise unreadable("quantized_layers", msg("it must map modules to settings"))
        of_module = {name: _modelopt(layer.get("quant_algo"), name) for name, layer in layers.items()}
        return of_module.get
    stored = _modelopt(algorithm, "quant_algo")
    return lambda module: None if any(p.fullmatch(module) for p in patterns) else stored


def _modelopt(algorithm: Any, where: str) -> StoredFormat:
    if algorithm == "NVFP4":
        return Nvfp4("weight", "weight_scale_2", "input_scale")
    if algorithm == "FP8":
        return Float8("tensor", inputs="fp8")
    raise unreadable(where, msg("the algorithm {value}", value=f"{algorithm!r:.60}"))


# -- names and patterns ------------------------------------------------------------------------------------------------


def _names(raw: Mapping[str, Any], field: str) -> list[str]:
    value = raw.get(field)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise unreadable(f"quantization_config.{field}", msg("it must be a list of names"))
    _check_count(value, field)
    return value


def _check_count(rules: Any, field: str) -> None:
    if len(rules) > _MAX_RULES:
        raise unreadable(f"quantization_config.{field}", msg("more than {most} rules", most=_MAX_RULES))


def _check_pattern(pattern: str, is_pattern: bool) -> None:
    try:
        if len(pattern) > _MAX_RULE_LENGTH:
            raise unreadable("quantization_config", msg("a rule of {length} characters", length=len(pattern)))
        if is_pattern:
            re.compile(pattern)
    except re.error:
        raise unreadable("quantization_config", msg("{pattern} is not a regular expression",
                                                    pattern=f"{pattern!r:.60}")) from None


def _is_part(name: str, module: str) -> bool:
    """Whether `name` is the module, holds it, or is the last part of its name."""
    return f".{name}." in f".{module}."


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20


_READERS: dict[str, Callable[[Mapping[str, Any]], Rule]] = {
    "awq": _read_awq, "compressed-tensors": _read_compressed_tensors, "fp8": _read_fp8, "gptq": _read_gptq,
    "modelopt": _read_modelopt,
}  # fmt: skip
