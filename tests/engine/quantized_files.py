"""Quantised checkpoints, written number by number from the formats' published descriptions.

Written without the code that reads them and without torch's bit operations, so that both cannot be wrong alike. Each
writer takes a matrix [out, in] and returns its tensors, and the numbers that they stand for, in float32.
"""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, np.ndarray]
Writer = Callable[[np.ndarray], Written]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column that nibble n of a word holds


def words(codes: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """[R, C] codes -> int32 [R, C * bits / 32], the first in the lowest bits; `order`: which of each word's columns."""
    each = 32 // bits
    order = list(range(each)) if order is None else order
    rows, columns = codes.shape
    found = np.zeros((rows, math.ceil(columns / each)), dtype=np.uint32)
    for r in range(rows):
        for w in range(found.shape[1]):
            word = 0
            for slot in range(each):
                column = w * each + order[slot]
                if column < columns:
                    word |= int(codes[r, column]) << (bits * slot)
            found[r, w] = word
    return found.view(np.int32)


def quantized(weight: np.ndarray, bits: int, group: int, scale_dtype: torch.dtype, *, symmetric: bool):
    """(codes, scales, zero points): codes are below 2^bits, and groups lie along the inputs."""
    out, inner = weight.shape
    groups = weight.reshape(out, inner // group, group)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scale, zero = np.abs(groups).max(-1) / (middle - 0.5), np.full(groups.shape[:2], middle)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = (high - low) / top
        zero = np.clip(np.round(-low / scale), 1, top).astype(int)
    stored = torch.tensor(scale).to(scale_dtype)
    scale = stored.float().numpy()
    codes = np.clip(np.round(groups / scale[..., None]) + zero[..., None], 0, top).astype(int)
    numbers = (codes - zero[..., None]).astype(np.float32) * scale[..., None]
    return codes.reshape(out, inner), stored, zero, numbers.reshape(out, inner)


def pack_quantized(
    bits: int, group: int, *, symmetric: bool = True, scale_dtype=torch.bfloat16, shuffled: bool = False
) -> Writer:
    def write(weight: np.ndarray) -> Written:
        out, inner = weight.shape
        order = random.Random(inner).sample(range(inner), inner) if shuffled else list(range(inner))
        sorted_columns = weight[:, order]
        codes, scale, zero, numbers = quantized(
            sorted_columns, bits, group or inner, scale_dtype, symmetric=symmetric)
        back = np.argsort(order)
        tensors = {
            "weight_packed": torch.tensor(words(codes[:, back], bits)), "weight_scale": scale,
            "weight_shape": torch.tensor([out, inner]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = torch.tensor(words(zero.T, bits).T.copy())
        if shuffled:
            tensors["weight_g_idx"] = torch.tensor((np.arange(inner) // group)[back], dtype=torch.int32)
        return tensors, numbers[:, back]

    return write


def int8(group: int = 0, *, symmetric: bool = True) -> Writer:
    def write(weight: np.ndarray) -> Written:
        codes, scale, zero, numbers = quantized(weight, 8, group or weight.shape[1], torch.bfloat16,
                                                symmetric=symmetric)
        tensors = {"weight": torch.tensor(codes - 128, dtype=torch.int8), "weight_scale": scale}
        if not symmetric:
            tensors["weight_zero_point"] = torch.tensor(zero - 128, dtype=torch.int8)
        return tensors, numbers

    return write


def float8(strategy: str, name: str = "weight_scale", block: int = 128, scale_dtype=torch.float32) -> Writer:
    def write(weight: np.ndarray) -> Written:
        out, inner = weight.shape
        height, width = {"tensor": (out, inner), "channel": (1, inner), "block": (block, block)}[strategy]
        rows, columns = math.ceil(out / height), math.ceil(inner / width)
        scale = torch.zeros(rows, columns, dtype=scale_dtype)
        stored = torch.zeros(out, inner, dtype=torch.float8_e4m3fn)
        numbers = np.zeros_like(weight)
        for r in range(rows):
            for c in range(columns):
                at = np.s_[r * height : (r + 1) * height, c * width : (c + 1) * width]
                scale[r, c] = float(np.abs(weight[at]).max()) / 448
                factor = scale[r, c].float().numpy()
                stored[at] = torch.tensor(weight[at] / factor).clamp(-448, 448).to(torch.float8_e4m3fn)
                numbers[at] = stored[at].float().numpy() * factor
        if strategy == "tensor":
            scale = scale.reshape(1)
        return {"weight": stored, name: scale}, numbers

    return write


def gptq(bits: int, group: int, *, symmetric: bool = True, v2: bool = False, desc_act: bool = False) -> Writer:
    def write(weight: np.ndarray) -> Written:
        _, inner = weight.shape
        order = random.Random(inner).sample(range(inner), inner) if desc_act else list(range(inner))
        codes, scale, zero, numbers = quantized(weight[:, order], bits, group or inner, torch.float16,
                                                symmetric=symmetric)
        back = np.argsort(order)
        return {
            "qweight": torch.tensor(words(codes[:, back], bits).T.copy()),
            "qzeros": torch.tensor(words(zero.T - (0 if v2 else 1), bits)),
            "scales": scale.T.contiguous(),
            "g_idx": torch.tensor((np.arange(inner) // (group or inner))[back], dtype=torch.int32),
        }, numbers[:, back]

    return write


def awq(group: int) -> Writer:
    def write(weight: np.ndarray) -> Written:
        codes, scale, zero, numbers = quantized(weight, 4, group, torch.float16, symmetric=False)
        return {
            "qweight": torch.tensor(words(codes.T, 4, AWQ_ORDER)), "qzeros": torch.tensor(words(zero.T, 4, AWQ_ORDER)),
            "scales": scale.T.contiguous(),
        }, numbers

    return write


def float4(kind: str) -> Writer:
    """kind: "nvfp4", "modelopt" (the same under other names) or "mxfp4"."""

    def write(weight: np.ndarray) -> Written:
        out, inner = weight.shape
        group = 32 if kind == "mxfp4" else 16
        groups = weight.reshape(out, -1, group)
        wanted = np.abs(groups).max(-1) / 6
        whole = np.float32(448 / wanted.max())
        if kind == "mxfp4":
            exponent = np.ceil(np.log2(wanted)).astype(int) + 127
            stored, scale = torch.tensor(exponent, dtype=torch.uint8), np.float32(2.0) ** (exponent - 127)
        elif kind == "modelopt":
            stored = torch.tensor(wanted * whole).to(torch.float8_e4m3fn)
            scale = stored.float().numpy() * (np.float32(1) / whole)
        else:
            stored = torch.tensor(wanted * whole).to(torch.float8_e4m3fn)
            scale = stored.float().numpy() / whole
        scale = scale.astype(np.float32)
        nearest = np.abs(np.abs(groups / scale[..., None])[..., None] - np.array(E2M1)).argmin(-1)
        signs = groups < 0
        numbers = np.where(signs, -1, 1) * np.array(E2M1, dtype=np.float32)[nearest] * scale[..., None]
        codes = (nearest + 8 * signs).reshape(out, inner)
        packed = torch.tensor(codes[:, 0::2] + 16 * codes[:, 1::2], dtype=torch.uint8)
        numbers = numbers.astype(np.float32).reshape(out, inner)
        if kind == "mxfp4":
            return {"weight_packed": packed, "weight_scale": stored}, numbers
        if kind == "modelopt":
            return {"weight": packed, "weight_scale": stored, "weight_scale_2": torch.tensor(np.float32(1) / whole),
                    "input_scale": torch.tensor(0.5)}, numbers
        return {"weight_packed": packed, "weight_scale": stored, "weight_global_scale": torch.tensor([whole])}, numbers

    return write


def save(
    source: Path, directory: Path, config: dict, writer_of: Callable[[str], Writer | None], *,
    change: Callable[[Tensors], Tensors] = dict,
) -> Path:  # fmt: skip
    """Quantise the checkpoint in `source`: a writer for each module, or None. Returns `directory`/packed; beside it,
    in `directory`/plain, is the same model with the numbers that the packed ones stand for. `change`: of the
    checkpoint, before it is quantised."""
    tensors = change(load_file(source / "model.safetensors"))
    packed: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        writer = writer_of(module) if name.endswith(".weight") and tensor.dim() == 2 else None
        if writer is None:
            packed[name] = plain[name] = tensor
            continue
        stored, numbers = writer(tensor.float().numpy())
        packed |= {f"{module}.{kind}": part.contiguous() for kind, part in stored.items()}
        plain[name] = torch.tensor(np.ascontiguousarray(numbers))
    raw = json.loads((source / "config.json").read_text())
    for kind, content, settings in (("packed", packed, {"quantization_config": config}), ("plain", plain, {})):
        target = directory / kind
        target.mkdir(parents=True)
        for file in source.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, target)
        save_file(content, target / "model.safetensors", metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(raw | settings))
    return directory / "packed"


def of_layers(writer: Writer, *, but: str = "\0") -> Callable[[str], Writer | None]:
    """Quantise every linear layer of the decoder, but those whose names hold this."""
    return lambda module: None if not module.endswith("_proj") or but in module else writer


# -- configurations ----------------------------------------------------------------------------------------------------


def compressed_tensors(layout: str, weights: dict, inputs: dict | None = None, **others) -> dict:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights},
             "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None, **others}


def ints(bits: int, group: int, *, symmetric: bool = True) -> dict:
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
            "group_size": group or None}


FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
INT8_INPUTS = FP8_INPUTS | {"type": "int"}


def gptq_config(bits: int, group: int, **others) -> dict:
    return {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": False, "sym": True,
            "lm_head": False, "checkpoint_format": "gptq", **others}


def awq_config(group: int, **others) -> dict:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": None, **others}


def fp8_config(block: int = 128, **others) -> dict:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [block, block],
            "modules_to_not_convert": ["lm_head"], **others}


# name -> (configuration, writer, whether activations keep their precision)
FORMATS: dict[str, tuple[dict, Writer]] = {
    "block fp8": (fp8_config(), float8("block", "weight_scale_inv")),
    "block fp8, bf16 scales": (fp8_config(), float8("block", "weight_scale_inv", scale_dtype=torch.bfloat16)),
    "block fp8, 64": (fp8_config(64), float8("block", "weight_scale_inv", 64)),
    "ct fp8 block": (compressed_tensors("float-quantized", {
        "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}), float8("block")),
    "ct fp8 weights by channel": (compressed_tensors("naive-quantized", {
        "num_bits": 8, "type": "float", "strategy": "channel"}), float8("channel")),
    "ct fp8 weights by tensor": (compressed_tensors("naive-quantized", {
        "num_bits": 8, "type": "float", "strategy": "tensor"}), float8("tensor")),
    "ct w4a16 g32": (compressed_tensors("pack-quantized", ints(4, 32)), pack_quantized(4, 32)),
    "ct w4a16 g64 f32 scales": (
        compressed_tensors("pack-quantized", ints(4, 64)), pack_quantized(4, 64, scale_dtype=torch.float32)),
    "ct w4a16 by channel": (compressed_tensors("pack-quantized", ints(4, 0)), pack_quantized(4, 0)),
    "ct w4a16 asymmetric": (
        compressed_tensors("pack-quantized", ints(4, 32, symmetric=False)), pack_quantized(4, 32, symmetric=False)),
    "ct w4a16 g_idx": (compressed_tensors("pack-quantized", {**ints(4, 32), "actorder": "group"}),
                       pack_quantized(4, 32, shuffled=True)),
    "ct w8a16": (compressed_tensors("pack-quantized", ints(8, 64)), pack_quantized(8, 64)),
    "ct w8a16 asymmetric": (
        compressed_tensors("pack-quantized", ints(8, 32, symmetric=False)), pack_quantized(8, 32, symmetric=False)),
    "ct w2a16": (compressed_tensors("pack-quantized", ints(2, 32)), pack_quantized(2, 32)),
    "ct int8": (compressed_tensors("int-quantized", ints(8, 0)), int8()),
    "ct int8 asymmetric": (compressed_tensors("int-quantized", ints(8, 0, symmetric=False)), int8(symmetric=False)),
    "gptq": (gptq_config(4, 32), gptq(4, 32)),
    "gptq by channel": (gptq_config(4, 0), gptq(4, 0)),
    "gptq desc_act": (gptq_config(4, 32, desc_act=True), gptq(4, 32, desc_act=True)),
    "gptq v2 asymmetric": (gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"),
                           gptq(4, 32, symmetric=False, v2=True)),
    "gptq v1 asymmetric": (gptq_config(4, 64, sym=False), gptq(4, 64, symmetric=False)),
    "gptq 8 bits": (gptq_config(8, 32), gptq(8, 32)),
    "awq": (awq_config(32), awq(32)),
    "awq g64": (awq_config(64), awq(64)),
    "nvfp4": (compressed_tensors("nvfp4-pack-quantized", {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}), float4("nvfp4")),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, float4("modelopt")),
    "mxfp4": (compressed_tensors("mxfp4-pack-quantized", {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}), float4("mxfp4")),
}  # fmt: skip
