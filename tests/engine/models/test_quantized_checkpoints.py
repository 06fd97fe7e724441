"""Checkpoints that are quantised as they are published: exactly the numbers that they stand for."""


import oracle
import pytest
import quantized_files as files
import torch
from test_oracle import run

from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.layers.linear import Linear
from engine.models.config.model import ModelConfig
from engine.models.loading.checkpoint import check_checkpoint
from engine.models.loading.loader import load_weights
from engine.models.loading.quantized import use_stored_formats
from engine.models.registry import empty_model
from engine.worker.build import build_engine

WIDE = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 32, "initializer_range": 0.1, "num_hidden_layers": 1}  # ragged blocks of 128; groups of 32 and 64


def loaded(model_dir, dtype=torch.float32):
    model = empty_model(model_dir, dtype)
    use_stored_formats(model, ModelConfig.load(model_dir), model_dir, check_checkpoint(model_dir))
    with torch.inference_mode():
        load_weights(model, model_dir)
    return model


def linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


@pytest.fixture(scope="module")
def written(tiny_llama_dir, tmp_path_factory):
    made = {}

    def make(name, **changes):
        if (name, *changes) not in made:
            config, writer = files.FORMATS[name]
            source = tiny_llama_dir("gqa", **WIDE, **changes)
            made[name, *changes] = files.save(source, tmp_path_factory.mktemp("q"), config, files.of_layers(writer))
        return made[name, *changes]

    return make


@pytest.mark.parametrize("name", sorted(files.FORMATS))
def test_weights_are_those_that_were_written(written, name):
    packed = written(name)
    ours, plain = loaded(packed), loaded(packed.parent / "plain")
    assert torch.equal(ours.embed_tokens.weight, plain.embed_tokens.weight)
    for module, linear in linears(ours).items():
        assert torch.equal(linear.weight, linears(plain)[module].weight), module


@pytest.mark.parametrize("name", ["block fp8", "ct w4a16 asymmetric", "gptq desc_act", "awq", "nvfp4"])
def test_products_in_bfloat16_are_those_of_the_rounded_weight(written, name):
    packed = written(name)
    ours, plain = loaded(packed, torch.bfloat16), loaded(packed.parent / "plain", torch.bfloat16)
    for module, linear in linears(ours).items():
        for rows in (1, 5):
            x = torch.randn(rows, linear.in_features, dtype=torch.bfloat16)
            assert torch.equal(linear(x), linears(plain)[module](x)), module


@pytest.mark.parametrize("name", ["block fp8", "ct w4a16 g32", "gptq", "awq", "nvfp4", "ct fp8 weights by tensor"])
def test_greedy_tokens_are_those_of_the_dequantised_model(written, name):
    packed = written(name)
    core = build_engine(EngineConfig(packed, device="cpu", dtype="float32", max_model_len=128))
    prompts = [tuple(range(5, 5 + n)) for n in (3, 17, 40)]
    requests = [EngineRequest(str(i), list(p), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
                for i, p in enumerate(prompts)]  # fmt: skip
    tokens, _ = run(core, requests)
    for i, prompt in enumerate(prompts):
        assert tokens[str(i)] == oracle.greedy(packed.parent / "plain", prompt, 16)
