"""The layers of a Gemma 2, 3 or 4 model, from its config.json: each may differ in window, heads, rope and width.

Released configs omit fields that equal the default of their family's class in transformers 5; DEFAULTS has those.
"""

from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError
from engine.message import msg
from engine.models.config.fields import get_field, get_scale, get_size
from engine.models.config.moe import MoeConfig
from engine.models.config.rope import check_rope, read_rope

_COMMON = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip
_GEMMA2 = _COMMON | {
    "vocab_size": 256_000, "num_hidden_layers": 26, "max_position_embeddings": 8192, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "sliding_window_pattern": 2, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}  # fmt: skip
_GEMMA3 = _COMMON | {
    "vocab_size": 262_208, "num_hidden_layers": 26, "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "sliding_window_pattern": 6, "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}  # fmt: skip
_GEMMA4 = _COMMON | {
    "vocab_size": 262_144, "num_hidden_layers": 30, "max_position_embeddings": 131_072, "sliding_window": 512,
    "sliding_window_pattern": 6, "final_logit_softcapping": None, "global_head_dim": 512,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
}  # fmt: skip

DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _GEMMA4 | {"hidden_size_per_layer_input": 0},
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4 | {"hidden_size_per_layer_input": 0},
}

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class GemmaLayerConfig:
    kind: str                   # "sliding_attention" or "full_attention": which rope it takes
    window: int | None
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    k_eq_v: bool = False        # V is K before its norm and rope: there is no v_proj
    kv_from: int | None = None  # the layer whose keys and values it reads; it has none of its own


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    layers: tuple[GemmaLayerConfig, ...]
    ropes: dict[str, dict[str, Any]]  # by kind of layer
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    norm_offset: float           # norms multiply by offset + w
    qk_norm: bool = True
    v_norm: bool = False
    # Gemma 4's per-layer embeddings: numbers per token and layer (0: none), and rows of their table.
    per_layer_size: int = 0
    per_layer_vocab: int = 0
    moe: MoeConfig | None = None  # experts in parallel with the MLP of every layer


def read_gemma2(raw: dict[str, Any]) -> GemmaConfig:
    rope = read_rope(raw)
    return _older(raw, {_SLIDING: rope, _FULL: rope}, qk_norm=False)


def read_gemma3(raw: dict[str, Any]) -> GemmaConfig:
    blocks = raw.get("rope_parameters")
    if blocks is None:  # before transformers 5, rope_scaling was meant for full layers only
        blocks = {_FULL: raw.get("rope_scaling") or {}}
    return _older(raw, _ropes(
        blocks, raw,
        {_SLIDING: get_field(raw, "rope_local_base_freq", float, 1e4), _FULL: get_field(raw, "rope_theta", float, 1e6)},
    ), qk_norm=True)  # fmt: skip


