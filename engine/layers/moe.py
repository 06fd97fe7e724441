"""Mixture of experts: a router picks k of E gated MLPs for each token.

    logits = x Wrᵀ                                [T, E]
    p      = softmax(logits)                      in float32, over all experts
    w, e   = the k largest of p, their indices    [T, k], optionally divided by their sum
    y[t]   = Σ_j w[t, j] · down_e(act(gate_e(x[t])) * up_e(x[t]))    with e = e[t, j]

The experts of a layer are two stacked weights, which are filled in place from whatever layout a checkpoint uses.
(Shazeer et al. 2017, arXiv:1701.06538; Mixtral, arXiv:2401.04088.)
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.moe.tiles import (
    JOINED_TOKENS,
    VECTOR_TOKENS,
    Form,
    Shape,
    all_kinds,
    form_of,
    shape_of,
    tiles_for,
)
from engine.kernels.runtime.cpu_threads import num_threads
from engine.kernels.runtime.gpu_target import Target
from engine.layers.activation import Gate
from engine.layers.gemm_inputs import Activations, QuantizedRows, UnnormedRows
from engine.layers.linear import Linear
from engine.layers.quant.base import ExpertMethod, Tensors
from engine.layers.quant.unquantized import UNQUANTIZED

if TYPE_CHECKING:
    from engine.kernels.moe.decode import DenseBranch
    from engine.kernels.moe.experts import Rows


_INVARIANT_TOKENS = 256  # batch-invariant: every step takes the tiles of a step of this many tokens


class Routing(NamedTuple):
    """Which experts each token goes to, and how much each counts."""

    weights: torch.Tensor  # [T, k] float32
    experts: torch.Tensor  # [T, k] int32


def choose_experts(
    logits: torch.Tensor, top_k: int, *, renormalize: bool = True, expert_scale: torch.Tensor | None = None
) -> Routing:
    """logits [T, E] -> the k experts of largest softmax. `expert_scale` [E] multiplies the weights at the end."""
    if logits.is_cuda:
        from engine.kernels.moe.experts import choose_experts as choose

        return Routing(*choose(logits, top_k, renormalize=renormalize, expert_scale=expert_scale))
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(top_k)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if expert_scale is not None:
        weights = weights * expert_scale.float()[experts]
    return Routing(weights, experts.int())


class Router(Linear):
    """The router: its GEMM with the weight [E, H], and the choice of experts. It is never quantised."""

    quantizable = False

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, *, renormalize: bool = True) -> None:
        super().__init__(hidden_size, num_experts)
        self.top_k = top_k
        self.renormalize = renormalize

    def choose(self, x: torch.Tensor) -> Routing:
        """x [T, H] -> the experts of each token."""
        return choose_experts(self(x), self.top_k, renormalize=self.renormalize)


class ExpertLinear(nn.Module):
    """The weights of E linear layers, stacked [E, out, in]; `method` is their format, as in Linear."""

    quantizable = True
    compute_dtype: torch.dtype | None = None  # as in Linear
    weight: nn.Parameter
    scale: nn.Parameter | None  # of a quantised weight: [E, out] float32 in fp8
    zero: nn.Parameter | None  # of int4 weights that are not symmetric: uint8, shaped like the scale

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.packed: list[Any] = []
        self.use(UNQUANTIZED.experts)

    def use(self, method: ExpertMethod) -> None:
        """Before loading: store the weights in this format."""
        self.method = method
        self.register_parameter("scale", None)
        self.register_parameter("zero", None)
        method.create(self)

    def weights(self, prefix: str, expert: int, outputs: slice = slice(None)) -> Tensors:
        """The tensors of one expert, for checkpoints with a matrix for each: `{prefix}weight` and so on."""
        return {f"{prefix}{name}": t for name, t in self.method.tensors(self, expert, outputs).items()}

    def stacked_weights(self, name: str) -> Tensors:
        """The tensors of all experts, for checkpoints that stack them: `name`, `{name}_scale` and so on."""
        found = self.method.tensors(self, slice(None), slice(None))
        return {name if kind == "weight" else f"{name}_{kind}": tensor for kind, tensor in found.items()}

    def finalize(self) -> None:
        """After loading. Idempotent."""
        self.method.finalize(self)

    @property
    def loaded_bytes(self) -> int:
        """GPU bytes of the weight after `finalize`. The memory plan asks before anything is loaded."""
        return self.method.num_bytes(self)

    @property
    def packed_bytes(self) -> int:
        return sum(packed.nbytes for packed in self.packed)

    def apply_on_cpu(self, x: torch.Tensor, expert: int, *, quantize: bool) -> torch.Tensor:
        """One expert's GEMM, x [n, in] -> [n, out]. `quantize`: activations are quantised if the weight is fp8."""
        return self.method.apply(self, x, expert, quantize=quantize)


