"""The safetensors files of a model directory: found and checked without loading a tensor, and without torch.

A file is   u64 header length | JSON header | tensor data   and must end where its last tensor ends.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.message import msg, reason
from engine.models.config.model import ModelConfig, read_json

MAX_HEADER_BYTES = 100_000_000  # the format's own bound
_INDEX = "model.safetensors.index.json"
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
                "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int  # of its first byte in the file


def check_checkpoint(model_dir: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint by name. Raises ModelError that names a missing, short, or corrupt file.

    Reads headers only: milliseconds, so that it can run before anything is started.
    """
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ModelError(
            msg("{model_dir} is not a directory.", model_dir=model_dir),
            msg(
                "Give the path of a "
                "model directory (config.json, "
                "*.safetensors, tokenizer.json); names of a model hub are not looked up."
            ),
        )
    ModelConfig.load(model_dir)
    shards, index = _shards(model_dir)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(shard).items():
            if name in tensors:
                raise ModelError(msg("Tensor {name} is in both {name_2} and {name_3}.", name=name,
                                     name_2=tensors[name].shard.name, name_3=shard.name))
            tensors[name] = info
    for name, shard_name in index.items():
        if name not in tensors or tensors[name].shard.name != shard_name:
            raise ModelError(msg("{model_dir} does not hold tensor {name}, which {index} promises.",
                                 model_dir=model_dir / shard_name, name=name, index=_INDEX))
    return tensors


def read_header(shard: Path) -> dict[str, TensorInfo]:
    """The tensors of one file; ModelError if its header or size is wrong."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(msg("{shard} is not a safetensors file (or is cut short: it has {size} bytes).",
                                     shard=shard, size=size))
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(msg("Weight file {shard} is missing.", shard=shard), msg("Copy the model again, or "
                                                                                  "verify the bundle.")) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(msg("Weight file {shard} cannot be read: {error}.", shard=shard,
                             error=reason(error))) from None
    if not isinstance(header, dict):
        raise ModelError(msg("Weight file {shard} is corrupt: its header is no JSON object.", shard=shard))
    header.pop("__metadata__", None)
    data_bytes = size - 8 - length
    tensors = {name: _tensor_info(shard, name, entry, 8 + length) for name, entry in header.items()}
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != data_bytes:
        raise ModelError(
            msg(
                "Weight file {shard} is truncated or padded: its header describes {end} bytes of tensors, "
                "the file holds {data_bytes}.",
                shard=shard,
                end=end,
                data_bytes=data_bytes,
            ),
            msg("Copy the model again, or verify the bundle."),
        )
    return tensors


def _tensor_info(shard: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        expected = math.prod(shape) * _DTYPE_BYTES[dtype]
        ok = 0 <= start <= end and end - start == expected and all(n >= 0 for n in shape)
    except (KeyError, TypeError, ValueError):
        ok = False
    if not ok:
        raise ModelError(msg("Weight file {shard} is corrupt: the entry of tensor {name} is wrong.", shard=shard,
                             name=f"{name!r:.100}"))
    return TensorInfo(shard, dtype, shape, expected, data_start + start)


def _shards(model_dir: Path) -> tuple[list[Path], dict[str, str]]:
    """Shard paths, and the index (tensor -> file name) if there is one."""
    index_path = model_dir / _INDEX
    if not index_path.exists():
        shards = sorted(model_dir.glob("*.safetensors"))
        if not shards:
            raise ModelError(
                msg("{model_dir} holds no *.safetensors file.", model_dir=model_dir),
                msg("Pickled weights (.bin, .pt) are not read."),
            )
        return shards, {}
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(msg("{index_path} has no weight_map.", index_path=index_path))
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(msg("{index_path} names a file outside the model directory: {shard}.",
                                 index_path=index_path, shard=f"{shard!r:.100}"))
    return [model_dir / name for name in sorted(set(weight_map.values()))], weight_map
