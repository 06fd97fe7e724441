"""The rope block of config.json, in its old and its new form."""

from typing import Any

from engine.errors import ModelError
from engine.message import msg
from engine.models.config.fields import get_field

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "proportional": (),
}


def read_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before), as one block."""
    block = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return check_rope(block, raw, get_field(raw, "rope_theta", float, 10000.0))


def check_rope(block: Any, raw: dict[str, Any], theta: float) -> dict[str, Any]:
    """The block, checked and completed for its type. `theta` is the default for blocks without one."""
    if not isinstance(block, dict):
        raise ModelError(msg("config.json: rope_parameters must be an object."))
    rope = dict(block)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", theta)
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise ModelError(msg("config.json: rope_type {kind} is not supported ({needed} are).", kind=f"{kind!r:.60}",
                             needed=", ".join(_NEEDED)))
    if kind == "yarn":
        rope.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    for name in ("rope_theta", *_NEEDED[kind]):
        if get_field(rope, name, float) <= 0:
            raise ModelError(msg("config.json: {name} of the rope block must be positive.", name=name))
    if not 0 < get_field(rope, "partial_rotary_factor", float, 1.0) <= 1:
        raise ModelError(msg("config.json: partial_rotary_factor of the rope block must be above 0 and at most 1."))
    return rope
