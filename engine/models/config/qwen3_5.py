"""Fields of Qwen3.5's and Qwen3-Next's config.json beyond ModelConfig: which layers are recurrent, and their shape."""

from dataclasses import dataclass
from typing import Any

from engine.config import STATE_DTYPES
from engine.errors import ModelError
from engine.message import msg
from engine.models.config.fields import get_field, get_size
from engine.models.config.moe import MoeConfig, sparse_layers

_KINDS = ("linear_attention", "full_attention")
_PARTIAL_ROTARY_FACTOR = 0.25


@dataclass(frozen=True, slots=True)
class Qwen35Config:
    layers: tuple[str, ...]  # "linear_attention" (recurrent) or "full_attention"
    key_heads: int     # this and the next fields: the shape of a recurrent layer
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    state_dtype: str | None    # of the rule's state, one of STATE_DTYPES; None: not said
    rope: dict[str, Any]
    mixed_on_disk: bool    # the checkpoint interleaves a recurrent layer's projections by key head
    sparse: list[bool]     # layers with experts
    moe: MoeConfig | None = None
    shared_inner: int = 0  # width of the expert that all tokens share


def read_qwen3_5(raw: dict[str, Any], rope: dict[str, Any], *, is_next: bool = False) -> Qwen35Config:
    """`rope` is the checked rope block; `is_next`: of Qwen3-Next. Raises ModelError with the field's name."""
    if get_field(raw, "attention_bias", bool, False):
        raise ModelError(msg("config.json: attention_bias is not supported for this architecture."))
    if not get_field(raw, "attn_output_gate", bool, True):
        raise ModelError(msg("config.json: attn_output_gate: attention without a gate is not supported."))
    key_heads, value_heads = get_size(raw, "linear_num_key_heads", 16), get_size(raw, "linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise ModelError(msg("config.json: linear_num_value_heads ({value_heads}) is not a multiple of "
                             "linear_num_key_heads ({key_heads}).", value_heads=value_heads, key_heads=key_heads))
    moe, layers = None, _layer_kinds(raw)
    sparse = [False] * len(layers)
    if raw.get("num_experts"):
        renormalize = get_field(raw, "norm_topk_prob", bool, True) if is_next else True
        moe = MoeConfig.parse(raw, inner="moe_intermediate_size", renormalize=renormalize)
        sparse = sparse_layers(raw, len(layers)) if is_next else [True] * len(layers)
    factor = raw.get("partial_rotary_factor")
    return Qwen35Config(
        layers=layers,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=get_size(raw, "linear_key_head_dim", 128),
        value_dim=get_size(raw, "linear_value_head_dim", 128),
        conv_width=get_size(raw, "linear_conv_kernel_dim", 4),
        state_dtype=_state_dtype(raw),
        # mrope's sections use different positions for images; for text they are all equal.
        rope={"partial_rotary_factor": _PARTIAL_ROTARY_FACTOR if factor is None else factor} | rope,
        mixed_on_disk=is_next,
        sparse=sparse,
        moe=moe,
        shared_inner=get_size(raw, "shared_expert_intermediate_size") if moe else 0,
    )


def _state_dtype(raw: dict[str, Any]) -> str | None:
    name = raw.get("mamba_ssm_dtype")
    if name is not None and name not in STATE_DTYPES:
        raise ModelError(msg("config.json: mamba_ssm_dtype must be {state_dtypes}, found {name}.",
                             state_dtypes=" or ".join(STATE_DTYPES), name=f"{name!r:.60}"))
    return name


def _layer_kinds(raw: dict[str, Any]) -> tuple[str, ...]:
    """`layer_types`, or the family's pattern, in which every n-th layer has attention."""
    num_layers, kinds = get_size(raw, "num_hidden_layers"), raw.get("layer_types")
    if kinds is None:
        interval = get_size(raw, "full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise ModelError(msg("config.json: layer_types must name {num_layers} layers (num_hidden_layers), each "
                             "{kinds}.", num_layers=num_layers, kinds=" or ".join(_KINDS)))
    return tuple(kinds)
