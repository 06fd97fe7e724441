"""Published checkpoints by the names of their tensors alone, and what is refused before anything is allocated.

The lists are written down from the layouts, not from our models: their lengths are those of the published indexes.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gemma import SHAPES as GEMMA_SHAPES
from test_gemma import save_tiny_gemma
from tiny_llama import TINY_LLAMAS, save_tiny_llama

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.models.base import CausalLM
from engine.models.config.model import ModelConfig
from engine.models.config.quantization import read_quantization
from engine.models.loading import loader
from engine.models.loading.checkpoint import TensorInfo
from engine.models.registry import model_class
from engine.worker.startup import build

CONFIGS = Path(__file__).parents[3] / "engine" / "bench" / "configs"
TEXT = "model.language_model."
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
ATTENTION = [f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
LINEAR = [f"linear_attn.{n}" for n in (
    "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "out_proj.weight",
    "conv1d.weight", "A_log", "dt_bias", "norm.weight")]  # fmt: skip
DENSE = [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
SPARSE = [
    "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.shared_expert_gate.weight",
    *[f"mlp.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")],
]  # fmt: skip
BLOCK = [f"{n}.{part}" for n in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
         for part in ("weight", "bias")]  # fmt: skip
VISUAL = [
    *[f"model.visual.blocks.{i}.{name}" for i in range(27) for name in BLOCK],
    "model.visual.patch_embed.proj.weight", "model.visual.patch_embed.proj.bias", "model.visual.pos_embed.weight",
    *[f"model.visual.merger.{n}.{part}" for n in ("norm", "linear_fc1", "linear_fc2") for part in ("weight", "bias")],
]  # fmt: skip


def qwen(num_layers: int, mlp: list[str]) -> list[str]:
    """Qwen3.5 and 3.6: every fourth layer has attention; a drafter of one such layer."""
    names = [f"{TEXT}embed_tokens.weight", f"{TEXT}norm.weight", "lm_head.weight"]
    for i in range(num_layers):
        names += [f"{TEXT}layers.{i}.{name}" for name in [*NORMS, *(ATTENTION if i % 4 == 3 else LINEAR), *mlp]]
    drafter = [f"mtp.{n}.weight" for n in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")]
    drafter += [f"mtp.layers.0.{name}" for name in [*NORMS, *ATTENTION, *mlp]]
    return names + VISUAL + drafter


def each_expert(names: list[str], num_experts: int) -> list[str]:
    """Experts as matrices of their own instead of stacks."""
    found = []
    for name in names:
        start, stack, which = name.partition("mlp.experts.")
        if not stack:
            found.append(name)
        elif which == "gate_up_proj":
            kinds = ("gate", "up", "down")
            found += [f"{start}mlp.experts.{e}.{kind}_proj.weight" for e in range(num_experts) for kind in kinds]
    return found


def in_fp8(name: str) -> bool:
    kept = ("in_proj_a", "in_proj_b", "conv1d", "mlp.gate.", "shared_expert_gate", "mtp.fc", "norm", "visual")
    return name.endswith(("proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")) and not any(k in name for k in kept)


def with_scales(names: list[str]) -> list[str]:
    return names + [name.replace(".weight", ".weight_scale_inv") for name in names if in_fp8(name)]


QWEN36_35B, QWEN36_27B = qwen(40, SPARSE), qwen(64, DENSE)


def test_the_lists_are_as_long_as_the_published_indexes() -> None:
    assert len(set(QWEN36_35B)) == len(QWEN36_35B) == 1045
    assert len([n for n in QWEN36_35B if n.startswith(("model.language_model.", "lm_head."))]) == 693
    assert len(with_scales(each_expert(QWEN36_35B, 256))) == 64_196
    assert len(with_scales(QWEN36_27B)) == 1606
    assert len([n for n in QWEN36_27B if in_fp8(n)]) == 407
    # GPTQ: four tensors for each matrix of the text model's experts; the drafter's are matrices in bf16.
    text = [n for n in QWEN36_35B if "mlp.experts." not in n]
    experts = 40 * 256 * 3
    assert len(text) + experts * 4 + 256 * 3 == 124_611


def model_of(config: str) -> CausalLM:
    raw = json.loads((CONFIGS / config / "config.json").read_text())
    whole = {"architectures": [raw["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")],
             "text_config": raw, "tie_word_embeddings": raw["tie_word_embeddings"]}  # fmt: skip
    parsed = ModelConfig.parse(whole)
    return model_class(parsed)(parsed, 64)


def tensors_of(model: CausalLM, names: list[str]) -> dict[str, TensorInfo]:
    shapes = {name: tuple(target.shape) for name, target in model.weights().items()}
    return {name: TensorInfo(Path("x"), "BF16", shapes.get(name, (1,)), 2, 0) for name in names}


@pytest.mark.parametrize(
    ("config", "names", "loaded"), [("qwen3.6-35b-a3b", QWEN36_35B, 693), ("qwen3.6-27b", QWEN36_27B, 851)]
)
def test_published_names_are_what_the_model_takes(config: str, names: list[str], loaded: int) -> None:
    model = model_of(config)
    tensors = tensors_of(model, names)
    model.adapt(tensors)
    loader._check_names(model, model.weights(), Path("m"), tensors)
    assert len(model.weights()) == loaded
    assert sum(model.ignores(name) for name in names) == len(names) - loaded
    assert set(model.weights()) <= set(names)
    gone = f"{TEXT}layers.30.linear_attn.A_log"
    with pytest.raises(ModelError, match=f"lacks tensor {gone}"):
        loader._check_names(model, model.weights(), Path("m"), {n: t for n, t in tensors.items() if n != gone})
    more = f"{TEXT}layers.30.linear_attn.in_proj_z.weight_scale_inv"
    with pytest.raises(ModelError, match=f"holds tensor {more}"):
        loader._check_names(model, model.weights(), Path("m"), tensors | tensors_of(model, [more]))


@pytest.mark.parametrize("method", ["bitsandbytes", "aqlm", "quip", ""])
def test_formats_that_are_not_read_are_refused_by_their_name(method: str, tmp_path: Path) -> None:
    raw = json.loads((CONFIGS / "qwen3.6-27b" / "config.json").read_text())
    config = ModelConfig.parse(raw | {"quantization_config": {"quant_method": method}})
    with pytest.raises(ModelError, match=rf"config\.json: the weights are quantised with {method},"):
        read_quantization(config, tmp_path)


def test_an_fp8_weight_without_its_scale_is_named(tmp_path: Path) -> None:
    """Nor is it loaded as if it were the weight itself."""
    save_tiny_llama(tmp_path, **TINY_LLAMAS["gqa"])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"{name} is F8_E4M3 in the checkpoint, and no scale"):
        build.build_engine(EngineConfig(tmp_path, device="cpu"))


# -- before anything is allocated


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("memory was taken before the refusal")

    monkeypatch.setattr(loader, "_materialize", never)
    monkeypatch.setattr(build, "Cache", never)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("llama", "gemma3", "gemma4_31b")}
    save_tiny_llama(made["llama"], **TINY_LLAMAS["gqa"])
    for name in ("gemma3", "gemma4_31b"):
        save_tiny_gemma(made[name], GEMMA_SHAPES[name])
    return made


def rope_of(kind: str) -> dict:
    block = {"rope_type": kind, "rope_theta": 1e4}
    return {"full_attention": block, "sliding_attention": block}


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("llama", {"architectures": ["EvilForCausalLM"]}, "EvilForCausalLM"),
        ("llama", {"auto_map": {"AutoModel": "code.Evil"}}, "auto_map"),
        ("llama", {"rope_parameters": {"rope_type": "warp", "rope_theta": 1e4}}, "warp"),
        ("llama", {"hidden_size": 60}, "hidden_size|shape"),
        ("llama", {"num_hidden_layers": 3}, "lacks tensor model.layers.2"),
        ("llama", {"num_hidden_layers": 1}, "holds tensor model.layers.1"),
        ("gemma3", {"auto_map": {"AutoModel": "code.Evil"}}, "auto_map"),
        ("gemma3", {"rope_parameters": rope_of("warp")}, "warp"),
        ("gemma4_31b", {"rope_parameters": rope_of("warp")}, "warp"),
        ("gemma4_31b", {"per_layer_config": {"5": {"head_dim": 64, "num_key_value_heads": 2}}}, "5.*shape"),
        ("gemma4_31b", {"attention_k_eq_v": False}, "lacks tensor .*v_proj"),
        ("gemma4_31b", {"vocab_size": 400}, "embed_tokens.*shape|vocab_size"),
    ],
)
@pytest.mark.usefixtures("nothing_allocated")
def test_what_cannot_be_right_is_refused_first(
    models: dict[str, Path], tmp_path: Path, family: str, fields: dict, words: str
) -> None:
    for file in models[family].iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((models[family] / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ModelError, match=words):
        build.build_engine(EngineConfig(tmp_path, device="cpu", max_model_len=64))
