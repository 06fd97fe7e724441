"""Weight formats, one a file (base.py has the interface). `FORMATS` has those that --quantization names."""

from engine.layers.quant.base import Format
from engine.layers.quant.fp8 import FP8_PER_CHANNEL
from engine.layers.quant.head import BESIDE_FP8, BESIDE_INT4, BESIDE_INT8
from engine.layers.quant.online_integers import OnlineIntegerExperts, OnlineIntegers

FORMATS: dict[str, Format] = {
    "fp8": FP8_PER_CHANNEL._replace(head=BESIDE_FP8),
    "int8": Format(OnlineIntegers(8), OnlineIntegerExperts(8), BESIDE_INT8),
    "int4": Format(OnlineIntegers(4, 128), OnlineIntegerExperts(4, 128), BESIDE_INT4),
    "int4-g32": Format(OnlineIntegers(4, 32), OnlineIntegerExperts(4, 32), BESIDE_INT4),
}
