"""Triton's interpreter runs the kernels of this folder on CPU tensors: slow, exact, and without a GPU.

Triton reads the variable when it is imported, so this comes before any test module. The interpreter wants float32 or
float16 here: its products of bfloat16 are wrong.
"""

import importlib.util
import os

import pytest
import torch

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]
os.environ["TRITON_INTERPRET"] = "1"

_DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The interpreter is one thread of Python, and its small operations only wait for others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def exact_conversions():
    """Narrow numbers as the hardware does. The interpreter's own conversion loses the carry when a mantissa rounds up
    to the next power of two (127 becomes 64 in e4m3)."""
    if collect_ignore_glob:
        yield
        return
    from triton.runtime import interpreter

    original = interpreter._convert_float
    nearest = interpreter._ir.ROUNDING_MODE.RTNE

    def convert(data, source, target, rounding):
        if source.name not in _DTYPES or target.name not in _DTYPES or rounding not in (None, nearest):
            return original(data, source, target, rounding)
        numbers = torch.frombuffer(bytearray(data.tobytes()), dtype=_DTYPES[source.name]).to(_DTYPES[target.name])
        return numbers.view(_BITS[numbers.element_size()]).numpy().reshape(data.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield
