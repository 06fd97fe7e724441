"""What config.json says about a model's experts."""

from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError
from engine.message import msg
from engine.models.config.fields import get_size


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    top_k: int        # experts per token
    inner: int        # width of an expert's MLP
    renormalize: bool  # whether the weights of the chosen experts are divided by their sum

    @classmethod
    def parse(cls, raw: dict[str, Any], *, inner: str, renormalize: bool) -> "MoeConfig":
        """`inner` names the field with an expert's width. Raises ModelError with the field's name."""
        name = "num_experts" if "num_experts" in raw else "num_local_experts"
        num_experts, top_k = get_size(raw, name), get_size(raw, "num_experts_per_tok")
        if top_k > num_experts:
            raise ModelError(msg("config.json: num_experts_per_tok ({top_k}) is larger than {name} ({num_experts}).",
                                 top_k=top_k, name=name, num_experts=num_experts))
        return cls(num_experts, top_k, get_size(raw, inner), renormalize)


def sparse_layers(raw: dict[str, Any], num_layers: int) -> list[bool]:
    """For each layer whether it has experts: every `decoder_sparse_step`-th, but those in `mlp_only_layers`."""
    step = get_size(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in dense):
        raise ModelError(msg("config.json: mlp_only_layers must be a list of layer numbers, found {dense}.",
                             dense=f"{dense!r:.60}"))
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
