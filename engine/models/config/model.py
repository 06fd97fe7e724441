"""config.json and generation_config.json, read and checked before anything is allocated."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.message import msg, reason
from engine.models.config.fields import get_field, get_size
from engine.models.config.gemma import DEFAULTS as GEMMA
from engine.models.config.rope import read_rope

_MAX_JSON_BYTES = 16 << 20
_DTYPES = ("bfloat16", "float16", "float32")

# Architectures whose layers differ from each other, and the defaults of fields that their config.json omits. Their own
# modules read rope, windows and activation from `raw`; `rope` and `sliding_window` of ModelConfig are empty.
_LAYERED: dict[str, dict[str, Any]] = {**GEMMA}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size; ModelError names the file and the reason."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(msg("{path} is larger than {max_json_bytes} MiB; this is not a model configuration.",
                                 path=path, max_json_bytes=_MAX_JSON_BYTES >> 20))
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(msg("{path} does not exist.", path=path), msg("A model directory holds config.json, "
                                                                       "*.safetensors and "
                                                        "tokenizer.json.")) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(msg("{path} cannot be read as JSON: {error}.", path=path, error=reason(error))) from None
    if not isinstance(value, dict):
        raise ModelError(msg("{path} must hold a JSON object.", path=path))
    return value


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of config.json that a decoder like Llama's needs; `raw` has all fields."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: dict[str, Any]
    dtype: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    eos_token_ids: tuple[int, ...] = ()
    quantization: dict[str, Any] | None = field(default=None, repr=False)  # of the weights on disk: quantization.py
    raw: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, model_dir: Path) -> "ModelConfig":
        raw = read_json(model_dir / "config.json")
        generation = model_dir / "generation_config.json"
        return cls.parse(raw, read_json(generation) if generation.exists() else {})

    @classmethod
    def parse(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """Raises ModelError with the field's name for anything missing, of the wrong kind, or contradictory."""
        if "auto_map" in raw:
            raise ModelError(msg("config.json asks for code from the model's repository (auto_map); Atoll runs none."))
        architectures = raw.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise ModelError(msg("config.json: 'architectures' must name the model class."))
        layered = architectures[0] in _LAYERED
        quantization = _quantization(raw)
        raw = _LAYERED.get(architectures[0], {}) | _text_fields(raw)
        hidden, heads = get_size(raw, "hidden_size"), get_size(raw, "num_attention_heads")
        kv_heads = get_size(raw, "num_key_value_heads", heads)
        head_dim = get_size(raw, "head_dim", hidden // heads)
        if heads % kv_heads:
            raise ModelError(msg("config.json: num_attention_heads ({heads}) is not a multiple of num_key_value_heads "
                                 "({kv_heads}).", heads=heads, kv_heads=kv_heads))
        if head_dim % 2:
            raise ModelError(msg("config.json: head_dim ({head_dim}) must be even.", head_dim=head_dim))
        if not layered and raw.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(msg("config.json: hidden_act {hidden_act} is not supported (silu is).",
                                 hidden_act=f"{raw['hidden_act']!r}"))
        dtype = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
        if dtype not in _DTYPES:
            raise ModelError(msg("config.json: dtype {dtype} is not one of {dtypes}.", dtype=f"{dtype!r}",
                                 dtypes=", ".join(_DTYPES)))
        return cls(
            architecture=architectures[0],
            vocab_size=get_size(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=get_size(raw, "intermediate_size", raw.get("moe_intermediate_size")),
            num_layers=get_size(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=get_size(raw, "max_position_embeddings"),
            rms_norm_eps=get_field(raw, "rms_norm_eps", float, 1e-6),
            rope={} if layered else read_rope(raw),
            dtype=dtype,
            tie_word_embeddings=get_field(raw, "tie_word_embeddings", bool, False),
            attention_bias=get_field(raw, "attention_bias", bool, False),
            mlp_bias=get_field(raw, "mlp_bias", bool, False),
            sliding_window=None if layered else _window(raw),
            eos_token_ids=_eos(raw, generation or {}),
            quantization=quantization,
            raw=raw,
        )


def _quantization(raw: dict[str, Any]) -> dict[str, Any] | None:
    """The object that describes quantised weights, unchecked; a multimodal model may have it in its text_config."""
    text = raw.get("text_config")
    for holder in (raw, text if isinstance(text, dict) else {}):
        found = holder.get("quantization_config") or holder.get("compression_config")
        if found:
            if not isinstance(found, dict):
                raise ModelError(msg("config.json: quantization_config must be an object."))
            return found
    return None


def _text_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with the fields of a multimodal model's language model (`text_config`) at the top level."""
    text = raw.get("text_config")
    if text is None:
        return raw
    if not isinstance(text, dict):
        raise ModelError(msg("config.json: text_config must be an object."))
    whole = {name: value for name, value in raw.items() if not name.endswith("_config")}
    decided = {name for name in ("architectures", "dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id")
               if whole.get(name) is not None}
    return whole | {name: value for name, value in text.items() if name not in decided}


def _window(raw: dict[str, Any]) -> int | None:
    """The sliding window that every layer has, or None. Layers that differ in it are refused."""
    if raw.get("sliding_window") is None or not raw.get("use_sliding_window", True):
        return None
    window, num_layers = get_size(raw, "sliding_window"), get_size(raw, "num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None and "max_window_layers" in raw:  # Qwen2: the layers from this one on have the window
        full = min(get_field(raw, "max_window_layers", int), num_layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if not isinstance(kinds, list) or not kinds:
        return window
    if any(kind != kinds[0] for kind in kinds) or kinds[0] not in ("full_attention", "sliding_attention"):
        raise ModelError(msg("config.json: layers with and without a sliding window in one model (use_sliding_window, "
                             "max_window_layers, layer_types) are not supported."))
    return window if kinds[0] == "sliding_attention" else None


def _eos(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """End tokens of both files: generation_config.json often has more of them than config.json."""
    ids: list[int] = []
    for source in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        ids += source if isinstance(source, list) else [] if source is None else [source]
    if any(not isinstance(i, int) or i < 0 for i in ids):
        raise ModelError(msg("config.json: eos_token_id must be a token id or a list of them."))
    return tuple(dict.fromkeys(ids))
