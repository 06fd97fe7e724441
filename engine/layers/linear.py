"""Matrix products with a weight, and several of them fused into one."""

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.threads import num_threads


def empty_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ + b;  x [T, in], W [out, in].

    On a CPU with bf16 units the weight is re-ordered once into oneDNN's blocked layout: small batches then read it at
    about 1.7 times the speed of the plain layout (measured on Zen 5, 1-16 rows, 30 against 17 GB/s).
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None
        self._packed: torch.Tensor | None = None
        self._threads = 1

    def finalize(self, *, keep_weight: bool = False) -> None:
        """After loading: choose the fastest form of the weight and drop the other (unless somebody shares it)."""
        if can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, _PACK_ROWS)
            self._threads = torch.get_num_threads()
            if not keep_weight:
                self.weight = nn.Parameter(torch.empty(0, dtype=self.weight.dtype), requires_grad=False)

    @property
    def packed_bytes(self) -> int:
        return 0 if self._packed is None else self._packed.numel() * self._packed.element_size()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            # A single row would take a kernel of its own that sums in another order; from two rows on, a row's result
            # does not depend on how many there are. Doubled, it is the same alone and in a batch.
            rows = x if x.shape[0] > 1 else torch.cat((x, x))
            with num_threads(self._threads):  # the rest of a small step runs on one
                y = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
            return y[: x.shape[0]]
        return F.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several products with the same input as one: their weights stand below each other (QKV; gate and up)."""

    def __init__(self, in_features: int, out_sizes: list[int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(out_sizes), bias=bias)
        self.out_sizes = out_sizes

    def part(self, index: int, kind: str = "weight") -> torch.Tensor:
        """The slice of the weight (or bias) that belongs to output `index`; a view to load into."""
        start = sum(self.out_sizes[:index])
        return getattr(self, kind)[start : start + self.out_sizes[index]]


_PACK_ROWS = 1  # rows the blocked layout is chosen for; larger batches run well on it too


def can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