class RoutedExperts(nn.Module):
    """The gated MLPs [H -> I -> H] of E experts, applied to each token according to a routing, and summed.

    Set before loading, of a GPU: `batch_invariant`: tiles of one size for any number of tokens. `fp8_activations`: many
    tokens may be rounded to fp8 for weights that the checkpoint has in blocks or groups.
    """

    batch_invariant = False
    fp8_activations = True

    def __init__(self, hidden_size: int, inner: int, num_experts: int, *, gate: Gate = "silu") -> None:
        super().__init__()
        self.inner = inner
        self.num_experts = num_experts
        self.gate: Gate = gate
        self.gate_up_proj = ExpertLinear(num_experts, hidden_size, 2 * inner)
        self.down_proj = ExpertLinear(num_experts, inner, hidden_size)
        self._threads = 1

    def finalize(self) -> None:
        self._threads = torch.get_num_threads()

    @property
    def fused(self) -> bool:
        """Whether the kernels for whole sparse blocks read the weights in this format."""
        return self.gate_up_proj.method.fused

    @property
    def stacks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Weights and scales, in the form that kernels take."""
        return self.gate_up_proj.weight, self.down_proj.weight, self.gate_up_proj.scale, self.down_proj.scale

    @property
    def zeros(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.gate_up_proj.zero, self.down_proj.zero

    def wants_fp8(self, rows: int) -> bool:
        """As Linear.wants_fp8."""
        scaled = self.gate_up_proj.scale is not None and self.form != "int4"
        if rows <= VECTOR_TOKENS or not self.fused or not scaled or not self._reads_fp8:
            return False
        weight = self.gate_up_proj.weight
        if not weight.is_cuda:
            return False
        from engine.kernels.runtime.launcher import target_of

        return target_of(weight.device).fp8_units

    def runs_block(self, rows: int, router: Router, dense: "DenseBranch | None") -> bool:
        """Whether so many rows run the whole block, with the router and the dense branch, as the kernels of
        kernels/moe/few_tokens.py."""
        return self._in_block(dense) and self.routes(rows, router)

    def takes_dense(self, rows: int, dense: "DenseBranch") -> bool:
        """Whether those kernels take so many rows and this dense branch. If they do not choose the experts themselves
        (`routes`), the router does."""
        return VECTOR_TOKENS < rows <= JOINED_TOKENS and self._in_block(dense)

    def routes(self, rows: int, router: Router) -> bool:
        """Whether one kernel chooses the experts of so many rows and groups them."""
        from engine.kernels.moe.routing import supports

        return supports(rows, router.top_k, router.weight)

    def _in_block(self, dense: "DenseBranch | None") -> bool:
        _, w2, _, scale2 = self.stacks
        if not w2.is_cuda or not self.fused or self.form != "rows" or self.batch_invariant:
            return False
        from engine.kernels.moe.few_tokens import joins

        return dense is None or joins(dense, w2, scale2)

    def forward(self, x: torch.Tensor | QuantizedRows, routing: Routing) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        if isinstance(x, QuantizedRows) or x.is_cuda:
            return self._on_gpu(x, routing, None)
        with num_threads(self._threads):  # everything else in a small step runs on one thread
            return self._by_expert(x, routing)

    def onto(
        self, residual: torch.Tensor, x: torch.Tensor | QuantizedRows, routing: Routing
    ) -> torch.Tensor | None:
        """Like Linear.onto: returns the result to be added to `residual` [T, H], or None if it was added in place."""
        if isinstance(x, torch.Tensor) and not x.is_cuda:
            return self(x, routing)
        self._on_gpu(x, routing, residual)
        return None

    def _on_gpu(
        self, x: torch.Tensor | QuantizedRows, routing: Routing, residual: torch.Tensor | None
    ) -> torch.Tensor:
        from engine.kernels.moe.experts import routed_experts
        from engine.kernels.runtime.launcher import target_of

        values, tiles = x if isinstance(x, torch.Tensor) else x.values, None
        if self.batch_invariant:
            gpu = target_of(values.device)
            tiles = tiles_for(self.shape(routing.experts.shape[1], gpu), _INVARIANT_TOKENS, gpu.shared_memory)
        return routed_experts(
            kernel_rows(x), *routing, *self.stacks, zeros=self.zeros, gate=self.gate, residual=residual,
            fp8_activations=self._reads_fp8, tiles=tiles, dtype=x.dtype,
        )  # fmt: skip

    @property
    def form(self) -> Form:
        return form_of(self.down_proj.weight, self.down_proj.scale)

    @property
    def _reads_fp8(self) -> bool:
        return self.zeros == (None, None) and (self.fp8_activations or self.form == "rows")

    def shape(self, top_k: int, gpu: Target) -> Shape:
        """The shape by which kernels for many tokens choose their tiles."""
        widened = not (gpu.fp8_units and self._reads_fp8)
        return shape_of(self.down_proj.weight, self.down_proj.scale, top_k, widened=widened)

    def _by_expert(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """One expert after the other, each with all of its tokens; experts without tokens are not read."""
        tokens, top_k = routing.experts.shape
        experts, order = routing.experts.flatten().sort(stable=True)
        quantize = tokens > VECTOR_TOKENS
        rows = x[order // top_k]
        results = torch.empty(tokens * top_k, x.shape[1], dtype=x.dtype)
        numbers, counts = experts.unique_consecutive(return_counts=True)
        start = 0
        for expert, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            at = slice(start, start + count)
            gate, up = self.gate_up_proj.apply_on_cpu(rows[at], expert, quantize=quantize).chunk(2, -1)
            gate = F.silu(gate) if self.gate == "silu" else F.gelu(gate, approximate="tanh")
            results[order[at]] = self.down_proj.apply_on_cpu(gate.mul_(up), expert, quantize=quantize)
            start += count
        weighted = results.view(tokens, top_k, -1).float() * routing.weights.unsqueeze(-1)
        return weighted.sum(1).to(x.dtype)

    def weights(self, prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Tensors:
        """For checkpoints with a matrix for each expert, `{prefix}{expert}.{name}.weight`. `names`: gate, up, down."""
        found: Tensors = {}
        gate, up, down = names
        for expert in range(self.num_experts):
            found |= self.gate_up_proj.weights(f"{prefix}{expert}.{gate}.", expert, slice(0, self.inner))
            found |= self.gate_up_proj.weights(f"{prefix}{expert}.{up}.", expert, slice(self.inner, None))
            found |= self.down_proj.weights(f"{prefix}{expert}.{down}.", expert)
        return found

    def stacked_weights(self, prefix: str) -> Tensors:
        """For checkpoints that stack a layer's experts, gate above up, as Gemma 4 and Qwen3.5 do."""
        down = self.down_proj.stacked_weights(f"{prefix}down_proj")
        return {**self.gate_up_proj.stacked_weights(f"{prefix}gate_up_proj"), **down}


