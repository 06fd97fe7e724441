"""Weight formats, one a file (base.py has the interface). `FORMATS` has those that --quantization names."""

from engine.layers.quant.base import Format
from engine.layers.quant.fp8 import FP8_PER_CHANNEL
from engine.layers.quant.online_integers import ONLINE

FORMATS: dict[str, Format] = {"fp8": FP8_PER_CHANNEL, **ONLINE}
