"""Check a safetensors header without the library that will later parse it.

Layout: 8 bytes little-endian header length · JSON header {name: {dtype, shape, data_offsets}} · data. The format
(https://github.com/huggingface/safetensors, README "Format") requires that tensors cover the data exactly, without
holes or overlaps. A hole could hide another file format, so it is refused here, as the library does.
"""

import os
import struct
from typing import Any

from offline_bundle import limits
from offline_bundle.signing.strict_json import StrictJSONError, loads
from offline_bundle.text import plain, t

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def problem(fd: int) -> str | None:
    """Why the open file `fd` is not a well-formed safetensors file, or None. Reads the header only."""
    try:
        _check(fd)
    except (ValueError, KeyError, TypeError, StrictJSONError) as e:
        return plain(e) or t("malformed header")
    return None


def _check(fd: int) -> None:
    size = os.fstat(fd).st_size
    prefix = os.pread(fd, 8, 0)
    if len(prefix) < 8:
        raise ValueError(t("the file is too short"))
    (length,) = struct.unpack("<Q", prefix)
    if length > limits.MAX_SAFETENSORS_HEADER:
        raise ValueError(t("the header claims {length} bytes, more than the {most} allowed",
                           length=length, most=limits.MAX_SAFETENSORS_HEADER))
    if 8 + length > size:
        raise ValueError(t("the header is longer than the file"))
    text = read_exactly(fd, length, 8)
    if not text.startswith(b"{"):
        raise ValueError(t("the header does not start with '{{'"))
    header = loads(text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(t("__metadata__ is not a map of strings"))
    end = 0
    for begin, stop in sorted(_span(name, info) for name, info in header.items()):
        if begin != end:
            raise ValueError(t("tensors overlap or leave a gap"))
        end = stop
    if end != size - 8 - length:
        raise ValueError(t("tensors cover {end} bytes of {size}", end=end, size=size - 8 - length))


def _span(name: str, info: Any) -> tuple[int, int]:
    """The byte range of one tensor, after checking it against dtype and shape."""
    if set(info) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(t("tensor {name!r} has unknown or missing fields", name=name))
    bits = _BITS.get(info["dtype"])
    if bits is None:
        raise ValueError(t("tensor {name!r} has an unknown dtype", name=name))
    begin, end = info["data_offsets"]
    numbers = [begin, end, *info["shape"]]
    if len(numbers) > limits.MAX_TENSOR_DIMS + 2 or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise ValueError(t("tensor {name!r} has an impossible shape or offset", name=name))
    for n in info["shape"]:
        bits *= n
    if bits % 8 or end - begin != bits // 8:
        raise ValueError(t("tensor {name!r} has offsets that do not fit its shape", name=name))
    return begin, end


def read_exactly(fd: int, length: int, offset: int) -> bytes:
    """`length` bytes at `offset`; ValueError when the file ends before."""
    parts: list[bytes] = []
    while length:
        part = os.pread(fd, length, offset)
        if not part:
            raise ValueError(t("the file ends too early"))
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return b"".join(parts)
