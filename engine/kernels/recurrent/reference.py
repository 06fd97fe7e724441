"""Gated DeltaNet in plain torch: the CPU's kernel, and the reference against which GPU kernels are tested.

A head keeps a state S [V, K], a linear map from keys to values, which each token decays, corrects and reads
(Yang et al. 2024, arXiv:2412.06464):

    S = exp(g) S              g <= 0: the state decays
    d = beta (v - S k)        what the state gets wrong about this key
    S = S + d kᵀ
    o = S q

    state       [slots, HV, V, K]   float32, or bfloat16 for half the traffic: a step computes in float32 and rounds the
                                    state to nearest when it stores it
    conv_state  [slots, W, C]       the newest W inputs of the convolution: that of position p in row p mod W

q and k have HK heads; each serves HV / HK consecutive value heads.

The ring of convolution inputs has one row more than the convolution looks back. So on a GPU, the row that a token
writes is never one that another program may still read.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK = 64
_EPS = 1e-6  # epsilon of the norm of q and k


@dataclass(frozen=True, slots=True)
class Run:
    """Several new tokens of one sequence: tokens q_start .. q_start + count - 1 of the step, from position `start`."""

    q_start: int
    start: int
    count: int
    slot: int


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """How the tokens of a step group into sequences. A sequence at position 0 starts from zeros."""

    q_index: torch.Tensor    # [b] for sequences with one new token: its index among the step's T tokens
    positions: torch.Tensor  # [b] its position
    slots: torch.Tensor      # [b] the slot of its sequence's state
    runs: list[Run]          # the other sequences

    @classmethod
    def build(
        cls, positions: torch.Tensor, slots: torch.Tensor, q_starts: torch.Tensor, counts: torch.Tensor
    ) -> "RecurrentBatch":
        """positions [T] of the step's tokens; the other arguments have one entry per sequence, [B]."""
        single = counts == 1
        q_index = q_starts[single]
        others = torch.stack((q_starts, positions[q_starts], counts, slots), 1)[~single]
        return cls(q_index, positions[q_index], slots[single], [Run(*entry) for entry in others.tolist()])


@dataclass(frozen=True, slots=True)
class DeviceRecurrentBatch:
    """The same for GPU kernels: everything is on the device, so the host need not know it.

    q_starts, counts and chunks belong to mixed steps. In a pure decode step, token i belongs to sequence i.
    """

    positions: torch.Tensor                  # [T]
    slots: torch.Tensor                      # [B]
    q_starts: torch.Tensor | None = None     # [B]
    counts: torch.Tensor | None = None       # [B]
    chunks: torch.Tensor | None = None       # [n, 2], prefill.plan_chunks; None: no sequence has several tokens


