"""The output head beside weights of four bits: e4m3 with a scale for each token of the vocabulary, on a GPU.

One stream reads the whole head for every token. In 16 bits it is a quarter of all bytes of an 8B model in int4. Its
activations stay in 16 bits, so logits lose only what the weight's rounding costs: 2.6 % of a weight (root mean square),
where the layers before it lose 9.8 %.

A tied head keeps the embedding in 16 bits, and takes a copy of it. On a CPU the head stays as it is.
"""

from torch import nn

from engine.layers.quant import fp8
from engine.layers.quant.base import LinearLayer
from engine.layers.quant.fp8 import Fp8
from engine.layers.quant.unquantized import UNQUANTIZED


class Fp8Head(Fp8):
    def finalize(self, layer: LinearLayer, *, keep_weight: bool) -> None:
        if layer.weight.is_cuda:
            convert(layer)
        else:
            UNQUANTIZED.linear.finalize(layer, keep_weight=keep_weight)


def convert(layer: LinearLayer) -> None:
    if layer.weight.dtype != fp8.FP8:
        weight, scale = fp8.quantize_weight(layer.weight)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.scale = nn.Parameter(scale, requires_grad=False)
        layer.gemm = fp8.ON_WIDENED_WEIGHT


FP8_HEAD = Fp8Head()
