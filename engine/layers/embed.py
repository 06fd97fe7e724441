"""Token embedding and the output head, which many models tie together."""

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.runtime import host_memory
from engine.layers.linear import Linear
from engine.layers.quant.base import LinearMethod
from engine.layers.weight_memory import empty_parameter


class Embedding(nn.Module):
    """[T] token ids -> [T, H]; multiplied by `scale`, which is rounded to the weight's dtype (Gemma: the root of H)."""

    compute_dtype: torch.dtype | None = None  # dtype of the result on a CPU; None: the weight's
    on_host = False  # the weight is in page-locked host memory; the GPU reads only the rows it needs

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size)
        self.scale = torch.tensor(scale, dtype=self.weight.dtype, device="cpu").item()

    def keep_on_host(self) -> None:
        """Before loading: put the weight into host memory, which worker/startup/embedding_offload.py locks later.

        Raises HostMemoryError."""
        self.weight = nn.Parameter(host_memory.empty(self.weight.shape, self.weight.dtype), requires_grad=False)
        self.on_host = True

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.on_host:
            from engine.kernels.pointwise.host_rows import gather_rows

            return gather_rows(self.weight, token_ids, self.scale)
        rows = F.embedding(token_ids, self.weight)
        if self.compute_dtype is not None:
            rows = rows.to(self.compute_dtype)
        return rows if self.scale == 1 else rows.mul_(self.scale)


class LMHead(Linear):
    """[S, H] -> [S, V] logits. Tied, it shares the embedding's rows while they load. A format that converts them makes
    a copy; on a CPU there is a packed copy for speed."""

    tied = False
    quantizable = False  # a format has a method of its own for it

    def use(self, method: LinearMethod) -> None:
        if self.tied:
            self.method = method
        else:
            super().use(method)

    def tie(self, embedding: Embedding) -> None:
        self.weight = embedding.weight
        self.tied = True

    def finalize(self, *, keep_weight: bool = False) -> None:
        super().finalize(keep_weight=self.tied or keep_weight)
