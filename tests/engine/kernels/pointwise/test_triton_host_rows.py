"""Rows looked up in a table and scaled, as an embedding does: the kernel against its reference, in the interpreter."""

import json

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("triton")

from engine import LLM, SamplingParams
from engine.kernels.pointwise import host_rows
from engine.kernels.pointwise import reference as pointwise_reference
from engine.kernels.runtime import host_memory
from engine.layers.embed import Embedding
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import load_weights
from engine.models.registry import model_class
from engine.worker.startup import build


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [64, 1024, 1280, 8960])
@pytest.mark.parametrize("programs", [1, 7, 512])
def test_like_its_reference(dtype, width, programs):
    table = torch.randn(40, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor([0, 39, 7, 7, 1, 0, 38])  # the first row, the last one, some twice
    for scale in (1.0, 16.0, 0.3):
        found = host_rows.gather_rows(table, ids, scale, programs=programs)
        assert torch.equal(found, pointwise_reference.gather_rows(table, ids, scale))


def test_no_ids():
    assert host_rows.gather_rows(torch.ones(3, 16), torch.empty(0, dtype=torch.int64)).shape == (0, 16)


@pytest.mark.parametrize("size", [256, 48])
def test_an_embedding_on_the_host_gives_the_same_bits(size):
    """Its scale is rounded to the weight's dtype, and its products are."""
    torch.set_default_dtype(torch.float16)
    try:
        usual, on_host = (Embedding(50, size, scale=(size / 3) ** 0.5) for _ in range(2))
    finally:
        torch.set_default_dtype(torch.float32)
    usual.weight = torch.nn.Parameter(torch.randn(50, size).half(), requires_grad=False)
    on_host.keep_on_host()
    on_host.weight.copy_(usual.weight)
    assert not host_memory.is_locked(on_host.weight), "that takes a driver"
    ids = torch.randint(0, 50, (33,))
    assert torch.equal(on_host(ids), usual(ids))


def test_a_model_with_its_table_on_the_host_says_the_same(tmp_path, monkeypatch):
    """Whole requests on a CPU, whose steps read the table by the kernel."""
    raw = {
        "architectures": ["Gemma4ForCausalLM"], "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
        "global_head_dim": 32, "sliding_window": 24, "max_position_embeddings": 512, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 300, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.load(tmp_path)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(tuple(target.shape), generator=generator) * (1 if "per_layer" in name else 0.2)
        for name, target in model_class(config)(config, 16).weights().items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    prompts = [{"prompt_token_ids": list(range(3 + i, 20 + 7 * i))} for i in range(3)]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=0)

    def answers():
        llm = LLM(model=tmp_path, device="cpu", dtype="float32", max_model_len=64, skip_tokenizer_init=True)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        return [output.token_ids for output in outputs], [output.logprobs for output in outputs]

    used = []

    def on_host(model, *arguments):
        [table] = model.lookup_tables()
        table.keep_on_host()
        load_weights(model, *arguments)
        table.register_forward_hook(lambda module, *_: used.append(module.on_host))

    usual = answers()
    monkeypatch.setattr(build, "load_weights", on_host)
    assert answers() == usual
    assert used
    assert all(used)
