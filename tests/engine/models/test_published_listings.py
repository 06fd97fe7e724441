"""Published quantised checkpoints, tensor by tensor, without their bytes: each is loaded, or known to be of no use.

The counts are those of the published indexes. Names follow the published scheme; vision towers, which are not loaded,
count as so many tensors.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import quantized_files as files

from engine.errors import ModelError
from engine.models.config.model import ModelConfig
from engine.models.loading.checkpoint import TensorInfo
from engine.models.loading.loader import _check_names
from engine.models.loading.quantized import plain_name, use_stored_formats
from engine.models.registry import empty_model

BENCH = Path(__file__).parents[3] / "engine/bench/configs"
VISION = 333  # tensors
ATTENTION, RECURRENT = ("q_proj", "k_proj", "v_proj", "o_proj"), ("in_proj_qkv", "in_proj_z", "out_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
Listing = dict[str, tuple[str, tuple[int, ...]]]


def config_of(name: str, layers: int | None) -> dict[str, Any]:
    config = json.loads((BENCH / name / "config.json").read_text())
    return config if layers is None else config | {"num_hidden_layers": layers}


def in_bf16(name: str, layers: int | None = None) -> Listing:
    """The text, the drafter and the vision tower of a published Qwen3.6 in 16 bits; or one of fewer layers."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config_of(name, layers)))
        model = empty_model(Path(directory))
    found: Listing = {}
    for tensor, view in model.weights().items():
        tensor = tensor.replace("model.", "model.language_model.", 1)
        found[tensor] = "BF16", tuple(view.shape)
    last = max(int(tensor.split(".")[3]) for tensor in found if ".layers." in tensor)  # a full layer, as a drafter's
    own = {tensor: entry for tensor, entry in found.items() if f".layers.{last}." in tensor}
    found |= {tensor.replace(f"model.language_model.layers.{last}.", "mtp.layers.0."): e for tensor, e in own.items()}
    hidden = found["model.language_model.norm.weight"][1][0]
    found["mtp.fc.weight"] = "BF16", (hidden, 2 * hidden)
    found |= {f"mtp.{norm}.weight": ("BF16", (hidden,))
              for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}  # fmt: skip
    return found | {f"model.visual.{i}.weight": ("BF16", (8,)) for i in range(VISION)}


