"""What the worker needs of any model family."""

from collections.abc import Mapping

import torch
from torch import nn

from engine.models.config import ModelConfig

Weights = Mapping[str, torch.Tensor]


class CausalLM(nn.Module):
    """Token ids [T] -> hidden states [T, H] (`forward`) -> logits [S, V] (`logits`).

    The tokens of a step stand one behind the other, whatever sequence they belong to; layers find out through
    `get_context()`.
    """

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        self.config = config
        self.max_model_len = max_model_len

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def weights(self) -> Weights:
        """Checkpoint name -> the tensor (or slice of a fused one) it is loaded into: exactly what must be on disk."""
        raise NotImplementedError

    def ignores(self, name: str) -> bool:
        """Tensors that some checkpoints carry and this family does not need."""
        return name.endswith("rotary_emb.inv_freq")
