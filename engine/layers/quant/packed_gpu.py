"""How a GPU multiplies with weights that stay packed (kernels/gemm/packed/).

    rows                          int4, scales for groups of 128                fp8, scales for blocks of 128 x 128
    a few (`vector_rows`)         int4_gemv: x in 16 bits, fused with what      small_batch.gemv, likewise; one row
                                  surrounds it                                  of gate and up on Hopper: block_gemv
    up to 48, up to 128           group_scaled: x in fp8                        the same; on Hopper block_few_rows,
                                                                                with the gate that follows
    more                          the library, block by block: x in fp8; W      the same
                                  as e4m3 numbers, made for the product or
                                  kept as a second copy
    thousands, on Hopper          the same                                      block_wgmma, where its large tiles fill
                                                                                the GPU; with the gate or the residual
                                                                                stream that follows

Everything else, and layers whose `fp8_activations` is False: 16-bit activations (kernels/gemm/packed/matmul.py).
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.kernels.gemm.packed.weight import Packed, joined
from engine.layers.gemm_inputs import QuantizedRows
from engine.layers.quant.base import Gemm
from engine.layers.quant.rounded_inputs import Inputs, rounding_inputs
from engine.layers.weight_memory import for_good

log = logging.getLogger(__name__)

_KERNEL_ROWS = 128  # up to here our kernel is faster than the library
_KERNEL_ROWS_OF_INT4 = 48  # ... than the library with a copy in e4m3
_KERNEL_ROWS_UNCOPIED = 512  # ... than the library with a weight that is made for the product


@dataclass(slots=True)
class PackedParts:
    """What a GPU multiplies with: one weight, or several above one another; `order`: of their joint outputs.

    grouped: the one weight for fp8 activations.  library_scale, ratios: its scales in the forms of block_library and
    block_wgmma.  copy: int4 as e4m3 numbers, [N, K].
    """

    parts: list[Packed | torch.Tensor]
    order: torch.Tensor | None = None
    grouped: Any = None
    ratios: torch.Tensor | None = None
    library_scale: torch.Tensor | None = None
    copy: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        tensors = [*self.parts, self.order, self.ratios, self.library_scale, self.copy]
        return sum(part.nbytes for part in tensors if part is not None)


def use_packed(layer: Any, matrices: Sequence[Packed | torch.Tensor], inputs: Inputs) -> None:
    """Multiply with the matrices packed; neighbours of one kind become one."""
    with for_good():
        pieces: list[Packed | torch.Tensor] = []
        run: list[Packed] = []
        for matrix in (*matrices, None):
            if isinstance(matrix, Packed):
                run.append(matrix)
                continue
            pieces.extend(joined(run))
            run = []
            if matrix is not None:
                pieces.append(matrix.clone())
        order = getattr(layer, "order", None)
        if order is not None and len(pieces) == 1 and isinstance(pieces[0], Packed):
            pieces[0] = pieces[0].rows(order)
            order = None
        elif order is not None:
            order = order.clone()
        layer.packed = PackedParts(pieces, order)
        reads_fp8 = inputs != "int8" and _prepare_for_fp8(layer)
    layer.gemm = _with_fp8(layer) if reads_fp8 else rounding_inputs(_with_16_bits(layer), inputs)


def _whole(layer: Any) -> Packed | None:
    """The layer's one weight in the order of its outputs, if it has only that."""
    pieces: PackedParts = layer.packed
    whole = pieces.parts[0]
    if len(pieces.parts) > 1 or pieces.order is not None or not isinstance(whole, Packed):
        return None
    return whole if whole.columns is None else None


def _prepare_for_fp8(layer: Any) -> bool:
    """Whether the layer can multiply fp8 activations; then what it needs for that is in `packed`."""
    from engine.kernels.gemm import scaled
    from engine.kernels.gemm.packed import block_library, block_wgmma, group_scaled

    whole, pieces = _whole(layer), layer.packed
    if whole is None or not layer.fp8_activations or not scaled.has_fp8_units(whole.values.device):
        return False
    pieces.grouped = group_scaled.group_scaled(whole)
    if pieces.grouped is None:
        return False
    grouped = pieces.grouped
    group_scaled.arrivals(grouped.values.device)  # now: a step that is recorded cannot make them
    if block_wgmma.fits(grouped):
        pieces.ratios = block_wgmma.ratios(grouped.scale)
    if block_library.fits(grouped) and _library_refusal(whole.values.device, grouped.block_rows) is None:
        # `as_e4m3` makes numbers a 512th as large
        scale = grouped.scale.float() * (1 if grouped.pair == 0 else group_scaled.E4M3_UNIT)
        pieces.library_scale = block_library.library_scale(scale, grouped.block_rows)
    return True


def _library_refusal(device: torch.device, block_rows: int) -> str | None:
    from engine.kernels.gemm.packed import block_library
    from engine.kernels.runtime.launcher import target_of

    return block_library.refusal(target_of(device).capability, block_rows)


def copies_kept(need: int, free: int) -> int:
    """Bytes of second copies that are kept, of `need`, beside weights that leave `free` bytes."""
    return need if need <= free // 3 else 0


def keep_int4_copies(model: nn.Module, free: int) -> None:
    """After loading: keep int4 weights as e4m3 numbers, too, if a third of the `free` bytes holds them. Large batches
    multiply with these; without them, the numbers are made for each product."""
    from engine.kernels.gemm.packed import group_scaled

    layers = [packed for m in model.modules() if isinstance(packed := getattr(m, "packed", None), PackedParts)]
    wanting = [packed for packed in layers if packed.library_scale is not None and packed.grouped.pair > 0]
    need = sum(math.prod(packed.grouped.shape) for packed in wanting)
    if not copies_kept(need, free):
        return
    for packed in wanting:
        packed.copy = group_scaled.as_e4m3(packed.grouped)
    log.info("int4 weights are kept in fp8, too (%.1f GiB), for steps of more than %d tokens", need / (1 << 30),
             _KERNEL_ROWS_OF_INT4)  # fmt: skip