def _older(raw: dict[str, Any], ropes: dict[str, dict[str, Any]], *, qk_norm: bool) -> GemmaConfig:
    _check_common(raw)
    window, kv_heads, head_dim, inner = (
        get_size(raw, n) for n in ("sliding_window", "num_key_value_heads", "head_dim", "intermediate_size")
    )
    return GemmaConfig(
        layers=tuple(
            GemmaLayerConfig(kind, window if kind == _SLIDING else None, kv_heads, head_dim, inner)
            for kind in _layer_kinds(raw)
        ),
        ropes=ropes,
        attention_scale=get_size(raw, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=get_scale(raw, "attn_logit_softcapping"),
        final_softcap=get_scale(raw, "final_logit_softcapping"),
        norm_offset=1.0,
        qk_norm=qk_norm,
    )


def read_gemma4(raw: dict[str, Any]) -> GemmaConfig:
    _check_common(raw)
    kinds = _layer_kinds(raw)
    kinds[-1] = _FULL
    blocks = raw.get("rope_parameters")
    if blocks is None:
        blocks = {_FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
    shapes = _shapes(raw, kinds)
    per_layer_size, per_layer_vocab = _count(raw, "hidden_size_per_layer_input"), raw["vocab_size_per_layer_input"]
    if per_layer_size and get_size(raw, "vocab_size_per_layer_input") < get_size(raw, "vocab_size"):
        raise ModelError(msg("config.json: vocab_size_per_layer_input is smaller than vocab_size."))
    inner, wide = get_size(raw, "intermediate_size"), get_field(raw, "use_double_wide_mlp", bool, False)
    k_eq_v = get_field(raw, "attention_k_eq_v", bool, False)
    own = len(kinds) - _count(raw, "num_kv_shared_layers")
    layers = []
    for i, (kind, (kv_heads, head_dim)) in enumerate(zip(kinds, shapes, strict=True)):
        full, shares = kind == _FULL, i >= own
        layers.append(GemmaLayerConfig(
            kind,
            window=None if full else get_size(raw, "sliding_window"),
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=inner * 2 if wide and shares else inner,
            k_eq_v=k_eq_v and full,
            kv_from=_last(kinds, kind, own) if shares else None,
        ))  # fmt: skip
    return GemmaConfig(
        layers=tuple(layers),
        ropes=_ropes(blocks, raw, {_SLIDING: 1e4, _FULL: 1e6}),
        attention_scale=1.0,
        attention_softcap=None,
        final_softcap=get_scale(raw, "final_logit_softcapping"),
        norm_offset=0.0,
        v_norm=True,
        per_layer_size=per_layer_size,
        per_layer_vocab=per_layer_vocab,
        moe=_experts(raw) if get_field(raw, "enable_moe_block", bool, False) else None,
    )


def _experts(raw: dict[str, Any]) -> MoeConfig:
    num_experts, top_k = get_size(raw, "num_experts"), get_size(raw, "top_k_experts")
    if top_k > num_experts:
        raise ModelError(msg("config.json: top_k_experts ({top_k}) is larger than num_experts ({num_experts}).",
                             top_k=top_k, num_experts=num_experts))
    return MoeConfig(num_experts, top_k, get_size(raw, "moe_intermediate_size"), renormalize=True)


def _shapes(raw: dict[str, Any], kinds: list[str]) -> list[tuple[int, int]]:
    """(key heads, head_dim) of each layer: `per_layer_config` in new files, a field for each number in older ones."""
    sliding = get_size(raw, "num_key_value_heads"), get_size(raw, "head_dim")
    overrides = raw.get("per_layer_config")
    if overrides is None:
        k_eq_v = get_field(raw, "attention_k_eq_v", bool, False)
        kv_heads = get_size(raw, "num_global_key_value_heads", sliding[0]) if k_eq_v else sliding[0]
        full = kv_heads, get_size(raw, "global_head_dim")
        shapes = [full if kind == _FULL else sliding for kind in kinds]
    else:
        shapes = [_override(overrides, i, sliding) for i in range(len(kinds))]
    heads = get_size(raw, "num_attention_heads")
    of_kind = dict(zip(kinds, shapes, strict=True))
    for kind, shape in zip(kinds, shapes, strict=True):
        if shape != of_kind[kind]:
            raise ModelError(msg("config.json: per_layer_config gives {kind} layers different shapes.", kind=kind))
        if heads % shape[0] or shape[1] % 2:
            raise ModelError(msg("config.json: {kind} layers cannot have {shape} key heads of {shape_2} numbers for "
                                 "{heads} query heads.", kind=kind, shape=shape[0], shape_2=shape[1], heads=heads))
    return shapes


def _override(overrides: Any, layer: int, usual: tuple[int, int]) -> tuple[int, int]:
    block = overrides.get(str(layer), {}) if isinstance(overrides, dict) else None
    if not isinstance(block, dict) or not set(block) <= {"num_key_value_heads", "head_dim"}:
        raise ModelError(msg("config.json: per_layer_config must give layers by number, and of each no more than "
                             "num_key_value_heads and head_dim."))
    return get_size(block, "num_key_value_heads", usual[0]), get_size(block, "head_dim", usual[1])


def _check_common(raw: dict[str, Any]) -> None:
    activation = raw.get("hidden_activation")
    if activation not in (None, "gelu_pytorch_tanh"):
        raise ModelError(msg("config.json: hidden_activation {activation} is not supported (gelu_pytorch_tanh is).",
                             activation=f"{activation!r:.60}"))
    if raw.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ModelError(msg("config.json: use_bidirectional_attention: a model whose text attends to what "
                             "follows it is "
                             "an encoder and generates nothing."))
    if raw.get("attention_bias"):
        raise ModelError(msg("config.json: attention_bias is not supported for this architecture."))


def _layer_kinds(raw: dict[str, Any]) -> list[str]:
    """`layer_types`, or the family's pattern, in which every n-th layer is full."""
    num_layers, kinds = get_size(raw, "num_hidden_layers"), raw.get("layer_types")
    if kinds is None:
        pattern = get_size(raw, "sliding_window_pattern")
        return [_FULL if (i + 1) % pattern == 0 else _SLIDING for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {_SLIDING, _FULL}:
        raise ModelError(msg("config.json: layer_types must name {num_layers} layers (num_hidden_layers), each "
                             "{sliding} or {full}.", num_layers=num_layers, sliding=_SLIDING, full=_FULL))
    return list(kinds)


def _ropes(blocks: Any, raw: dict[str, Any], thetas: dict[str, float]) -> dict[str, dict[str, Any]]:
    if not isinstance(blocks, dict) or not set(blocks) <= set(thetas):
        raise ModelError(msg("config.json: rope_parameters must have a block for {sliding} and one for {full} layers.",
                             sliding=_SLIDING, full=_FULL))
    return {kind: check_rope(blocks.get(kind) or {}, raw, theta) for kind, theta in thetas.items()}


def _last(kinds: list[str], kind: str, end: int) -> int:
    """The last layer before `end` of that kind."""
    found = [i for i in range(end) if kinds[i] == kind]
    if not found:
        raise ModelError(msg("config.json: num_kv_shared_layers leaves no {kind} layer whose keys the others "
                             "could share.",
                             kind=kind))
    return found[-1]


def _count(raw: dict[str, Any], name: str) -> int:
    """A number from 0 up, below the number of layers if it counts layers; null means 0."""
    value = 0 if raw.get(name) is None else get_field(raw, name, int)
    limit = get_size(raw, "num_hidden_layers") if name == "num_kv_shared_layers" else 2**31
    if isinstance(value, bool) or not 0 <= value < limit:
        raise ModelError(msg("config.json: {name} must be a number from 0 to {limit}, found {value}.", name=name,
                             limit=limit - 1, value=f"{value!r}"))
    return value
