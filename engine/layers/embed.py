"""Token embedding and the output head, which many models tie together."""

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.linear import Linear, empty_parameter


class Embedding(nn.Module):
    """[T] token ids -> [T, H]; times `scale`, rounded to the weight's dtype (Gemma: the root of H)."""

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size)
        self.scale = torch.tensor(scale, dtype=self.weight.dtype).item()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(token_ids, self.weight)
        return rows if self.scale == 1 else rows.mul_(self.scale)


class LMHead(Linear):
    """[S, H] -> [S, V] logits. Tied, it shares the embedding's rows (and on CPU keeps a packed copy for speed)."""

    quantizable = False

    def tie(self, embedding: Embedding) -> None:
        self.weight = embedding.weight
        self.tied = True

    tied = False

    def finalize(self, *, keep_weight: bool = False) -> None:
        super().finalize(keep_weight=self.tied or keep_weight)