def decay_and_beta(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [T, HV] -> g (the logarithm of the decay) and beta, both [T, HV] float32."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def causal_conv(x: torch.Tensor, weight: torch.Tensor, conv_state: torch.Tensor, batch: RecurrentBatch) -> torch.Tensor:
    """silu of the causal depthwise convolution of x [T, C] with weight [C, W]; [T, C]. Updates `conv_state`."""
    width = weight.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if batch.q_index.numel():
        new = x[batch.q_index]
        at = batch.positions[:, None] + torch.arange(1 - width, 1, device=x.device)  # oldest first
        window = conv_state[batch.slots[:, None], at % width]  # [b, W, C]
        window[at < 0] = 0
        window[:, -1] = new
        conv_state[batch.slots, batch.positions % width] = new
        out[batch.q_index] = F.silu(torch.einsum("bwc,cw->bc", window.float(), weight.float())).to(x.dtype)
    for run in batch.runs:
        rows = slice(run.q_start, run.q_start + run.count)
        ring, back = conv_state[run.slot], torch.arange(run.start - width + 1, run.start, device=x.device)
        past = ring[back % width].masked_fill_(back[:, None] < 0, 0)
        inputs = torch.cat((past, x[rows]))
        kept = min(width, run.count)
        end = run.start + run.count
        ring[torch.arange(end - kept, end, device=x.device) % width] = inputs[-kept:]
        y = F.conv1d(inputs.t().float().unsqueeze(0), weight.float().unsqueeze(1), groups=weight.shape[0])
        out[rows] = F.silu(y[0].t()).to(x.dtype)
    return out


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    batch: RecurrentBatch,
) -> torch.Tensor:
    """Every token's output [T, HV, V]; updates `state`. q, k [T, HK, K] are the convolution's outputs, not yet
    normalised."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    q, k = l2_norm(q) * q.shape[-1] ** -0.5, l2_norm(k)
    if batch.q_index.numel():
        at = batch.q_index
        own = state[batch.slots].float()
        own[batch.positions == 0] = 0
        out[at] = recurrent(q[at], k[at], v[at].float(), g[at], beta[at], own).to(v.dtype)
        state[batch.slots] = own.to(state.dtype)
    for run in batch.runs:
        rows = slice(run.q_start, run.q_start + run.count)
        first = torch.zeros_like(state[0]) if run.start == 0 else state[run.slot]
        result, last = chunked(q[rows], k[rows], v[rows].float(), g[rows], beta[rows], first.float())
        out[rows] = result.to(v.dtype)
        state[run.slot] = last.to(state.dtype)
    return out


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """One token of each of b sequences; updates `state`.

    q, k [b, HK, K], v [b, HV, V], g, beta [b, HV], state [b, HV, V, K] -> [b, HV, V]
    """
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, 1).unsqueeze(-1) for x in (q, k))
    state *= g.exp()[..., None, None]
    delta = (v.unsqueeze(-1) - state @ k) * beta[..., None, None]
    state += delta * k.transpose(-1, -2)
    return (state @ q).squeeze(-1)


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """n tokens of one sequence.

    q, k [n, HK, K], v [n, HV, V], g, beta [n, HV], state [HV, V, K] -> ([n, HV, V], the state after them)

    Within a chunk, with G = cumsum(g), the tokens' corrections d solve a triangular system. Of its right-hand side only
    S, the state at the chunk's start, is unknown (the WY form of a product of Householder-like steps):

        (I + L) d = beta (v - exp(G) k Sᵀ)          L[i, j] = beta[i] exp(G[i] - G[j]) k[i]·k[j],  j < i
              d = U - W Sᵀ,   (I + L) U = beta v,   (I + L) W = beta exp(G) k

    So U and W are computed for all chunks at once, and only the states go from chunk to chunk.
    """
    n, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[1:]
    size = min(CHUNK, n)
    padding = -n % size  # padding tokens neither decay nor write the state

    def chunks(x: torch.Tensor, heads: int) -> torch.Tensor:
        """[n, heads, ...] -> [HK, heads / HK, chunks, size, ...]"""
        x = F.pad(x, (0, 0) * (x.ndim - 1) + (0, padding))
        x = x.view(-1, size, key_heads, heads // key_heads, *x.shape[2:])
        return x.permute(2, 3, 0, 1, *range(4, x.ndim))

    q, k = chunks(q, key_heads), chunks(k, key_heads)
    v, beta, total = chunks(v, heads), chunks(beta, heads).unsqueeze(-1), chunks(g, heads).cumsum(-1)
    upper = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(upper, -torch.inf).exp()
    grown = total.unsqueeze(-1).exp()

    system = (k @ k.transpose(-1, -2)) * decay * beta
    right = torch.cat((v * beta, k * (beta * grown)), -1)
    u, w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        (value_dim, key_dim), -1
    )
    inner = (q @ k.transpose(-1, -2)) * decay
    q = q * grown
    to_end = total[..., -1:] - total
    k = k * to_end.unsqueeze(-1).exp()
    left = grown[..., -1:, :]

    state = state.reshape(key_heads, -1, value_dim, key_dim)
    outs = []
    for i in range(v.shape[2]):
        delta = u[:, :, i] - w[:, :, i] @ state.transpose(-1, -2)
        outs.append(q[:, :, i] @ state.transpose(-1, -2) + inner[:, :, i] @ delta)
        state = state * left[:, :, i] + delta.transpose(-1, -2) @ k[:, :, i]
    out = torch.stack(outs, 2).permute(2, 3, 0, 1, 4).reshape(-1, heads, value_dim)
    return out[:n], state.reshape(heads, value_dim, key_dim)


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """w * norm(x) * silu(z) over the last dimension; the norm is rounded before the weight is applied, the gate is
    computed in float32."""
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight
    return (normed.float() * F.silu(z.float())).to(x.dtype)