# -- fp8 activations ---------------------------------------------------------------------------------------------------


def _with_fp8(layer: Any) -> Gemm:
    from engine.kernels.gemm.packed import int4_gemv

    grouped = layer.packed.grouped
    if grouped.pair > 0 and int4_gemv.supports(layer.packed.parts[0], layer.weight.dtype):
        return Gemm(_on_rows, _on_fp8_rows, gemv=_int4_gemv, gemv_rows=int4_gemv.MOST_ROWS)
    if grouped.block_rows > 1 and grouped.group == grouped.block_rows:
        return Gemm(_on_rows, _on_fp8_rows, fused_fp8=_fused_on_fp8_rows, gemv=_block_gemv, streamed=_blocks)
    return Gemm(_on_rows, _on_fp8_rows, gemv_rows=0)


def _on_rows(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if layer.in_vector_form(x.shape[0]):
        return layer.gemm.gemv(layer, x)
    return _on_fp8_rows(layer, QuantizedRows.of(x))


def _on_fp8_rows(layer: Any, x: QuantizedRows) -> torch.Tensor:
    from engine.kernels.gemm.packed import block_few_rows, block_library, block_wgmma, group_scaled

    pieces: PackedParts = layer.packed
    weight, rows = pieces.grouped, x.values.shape[0]
    if rows <= block_few_rows.MOST_ROWS and block_few_rows.fits(weight):
        return block_few_rows.gemm(x.values, x.scale, weight, layer.bias, dtype=x.dtype)
    if pieces.ratios is not None and block_wgmma.wins(rows, weight):
        return block_wgmma.gemm(x.values, x.scale, weight.values, pieces.ratios, layer.bias, dtype=x.dtype)
    if pieces.library_scale is None or rows <= _most_rows_of_kernel(pieces):
        return group_scaled.gemm(x.values, x.scale, weight, layer.bias, dtype=x.dtype)
    values = weight.values
    if weight.pair > 0:
        values = group_scaled.as_e4m3(weight) if pieces.copy is None else pieces.copy
    return block_library.multiply(
        x.values, x.scale, values, pieces.library_scale, weight.block_rows, layer.bias, x.dtype
    )


def _fused_on_fp8_rows(
    layer: Any, x: QuantizedRows, *, gate: str | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor | None:
    from engine.kernels.gemm.packed import block_few_rows, block_wgmma

    pieces: PackedParts = layer.packed
    weight, rows = pieces.grouped, x.values.shape[0]
    if gate is not None and not block_wgmma.gates(weight):
        return None
    if rows <= block_few_rows.MOST_ROWS:
        if gate is None or not block_few_rows.fits(weight):
            return None
        return block_few_rows.gemm(x.values, x.scale, weight, layer.bias, dtype=x.dtype, gate=gate)
    if pieces.ratios is None or not block_wgmma.wins(rows, weight):
        return None
    if residual is not None and (layer.bias is not None or not residual.is_contiguous()):
        return None
    return block_wgmma.gemm(
        x.values, x.scale, weight.values, pieces.ratios, layer.bias, dtype=x.dtype, gate=gate, onto=residual
    )


def _most_rows_of_kernel(pieces: PackedParts) -> int:
    if pieces.grouped.pair == 0:
        return _KERNEL_ROWS
    return _KERNEL_ROWS_UNCOPIED if pieces.copy is None else _KERNEL_ROWS_OF_INT4


def _int4_gemv(layer: Any, x: torch.Tensor, **around: Any) -> torch.Tensor:
    from engine.kernels.gemm.packed import int4_gemv

    return int4_gemv.gemv(x, layer.packed.parts[0], layer.bias, **around)


def _block_gemv(layer: Any, x: torch.Tensor, *, gate: str | None = None, **around: Any) -> torch.Tensor:
    from engine.kernels.gemm import small_batch
    from engine.kernels.gemm.packed import block_gemv

    grouped = layer.packed.grouped
    if gate is not None and not around and layer.bias is None and x.shape[0] == 1 and block_gemv.fits(grouped):
        return block_gemv.gated_row(x, grouped, gate)
    return small_batch.gemv(x, grouped.values, grouped.scale, layer.bias, block=grouped.group, gate=gate, **around)


def _blocks(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.packed.grouped.values, layer.packed.grouped.scale


# -- 16-bit activations ------------------------------------------------------------------------------------------------


def _with_16_bits(layer: Any) -> Gemm:
    """With a GEMV that fuses what surrounds it, where the whole layer is one weight that it reads."""
    from engine.kernels.gemm.packed import int4_gemv

    whole = _whole(layer)
    if whole is None or not int4_gemv.supports(whole, layer.weight.dtype):
        return ON_PACKED
    return Gemm(_on_packed, gemv=_int4_gemv, gemv_rows=int4_gemv.MOST_ROWS)


def _on_packed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    from engine.kernels.gemm.packed.matmul import matmul

    whole: PackedParts = layer.packed
    results = []
    for part in whole.parts:
        if isinstance(part, Packed):
            results.append(matmul(x, part, batch_invariant=layer.batch_invariant))
        else:
            results.append(torch.nn.functional.linear(x, part))
    y = results[0] if len(results) == 1 else torch.cat(results, -1)
    if whole.order is not None:
        y = y[:, whole.order]
    return y if layer.bias is None else y.add_(layer.bias)


ON_PACKED = Gemm(_on_packed)
