"""The text of Qwen3-VL: greedy tokens equal transformers' whole model; what belongs to images is skipped, and said."""

import json
import logging
import random

import oracle
import pytest
import torch
from safetensors.torch import load_file
from test_oracle import VOCAB, run
from tiny_llama import save_byte_tokenizer

from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.models.config.model import ModelConfig
from engine.models.registry import model_class
from engine.worker.startup.build import build_engine

LENGTH = 16


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model_dir(request, tmp_path_factory):
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2],
                            "mrope_interleaved": True},
    }  # fmt: skip
    vision = {"depth": 4, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
              "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1, 2]}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=request.param)
    torch.manual_seed(1)
    model = Qwen3VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    directory = tmp_path_factory.mktemp("qwen3-vl-")
    model.save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


def test_greedy_equals_transformers(model_dir, caplog):
    caplog.set_level(logging.INFO)
    rng = random.Random(4)
    stem = [rng.randrange(3, VOCAB) for _ in range(60)]
    requests = [
        EngineRequest(f"r{i}", stem[: rng.choice([5, 40, 60])] + [9, 8, 7][: i % 4],
                      SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True))
        for i in range(6)
    ]
    core = build_engine(EngineConfig(model_dir, device="cpu", dtype="float32", max_model_len=128, block_size=16,
                                     kv_cache_memory_bytes=4 << 20, max_num_batched_tokens=33, max_num_seqs=3))
    skipped = [record.getMessage() for record in caplog.records if "model.visual." in record.getMessage()]
    assert len(skipped) == 1
    tokens, _ = run(core, requests, rng)
    for r in requests:
        assert tokens[r.request_id] == oracle.greedy(model_dir, tuple(r.prompt_token_ids), LENGTH)


def test_the_checkpoint_has_the_names_of_releases(model_dir):
    names = set(load_file(model_dir / "model.safetensors"))
    config = ModelConfig.load(model_dir)
    model = model_class(config)(config, 64)
    assert set(model.weights()) <= names
    assert "model.language_model.layers.3.self_attn.q_norm.weight" in names
    rest = {name for name in names - set(model.weights()) if not model.ignores(name)}
    assert rest == set()
    assert json.loads((model_dir / "config.json").read_text())["text_config"]["rope_parameters"]["mrope_section"]
