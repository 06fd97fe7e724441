"""Activations of gated MLPs, as parts of other kernels."""

import triton
import triton.language as tl


@triton.jit
def activated(x, KIND: tl.constexpr):
    """float32 -> float32; KIND: a Gate of engine/layers/activation.py. (x/2 · (1 + tanh u) is x · sigmoid(2u).)"""
    if KIND == "gelu_tanh":
        return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "sigmoid":
        return 1 / (1 + tl.exp(-x))
    else:
        return x / (1 + tl.exp(-x))


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))
