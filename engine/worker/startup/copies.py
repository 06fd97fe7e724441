"""Second copies of weights on a GPU, with which some steps are faster. Kept where memory is left."""

from engine.config import EngineConfig
from engine.layers.quant import head
from engine.layers.quant.packed_gpu import keep_int4_copies
from engine.layers.token_bytes import token_bytes
from engine.models.base import CausalLM


def keep_copies(model: CausalLM, config: EngineConfig, free: int) -> None:
    """After loading, beside weights that leave `free` bytes."""
    if config.int4_copy == "auto":
        keep_int4_copies(model, free)
    head.keep_copy(model, token_bytes(model), free)
