"""The kernels of moe.experts in plain torch: the same names and arguments (except for tuning), in float32."""

import torch
import torch.nn.functional as F

from engine.kernels.gemm.packed.weight import Packed, dequantize
from engine.kernels.moe.tiles import SCALE_BLOCK, by_pairs, form_of, is_int8, max_blocks, reads_fp8
from engine.kernels.pointwise.reference import quantize_rows, quantize_rows_to_int8


def choose_experts(
    logits: torch.Tensor, top_k: int, *, renormalize: bool = True, expert_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """moe.experts.choose_experts."""
    p = logits.softmax(-1, dtype=torch.float32)
    experts = p.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = p.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if expert_scale is not None:
        weights = weights * expert_scale.float()[experts]
    return weights, experts.int()


def group(experts: torch.Tensor, num_experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """moe.experts.group."""
    flat = experts.flatten().long()
    order = flat.sort(stable=True)[1].int()
    blocks, first = [], 0
    for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
        blocks += [(expert, first + at, min(rows, count - at)) for at in range(0, count, rows)]
        first += count
    unused = max_blocks(flat.numel(), num_experts, rows) - len(blocks)
    return order, torch.tensor(blocks + [(num_experts, 0, 0)] * unused, dtype=torch.int32, device=experts.device)


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    scale13: torch.Tensor | None = None,
    scale2: torch.Tensor | None = None,
    *,
    gate: str = "silu",
    residual: torch.Tensor | None = None,
    fp8_activations: bool = True,
    int8_activations: bool = False,
) -> torch.Tensor:
    """moe.experts.routed_experts."""
    many = int8_activations or x.shape[0] > by_pairs(form_of(w2, scale2))
    units = many and fp8_activations  # here activations are quantised to fp8 if weights are
    rounded = _in_int8 if int8_activations else torch.Tensor.float
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        gate_up = _expert_product(rounded(x[token]), w13, scale13, expert, units, halves=2)
        first, second = gate_up.chunk(2, -1)
        first = F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")
        y = _expert_product(rounded((first * second).to(x.dtype)), w2, scale2, expert, units)
        if many:
            y = y.to(x.dtype).float()
        out.index_put_((token,), y * weights[token, slot, None], accumulate=True)
    out = out.to(x.dtype)
    return out if residual is None else residual.copy_(residual.float() + out.float())


def _in_int8(x: torch.Tensor) -> torch.Tensor:
    values, scale = quantize_rows_to_int8(x)
    return values.float() * scale[:, None]


def _expert_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, expert: int, units: bool, *, halves: int = 1
) -> torch.Tensor:
    if scale is None:
        return x.float() @ weight[expert].float().t()
    if form_of(weight, scale) == "int4":
        group = 2 * weight.shape[2] // scale.shape[2]
        wide = dequantize(Packed("int4", group, weight[expert], scale[expert]), torch.float32)
        if units and reads_fp8(group):
            values, x_scale = quantize_rows(x)
            x = values.float() * x_scale[:, None]
        return x.float() @ wide.t()
    if units and not is_int8(weight):
        values, x_scale = quantize_rows(x)
        x = values.float() * x_scale[:, None]
    _, rows, columns = weight.shape
    return x.float() @ (weight[expert].float() * _spread(scale[expert], rows, columns, halves)).t()


def _spread(scale: torch.Tensor, rows: int, columns: int, halves: int) -> torch.Tensor:
    """Scales of an expert's weight, for each number. Each of the halves has blocks of its own."""
    if scale.dim() == 1:
        return scale[:, None]
    wide = scale.repeat_interleave(SCALE_BLOCK, 1)[:, :columns]
    each = [half.repeat_interleave(SCALE_BLOCK, 0)[: rows // halves] for half in wide.chunk(halves)]
    return torch.cat(each)
