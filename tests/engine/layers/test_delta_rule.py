"""The gated delta rule in plain torch: equal to transformers' functions, to the definition in float64, and to itself
however a sequence is cut into steps."""

import random

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.recurrent import reference as recurrent_reference
from engine.kernels.recurrent.reference import RecurrentBatch, l2_norm


def batch_of(starts, counts, slots):
    """Sequences that stand one behind the other in a step."""
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    counts = torch.tensor(counts)
    return RecurrentBatch.build(positions, torch.tensor(slots), counts.cumsum(0) - counts, counts)


def inputs(tokens, key_heads=2, heads=4, key_dim=16, value_dim=24, seed=0, same_keys=False):
    """q, k, v, g, beta. With `same_keys` every token has nearly one key, little decay and beta near 1: the triangular
    systems are then as full as they get."""
    torch.manual_seed(seed)
    q, k = torch.randn(2, tokens, key_heads, key_dim)
    v = torch.randn(tokens, heads, value_dim)
    g, beta = -F.softplus(torch.randn(tokens, heads)), torch.randn(tokens, heads).sigmoid()
    if same_keys:
        k = k[:1] + 0.01 * k
        g, beta = g * 1e-3, 1 - 1e-3 * beta
    return q, k, v, g, beta


def definition(q, k, v, g, beta, state):
    """Token by token, in float64."""
    group = v.shape[1] // k.shape[1]
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q / q.shape[-1] ** 0.5
    out = torch.empty_like(v)
    state = state.clone()
    for t in range(v.shape[0]):
        for h in range(v.shape[1]):
            key, query = k[t, h // group], q[t, h // group]
            state[h] *= g[t, h].exp()
            state[h] += torch.outer((v[t, h] - state[h] @ key) * beta[t, h], key)
            out[t, h] = state[h] @ query
    return out, state


@pytest.mark.parametrize("same_keys", [False, True])
@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 150])
def test_chunks_equal_the_definition(tokens, same_keys):
    q, k, v, g, beta = inputs(tokens, same_keys=same_keys)
    state = torch.randn(4, 24, 16)
    expected, last = definition(q, k, v, g, beta, state)
    out, found = recurrent_reference.chunked(l2_norm(q) * 16**-0.5, l2_norm(k), v, g, beta, state)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(found.double(), last, rtol=1e-4, atol=2e-5)


def test_strong_decay_stays_finite():
    """Whole chunks that forget everything: exp of the differences must not overflow where it is masked."""
    q, k, v, g, beta = inputs(130)
    g = g * 100
    state = torch.randn(4, 24, 16)
    expected, _ = definition(q, k, v, g, beta, state)
    out, found = recurrent_reference.chunked(l2_norm(q) * 16**-0.5, l2_norm(k), v, g, beta, state)
    assert found.isfinite().all()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_equals_transformers(tokens):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    q, k, v, g, beta = inputs(tokens)
    before = torch.randn(4, 24, 16)
    function = theirs.torch_recurrent_gated_delta_rule if tokens == 1 else theirs.torch_chunk_gated_delta_rule
    expected, last = function(
        *(x.unsqueeze(0) for x in (q, k, v, g, beta)), initial_state=before.transpose(1, 2).unsqueeze(0),
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    state = torch.stack((torch.full_like(before, torch.nan), before))
    batch = batch_of([7], [tokens], [1])
    out = recurrent_reference.gated_delta_rule(q, k, v, g, beta, state, batch)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[1], last[0].transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert state[0].isnan().all()


def test_gates_and_norm_equal_transformers():
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    a, b, a_log, dt_bias = torch.randn(5, 4), torch.randn(5, 4), torch.randn(4), torch.randn(4)
    g, beta = recurrent_reference.decay_and_beta(a, b, a_log, dt_bias)
    torch.testing.assert_close(g, -a_log.exp() * F.softplus(a + dt_bias))
    torch.testing.assert_close(beta, b.sigmoid())
    x, z, norm = torch.randn(5, 4, 24), torch.randn(5, 4, 24), Qwen3_5RMSNormGated(24, eps=1e-5)
    norm.weight.data.normal_()
    torch.testing.assert_close(recurrent_reference.gated_rms_norm(x, z, norm.weight, 1e-5), norm(x, z))


def steps(rng, lengths):
    """Cut sequences into chunks of any size, several sequences a step: lists of (sequence, start, count)."""
    at = [0] * len(lengths)
    while any(a < n for a, n in zip(at, lengths, strict=True)):
        open_ones = [i for i, n in enumerate(lengths) if at[i] < n]
        rng.shuffle(open_ones)
        step = []
        for i in open_ones[: rng.randrange(1, len(open_ones) + 1)]:
            count = min(lengths[i] - at[i], rng.choice([1, 1, 2, 3, 7, 64, 100]))
            step.append((i, at[i], count))
            at[i] += count
        yield step


@pytest.mark.parametrize("seed", range(8))
def test_results_do_not_depend_on_the_steps(seed):
    """Convolution and rule over sequences that share steps; slots hold another sequence's leavings at the start."""
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 3, 4, 5, 66, 130]) for _ in range(4)]
    slots = rng.sample(range(6), 4)
    width, channels = 4, 2 * 2 * 16 + 4 * 24
    torch.manual_seed(seed)
    weight = torch.randn(channels, width)
    xs = [torch.randn(n, channels) for n in lengths]
    gates = [inputs(n, seed=n)[3:] for n in lengths]
    state, conv_state = torch.full((6, 4, 24, 16), torch.nan), torch.full((6, width, channels), torch.nan)
    found = [torch.full((n, 4, 24), torch.nan) for n in lengths]
    for step in steps(rng, lengths):
        counts = [count for _, _, count in step]
        q_starts = [sum(counts[:i]) for i in range(len(counts))]
        batch = batch_of([start for _, start, _ in step], counts, [slots[i] for i, _, _ in step])
        x = torch.cat([xs[i][start : start + count] for i, start, count in step])
        g, beta = (torch.cat([gates[i][j][start : start + count] for i, start, count in step]) for j in (0, 1))
        mixed = recurrent_reference.causal_conv(x, weight, conv_state, batch)
        q, k, v = mixed[:, :32].view(-1, 2, 16), mixed[:, 32:64].view(-1, 2, 16), mixed[:, 64:].view(-1, 4, 24)
        out = recurrent_reference.gated_delta_rule(q, k, v, g, beta, state, batch)
        for (i, start, count), q_start in zip(step, q_starts, strict=True):
            found[i][start : start + count] = out[q_start : q_start + count]
    for i, n in enumerate(lengths):
        padded = F.pad(xs[i].t(), (width - 1, 0)).unsqueeze(0)
        mixed = F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=channels))[0].t()
        q, k, v = mixed[:, :32].view(n, 2, 16), mixed[:, 32:64].view(n, 2, 16), mixed[:, 64:].view(n, 4, 24)
        expected, last = definition(q, k, v, *gates[i], torch.zeros(4, 24, 16))
        torch.testing.assert_close(found[i].double(), expected, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(state[slots[i]].double(), last, rtol=1e-4, atol=2e-5)
