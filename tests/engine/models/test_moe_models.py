"""Qwen3-MoE and Mixtral: greedy tokens equal transformers', and checkpoints and configurations that are refused."""

import json
import random
import shutil

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_oracle import LENGTH, VOCAB, run, tiny_engine
from tiny_llama import save_byte_tokenizer

from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason
from engine.errors import ModelError
from engine.models.config.model import ModelConfig
from engine.models.registry import model_class
from engine.worker.startup.build import build_engine

SHAPES = {
    "qwen3": {"model": "Qwen3Moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
              "norm_topk_prob": True},
    "qwen3_mixed": {"model": "Qwen3Moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                    "norm_topk_prob": False, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3],
                    "tie_word_embeddings": True},
    "mixtral": {"model": "Mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral_windowed": {"model": "Mixtral", "num_local_experts": 8, "num_experts_per_tok": 1, "sliding_window": 24},
}


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory):
    import transformers

    made = {}

    def make(shape):
        if shape not in made:
            settings = {"num_hidden_layers": 2, **SHAPES[shape]}
            family = settings.pop("model")
            config = getattr(transformers, f"{family}Config")(
                vocab_size=VOCAB, hidden_size=64, intermediate_size=96, initializer_range=0.25, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, max_position_embeddings=512, **settings,
            )
            torch.manual_seed(1)
            model = getattr(transformers, f"{family}ForCausalLM")(config).float()
            with torch.no_grad():  # norms start as ones: dropping them must show
                for name, parameter in model.named_parameters():
                    if "norm" in name:
                        parameter.add_(torch.randn_like(parameter) * 0.3)
            made[shape] = tmp_path_factory.mktemp(shape)
            model.save_pretrained(made[shape])
            save_byte_tokenizer(made[shape])
        return made[shape]

    return make


def some_requests(rng, count, max_tokens=LENGTH):
    bank = random.Random(7)  # few different prompts, so that prefixes hit and the oracle's answers are reused
    stems = [[bank.randrange(3, VOCAB) for _ in range(n)] for n in (5, 40, 70)]
    tails = [[], [9, 8, 7], [bank.randrange(3, VOCAB) for _ in range(20)]]
    return [
        EngineRequest(f"r{i}", rng.choice(stems) + rng.choice(tails), SamplingParams(
            temperature=0, max_tokens=rng.randrange(1, max_tokens + 1), ignore_eos=True))
        for i in range(count)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget, pages, seqs, caching, overlap", [
    (1, 30, 2, True, False), (7, 40, 6, True, True), (33, 26, 4, False, True), (200, 50, 6, True, False),
])
def test_greedy_equals_transformers(moe_dir, shape, budget, pages, seqs, caching, overlap):
    model_dir, rng = moe_dir(shape), random.Random(f"{shape}{budget}")
    core = tiny_engine(model_dir, num_pages=pages, max_num_batched_tokens=budget, max_num_seqs=seqs,
                       enable_prefix_caching=caching, overlap=overlap)
    requests = some_requests(rng, 4 if budget == 1 else 8)
    tokens, last = run(core, requests, rng, aborts=0.03)
    for r in requests:
        expected = oracle.greedy(model_dir, tuple(r.prompt_token_ids), LENGTH)
        got = tokens[r.request_id]
        assert got == expected[: len(got)]
        if last[r.request_id].finish_reason is not FinishReason.ABORT:
            assert len(got) == r.params.max_tokens


def test_preemption_does_not_change_tokens(moe_dir):
    model_dir = moe_dir("qwen3")
    core = tiny_engine(model_dir, num_pages=14, max_num_batched_tokens=64)
    requests = [EngineRequest(f"r{i}", list(range(i + 3, i + 23)), SamplingParams(
        temperature=0, max_tokens=80, ignore_eos=True)) for i in range(4)]
    tokens, _ = run(core, requests)
    assert core.stats().num_preemptions > 0
    for r in requests:
        assert tokens[r.request_id] == oracle.greedy(model_dir, tuple(r.prompt_token_ids), 80)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_experts_take_part(moe_dir, shape):
    """The shapes' routers do not send everything to a few experts, or the tests above would prove little."""
    model, chosen = oracle.load(moe_dir(shape)), set()

    def note(_module, _inputs, outputs):
        chosen.update(outputs[2].unique().tolist())

    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(note) for router in routers]
    oracle.logits(moe_dir(shape), list(range(3, 120)))
    for hook in hooks:
        hook.remove()
    assert chosen == set(range(model.config.num_local_experts))


EXPERT = {"qwen3": "model.layers.1.mlp.experts.5.up_proj.weight",
          "mixtral": "model.layers.1.block_sparse_moe.experts.3.w3.weight"}


@pytest.mark.parametrize("shape", EXPERT)
@pytest.mark.parametrize("damage, message", [
    ("missing", "lacks tensor {name}"),
    ("unexpected", "holds tensor {name}x, which this architecture does not have"),
    ("misshapen", r"Tensor {name} has shape \[7, 64\] in the checkpoint; config.json implies"),
])
def test_a_damaged_expert_is_named(moe_dir, tmp_path, shape, damage, message):
    model_dir, name = tmp_path / "model", EXPERT[shape]
    shutil.copytree(moe_dir(shape), model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    if damage == "missing":
        del tensors[name]
    elif damage == "unexpected":
        tensors[f"{name}x"] = torch.zeros(2)
    else:
        tensors[name] = torch.zeros(7, 64)
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(ModelError, match=message.format(name=name.replace(".", r"\."))):
        small_engine(model_dir)


def small_engine(model_dir):
    return build_engine(EngineConfig(model_dir, device="cpu", dtype="float32", max_model_len=64, block_size=16,
                                     kv_cache_memory_bytes=1 << 20))


@pytest.mark.parametrize("fields, message", [
    ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is larger than num_local_experts \(8\)"),
    ({"num_local_experts": 0}, "num_local_experts must be a positive number"),
    ({"num_local_experts": None}, "num_local_experts must be a positive number"),
    ({"num_experts_per_tok": "2"}, "num_experts_per_tok must be a positive number"),
    ({"moe_intermediate_size": -1}, "moe_intermediate_size must be a positive number"),
    ({"norm_topk_prob": "yes"}, "norm_topk_prob must be a bool"),
    ({"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive number"),
])
def test_a_wrong_configuration_is_refused_by_name(moe_dir, fields, message):
    raw = json.loads((moe_dir("qwen3") / "config.json").read_text()) | fields
    config = ModelConfig.parse(raw)
    with pytest.raises(ModelError, match=message):
        model_class(config)(config, 64)


def test_releases_name_the_number_of_experts_otherwise(moe_dir):
    raw = json.loads((moe_dir("qwen3") / "config.json").read_text())
    raw["num_experts"] = raw.pop("num_local_experts")
    config = ModelConfig.parse(raw)
    assert len(model_class(config)(config, 64).weights()) == 3 + 2 * (6 + 3 + 8 * 3)