class SparseMLP(nn.Module):
    """A router and its experts, in place of a decoder layer's MLP."""

    def __init__(self, hidden_size: int, inner: int, num_experts: int, top_k: int, *, renormalize: bool = True) -> None:
        super().__init__()
        self.gate = Router(hidden_size, num_experts, top_k, renormalize=renormalize)
        self.experts = RoutedExperts(hidden_size, inner, num_experts)

    def fits_decode(self, rows: int) -> bool:
        """Whether so few rows run the whole block, including its norm, as three kernels (kernels/moe/decode.py)."""
        return self.experts.fused and self.gate.read_by_experts(rows)

    def fits_block(self, rows: int) -> bool:
        """Whether so few rows run the whole block as the kernels of kernels/moe/few_tokens.py."""
        return self.experts.runs_block(rows, self.gate, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fits_decode(x.shape[0]):
            return self._decode(x, None)
        return self._block(x, x, None) if self.fits_block(x.shape[0]) else self.experts(x, self.gate.choose(x))

    def onto(self, residual: torch.Tensor, x: Activations) -> torch.Tensor | None:
        """Like RoutedExperts.onto. fp8 rows come with the plain ones, which the router reads."""
        if isinstance(x, UnnormedRows):
            if self.fits_decode(x.values.shape[0]):
                self._decode(x, residual)
                return None
            x = x.normed()
        plain = x if isinstance(x, torch.Tensor) else x.plain
        assert plain is not None
        if isinstance(x, torch.Tensor) and self.fits_decode(x.shape[0]):
            self._decode(x, residual)
            return None
        if self.fits_block(plain.shape[0]):
            self._block(x, plain, residual)
            return None
        if not self.experts.wants_fp8(plain.shape[0]):
            x = plain
        return self.experts.onto(residual, x, self.gate.choose(plain))

    def _dense_branch(self) -> "DenseBranch | None":
        """The MLP that every token goes through (a shared expert), if there is one."""
        return None

    def _decode(self, x: torch.Tensor | UnnormedRows, residual: torch.Tensor | None) -> torch.Tensor:
        from engine.kernels.moe.decode import Norm, sparse_block

        norm = None
        if isinstance(x, UnnormedRows):
            x, norm = x.values, Norm(x.weight, x.eps, x.offset)
        out, _ = sparse_block(
            x, self.gate.weight, *self.experts.stacks, top_k=self.gate.top_k, renormalize=self.gate.renormalize,
            gate=self.experts.gate, norm=norm, dense=self._dense_branch(), residual=residual,
        )  # fmt: skip
        return out

    def _block(
        self, x: torch.Tensor | QuantizedRows, plain: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        from engine.kernels.moe.few_tokens import sparse_block

        out, _ = sparse_block(
            kernel_rows(x), self.gate.weight, *self.experts.stacks, for_router=plain, top_k=self.gate.top_k,
            renormalize=self.gate.renormalize, gate=self.experts.gate, dense=self._dense_branch(), residual=residual,
        )  # fmt: skip
        return out


def kernel_rows(x: torch.Tensor | QuantizedRows) -> "Rows":
    """Activations as the kernels of kernels/moe take them."""
    return x if isinstance(x, torch.Tensor) else (x.values, x.scale)


def kinds_of_steps(model: nn.Module, most: int, gpu: Target) -> set[int]:
    """Token counts up to `most` that together use every expert kernel of that range, for the warm-up."""
    modules = list(model.modules())
    top_k = {module.top_k for module in modules if isinstance(module, Router)}
    shapes = {m.shape(k, gpu) for m in modules if isinstance(m, RoutedExperts) for k in top_k}
    return {tokens for shape in shapes for tokens in all_kinds(shape, most, gpu.shared_memory, gpu)}
