"""The tests' own writers of GPTQ and AWQ give the bytes that GPTQModel 7.7.0 and AutoAWQ 0.2.9 packed from the same
numbers.

Both libraries bring kernels for GPUs and a dozen packages that these tests do not need. So their packing functions
were run once, alone: GPTQModel's `pack_original` and AutoAWQ's `WQLinear_GEMM.from_linear`. These are the hashes of
what they wrote.
"""

import hashlib

import numpy as np
import pytest
import quantized_files as files
import torch

OUT, INNER, GROUP = 64, 128, 32
# qweight, qzeros (as gptq_v2 and AWQ store them) and scales, one after the other
PACKED = {
    "gptq 4 symmetric": "118d90198e466cc7", "gptq 4 asymmetric": "2ed0d693c95b4427",
    "gptq 8 symmetric": "2e182fd100d6717d", "gptq 8 asymmetric": "4d0c7f3ebddc2482",
    "gptq 4 desc_act": "df0029711e64a712", "awq": "005070376d703101",
}  # fmt: skip
WRITERS = {
    "gptq 4 symmetric": files.gptq(4, GROUP, v2=True), "gptq 8 symmetric": files.gptq(8, GROUP, v2=True),
    "gptq 4 asymmetric": files.gptq(4, GROUP, symmetric=False, v2=True),
    "gptq 8 asymmetric": files.gptq(8, GROUP, symmetric=False, v2=True),
    "gptq 4 desc_act": files.gptq(4, GROUP, v2=True, desc_act=True), "awq": files.awq(GROUP),
}  # fmt: skip


def weight() -> np.ndarray:
    """The same on every machine: multiples of 1/64."""
    row, column = np.arange(OUT)[:, None], np.arange(INNER)[None, :]
    return (((row * 37 + column * 101 + row * column) % 211 - 105) / 64).astype(np.float32)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    parts = (tensors[name].contiguous().numpy().tobytes() for name in ("qweight", "qzeros", "scales"))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


@pytest.mark.parametrize("name", WRITERS)
def test_packed_bytes_are_the_librarys(name: str) -> None:
    assert digest(WRITERS[name](weight())[0]) == PACKED[name]


def test_format_v1_of_gptq_stores_zero_points_less_one() -> None:
    """As GPTQModel's `convert_gptq_v2_to_v1_format` does: it subtracts one from every field of a word."""
    (v1, numbers), (v2, same) = (files.gptq(4, GROUP, symmetric=False, v2=v2)(weight()) for v2 in (False, True))
    assert torch.equal(v2["qzeros"] - 0x11111111, v1["qzeros"])
    assert torch.equal(v1["qweight"], v2["qweight"])
    assert (numbers == same).all()
