"""`--batch-invariant`: GEMMs, experts and attention use one kernel and one order of sums, whatever else is in the step.

All other operations compute each token by itself anyway: norms, gates, RoPE, lookups, the choice of experts, sampling.
Recurrent layers cannot be batch-invariant: how a prompt is cut into steps decides where their states are rounded.
"""

from engine.core.kv.spec import StateLayer
from engine.errors import ConfigError
from engine.layers.attention import Attention
from engine.layers.embed import LMHead
from engine.layers.linear import Linear
from engine.layers.moe import RoutedExperts
from engine.layers.quant.head import BESIDE_INT4
from engine.layers.quant.unquantized import UNQUANTIZED
from engine.message import msg
from engine.models.base import CausalLM


def make_batch_invariant(model: CausalLM, *, fp8: bool = False, fp8_units: bool = True) -> None:
    """Call before loading. `fp8`: weights or cache are in fp8. `fp8_units`: the GPU multiplies fp8 numbers.

    Raises ConfigError if the model cannot be batch-invariant: recurrent layers, and fp8 that a GPU converts in
    software.
    """
    if fp8 and not fp8_units:
        raise ConfigError(
            msg("--batch-invariant is not available with fp8 weights or an fp8 cache on a GPU without fp8 units."),
            "--batch-invariant", msg("Leave one of the two out, or use a GPU of compute capability 8.9 or newer."),
        )  # fmt: skip
    if any(isinstance(layer, StateLayer) for layer in model.cache_layers()):
        raise ConfigError(
            msg("--batch-invariant is not available for {architecture}: its recurrent layers round their "
                "states where a step ends, and steps depend on what else runs.",
                architecture=model.config.architecture), "--batch-invariant",
            msg("Leave the flag out, or use a model with attention layers only."),
        )  # fmt: skip
    for module in model.modules():
        if isinstance(module, Linear | RoutedExperts | Attention):
            module.batch_invariant = True
        if isinstance(module, LMHead) and module.method is BESIDE_INT4:
            module.method = UNQUANTIZED.linear  # its few rows and its many run on different kernels
