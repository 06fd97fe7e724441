"""The output head beside integer weights (`--quantization int8 | int4 | int4-g32`).

One stream reads the whole head for every token. In 16 bits it is a quarter of all bytes of an 8B model in int4, and
more of a smaller model. So it is rounded, too, where its products gain by it:

    GPU, beside int4              e4m3, a scale for each token of the vocabulary: an error of 2.6 % (root mean square)
    CPU that multiplies bytes     int8, likewise: 0.8 % (kernels/gemm/cpu_int8.py)
    any other                     16 bits

Its activations stay in 16 bits, so logits lose only what the weight's rounding costs; layers in int4 lose 9.8 %. A tied
head keeps the embedding in 16 bits, and takes a copy of it.
"""

from torch import nn

from engine.kernels.gemm import cpu_int8
from engine.layers.quant import fp8
from engine.layers.quant.base import LinearLayer
from engine.layers.quant.cpu_packed import use_on_cpu
from engine.layers.quant.fp8 import Fp8
from engine.layers.quant.online_integers import on_cpu
from engine.layers.quant.unquantized import Unquantized


class HeadBesideInt8(Unquantized):
    def finalize(self, layer: LinearLayer, *, keep_weight: bool) -> None:
        if layer.weight.is_cuda or not cpu_int8.supports(layer.in_features):
            super().finalize(layer, keep_weight=keep_weight)
        elif layer.packed is None:
            use_on_cpu(layer, on_cpu(layer.weight.data, 8, layer.in_features, layer.bias), keep_weight=keep_weight)


class HeadBesideInt4(Fp8):
    def finalize(self, layer: LinearLayer, *, keep_weight: bool) -> None:
        if layer.weight.is_cuda:
            convert(layer)
        else:
            BESIDE_INT8.finalize(layer, keep_weight=keep_weight)


def convert(layer: LinearLayer) -> None:
    if layer.weight.dtype != fp8.FP8:
        weight, scale = fp8.quantize_weight(layer.weight)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.scale = nn.Parameter(scale, requires_grad=False)
        layer.gemm = fp8.ON_WIDENED_WEIGHT


BESIDE_INT8, BESIDE_INT4 = HeadBesideInt8(), HeadBesideInt4()
