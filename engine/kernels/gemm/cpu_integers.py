"""int4 weights on a CPU, and int8 weights on one that does not multiply bytes (cpu_int8.py).

y [M, N] = x [M, K] Wᵀ, with activations in bfloat16:

    int8   W = q * scale[n]              q int8 [N, K]
    int4   W = (q - 8) * scale[n, g]     two q in a byte, [N / block, K, block / 2]: output n of a block in the low
                                         half, n + block / 2 in the other. `block` is 64 with AVX-512, else 32

A few rows run on PyTorch's kernels, which read the packed numbers: such a product is bound by reading the weight. More
rows are bound by arithmetic, and those kernels do not use the CPU's matrix units: a tile of the weight after another is
widened to bfloat16, and a plain product multiplies it. A PyTorch without the kernels (or whose layout of int4 is
another) widens the weight for every number of rows.
"""

from collections.abc import Iterator
from functools import cache

import torch

_FEW_ROWS = {8: 16, 4: 40}    # by bits: up to here PyTorch's kernels are faster (docs/performance.md)
_TILE_ELEMENTS = 1 << 20      # of a weight that is widened at a time
_BLOCKS = (64, 32)            # outputs that int4 kernels read side by side: AVX-512's, AVX2's
GROUPS = (32, 64, 128, 256)   # that PyTorch's int4 kernel reads
_HALF = torch.bfloat16


class Int8Weight:
    """q int8 [N, K] and scale [N], which bfloat16 must hold exactly; an optional bias [N]."""

    def __init__(self, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._q, self._scale, self._bias = q, scale.to(_HALF), bias
        self._few = _FEW_ROWS[8] if hasattr(torch, "_weight_int8pack_mm") else 0

    @property
    def nbytes(self) -> int:
        return self._q.nbytes + self._scale.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N] in x's dtype."""
        rows = x.to(_HALF)
        if x.shape[0] <= self._few:
            return _with_bias(torch._weight_int8pack_mm(rows.contiguous(), self._q, self._scale), self._bias, x.dtype)
        y = torch.empty(x.shape[0], self._q.shape[0], dtype=_HALF)
        for part in _tiles(*self._q.shape):
            torch.mul(rows @ self._q[part].to(_HALF).T, self._scale[part], out=y[:, part])
        return _with_bias(y, self._bias, x.dtype)

    def dequantized(self) -> torch.Tensor:
        """W [N, K] in float32."""
        return self._q.float() * self._scale.float().unsqueeze(1)


class Int4Weight:
    """q uint8 [N, K], numbers below 16, and scale [N, K / group], which bfloat16 must hold exactly."""

    def __init__(
        self, q: torch.Tensor, scale: torch.Tensor, group: int, bias: torch.Tensor | None = None
    ) -> None:
        self._group, self._bias = group, bias
        self._block = kernel_block() or _BLOCKS[0]
        self.shape = q.shape
        outputs, inner = q.shape
        self._pairs = _in_blocks(q, self._block)
        by_group = scale.to(_HALF).T.contiguous()
        self._scale_zero = torch.stack((by_group, torch.zeros_like(by_group)), -1)  # [groups, N, 2]
        fits = outputs % self._block == 0 and group in GROUPS and inner % group == 0
        self._few = _FEW_ROWS[4] if kernel_block() is not None and fits else 0

    @property
    def nbytes(self) -> int:
        return self._pairs.nbytes + self._scale_zero.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N] in x's dtype."""
        rows = x.to(_HALF)
        if x.shape[0] <= self._few:
            multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
            y = multiply(rows.contiguous(), self._pairs, self._group, self._scale_zero)
            return _with_bias(y, self._bias, x.dtype)
        y = torch.empty(x.shape[0], self.shape[0], dtype=_HALF)
        halves = y.view(x.shape[0], -1, 2, self._block // 2)
        for blocks in _tiles(self.shape[0] // self._block, self.shape[1] * self._block):
            for half, weight in enumerate(self._widened(blocks, _HALF)):
                halves[:, blocks, half] = (rows @ weight).unflatten(1, (-1, self._block // 2))
        return _with_bias(y, self._bias, x.dtype)

    def dequantized(self) -> torch.Tensor:
        """W [N, K] in float32."""
        halves = self._widened(slice(0, self.shape[0] // self._block), torch.float32)
        return torch.stack([half.T.unflatten(0, (-1, self._block // 2)) for half in halves], 1).flatten(0, 2)

    def _widened(self, blocks: slice, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The weights of some blocks: those of the low halves, then of the high ones, [K, outputs]. Bytes are brought
        into the order of the product first, where they are fewest."""
        pairs = self._pairs.view(-1, self.shape[1], self._block // 2)[blocks].transpose(0, 1).flatten(1)
        scales = self._scale_zero[..., 0].unflatten(1, (-1, 2, self._block // 2))[:, blocks]
        for half, q in enumerate((pairs & 15, pairs >> 4)):
            weight = q.view(torch.int8).sub_(8).to(dtype)
            weight.unflatten(0, (-1, self._group)).mul_(scales[:, :, half].flatten(1).to(dtype).unsqueeze(1))
            yield weight


def _in_blocks(q: torch.Tensor, block: int) -> torch.Tensor:
    """uint8 [N, K] -> two in a byte, in the layout above; [N, K / 2] as the kernel wants its shape."""
    outputs, inner = q.shape
    pairs = torch.empty(outputs // block, inner, block // 2, dtype=torch.uint8)
    for at in range(pairs.shape[0]):
        low, high = q[at * block : (at + 1) * block].view(2, block // 2, inner)
        torch.bitwise_or(low, high << 4, out=(both := torch.empty_like(low)))
        pairs[at] = both.T
    return pairs.view(outputs, inner // 2)


@cache
def kernel_block() -> int | None:
    """The block of this PyTorch's int4 kernel on this CPU. None: it has none, or one in another layout."""
    packer = getattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu", None)
    if packer is None or not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return None
    q = torch.randint(0, 16, (128, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    try:
        packed = packer(q, 1)
    except RuntimeError:
        return None
    return next((b for b in _BLOCKS if torch.equal(packed, _in_blocks(q.to(torch.uint8), b))), None)


def _tiles(outputs: int, inner: int, multiple: int = 1) -> Iterator[slice]:
    step = max(1, _TILE_ELEMENTS // inner // multiple) * multiple
    for at in range(0, outputs, step):
        yield slice(at, min(at + step, outputs))


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return y.to(dtype) if bias is None else y.add_(bias).to(dtype)
