"""What one token reads of a model's weights: every linear layer, but of the experts only those that it goes to.

Norms and the rows of lookup tables count for nothing beside them.
"""

from torch import nn

from engine.layers.linear import Linear
from engine.layers.moe import ExpertLinear, Router


def token_bytes(model: nn.Module) -> int:
    """In bytes of the formats that the layers have after `finalize`. Weights need not be loaded."""
    modules = list(model.modules())
    read = sum(module.loaded_bytes for module in modules if isinstance(module, Linear))
    experts = [module for module in modules if isinstance(module, ExpertLinear)]
    routers = [module for module in modules if isinstance(module, Router)]
    if experts and routers:
        read += sum(module.loaded_bytes for module in experts) * routers[0].top_k // experts[0].num_experts
    return read