def each_expert(listing: Listing) -> Listing:
    found: Listing = {}
    for name, (dtype, shape) in listing.items():
        place, _, kind = name.rpartition(".")
        if not place.endswith("experts"):
            found[name] = dtype, shape
            continue
        count, out, inner = shape
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        found |= {f"{place}.{i}.{part}.weight": (dtype, (out // len(parts), inner))
                  for i in range(count) for part in parts}  # fmt: skip
    return found


def in_block_fp8(listing: Listing) -> Listing:
    found: Listing = {}
    for name, (dtype, shape) in listing.items():
        module = name.removesuffix(".weight")
        if not module.endswith((*ATTENTION, *RECURRENT, *MLP)) or "visual" in module:
            found[name] = dtype, shape
            continue
        found[name] = "F8_E4M3", shape
        found[f"{module}.weight_scale_inv"] = "BF16", (-(-shape[0] // 128), -(-shape[1] // 128))
    return found


def in_gptq(listing: Listing) -> Listing:
    found: Listing = {}
    for name, (dtype, shape) in listing.items():
        module = name.removesuffix(".weight")
        if not module.endswith(MLP) or any(kept in module for kept in ("shared_expert", "mtp", "visual")):
            found[name] = dtype, shape
            continue
        out, inner = shape
        groups = inner // 128
        found |= {f"{module}.qweight": ("I32", (inner // 8, out)), f"{module}.qzeros": ("I32", (groups, out // 8)),
                  f"{module}.scales": ("F16", (groups, out)), f"{module}.g_idx": ("I32", (inner,))}  # fmt: skip
    return found


FP8 = files.fp8_config(modules_to_not_convert=[
    "lm_head", "model.language_model.embed_tokens", "mtp.fc",
    *(f"model.language_model.layers.{i}.{part}" for i in range(64) for part in (
        "mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.conv1d")),
])  # fmt: skip
GPTQ = files.gptq_config(4, 128, dynamic={
    "lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {},
    "-:.*mtp.*": {}, "-:.*visual.*": {}})  # fmt: skip


def load_names(
    directory: Path, name: str, quantization: dict, listing: Listing, layers: int | None = None
) -> set[str]:
    """What `load_weights` does with a checkpoint before it reads a byte of it. Returns the tensors that are loaded."""
    text = config_of(name, layers)
    whole = {"architectures": [text["architectures"][0].replace("CausalLM", "ConditionalGeneration")],
             "text_config": text, "vision_config": {},
             "quantization_config": quantization}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(whole))
    tensors = {tensor: TensorInfo(directory / "x", dtype, shape, 0, 0) for tensor, (dtype, shape) in listing.items()}
    model = empty_model(directory)
    use_stored_formats(model, ModelConfig.load(directory), directory, tensors)
    model.adapt([plain_name(tensor) for tensor in tensors])
    _check_names(model, model.weights(), directory, tensors)
    return set(model.weights())


PUBLISHED = {
    "Qwen3.6-35B-A3B-FP8": ("qwen3.6-35b-a3b", FP8, in_block_fp8, 64_196),
    "Qwen3.5-35B-A3B-GPTQ-Int4": ("qwen3.6-35b-a3b", GPTQ, in_gptq, 124_611),
    "Qwen3.8-27B-FP8": ("qwen3.6-27b", FP8, in_block_fp8, 1_606),
}


@functools.cache
def _published(published: str, layers: int | None) -> Listing:
    name, _, quantised, _ = PUBLISHED[published]
    return quantised(each_expert(in_bf16(name, layers)))


def listing_of(published: str, layers: int | None = None) -> Listing:
    """A copy, to be changed."""
    return dict(_published(published, layers))


@pytest.mark.parametrize("published", PUBLISHED)
def test_every_tensor_of_a_published_checkpoint_has_its_place(tmp_path: Path, published: str) -> None:
    name, quantization, _, count = PUBLISHED[published]
    listing = listing_of(published)
    assert len(listing) == count
    loaded = load_names(tmp_path, name, quantization, listing)
    assert loaded == {tensor for tensor in listing if not tensor.startswith(("mtp.", "model.visual."))}


def test_the_counts_in_16_bits() -> None:
    assert len(in_bf16("qwen3.6-35b-a3b")) == 1_045
    in_fp8 = in_block_fp8(in_bf16("qwen3.6-27b"))
    assert sum(dtype == "F8_E4M3" for dtype, _ in in_fp8.values()) == 407


@pytest.mark.parametrize(("published", "change", "words"), [
    ("Qwen3.6-35B-A3B-FP8", "layers.7.mlp.experts.200.up_proj.weight_scale_inv", "lacks tensor .*{}"),
    ("Qwen3.6-35B-A3B-FP8", "layers.7.self_attn.q_proj.weight_scale_inv", "lacks tensor .*{}"),
    ("Qwen3.5-35B-A3B-GPTQ-Int4", "layers.0.mlp.experts.3.down_proj.qzeros", "lacks tensor .*{}"),
])  # fmt: skip
def test_one_missing_tensor_among_all_is_named(tmp_path: Path, published: str, change: str, words: str) -> None:
    name, quantization, *_ = PUBLISHED[published]
    listing = listing_of(published, layers=8)
    assert len(listing) > 10_000
    del listing[f"model.language_model.{change}"]
    with pytest.raises(ModelError, match=words.format(change.replace(".", r"\."))):
        load_names(tmp_path, name, quantization, listing, layers=8)


def test_one_extra_scale_among_all_is_named(tmp_path: Path) -> None:
    name, quantization, *_ = PUBLISHED["Qwen3.8-27B-FP8"]
    extra = "model.language_model.layers.5.mlp.up_proj.weight_scale"
    listing = listing_of("Qwen3.8-27B-FP8") | {extra: ("F32", (1,))}
    with pytest.raises(ModelError, match=extra.replace(".", r"\.")):
        load_names(tmp_path, name, quantization, listing)
