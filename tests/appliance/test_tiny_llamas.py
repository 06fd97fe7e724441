"""The tiny random models of conftest: loadable, different from one another, and readable by any tokenizer library."""

import pytest
from tiny_llama import TINY_LLAMAS
from tokenizers import Tokenizer


@pytest.mark.parametrize("shape", sorted(TINY_LLAMAS))
def test_every_shape_runs_and_is_decided(tiny_llama_dir, shape: str):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir(shape))
    with torch.no_grad():
        logits = model(torch.arange(3, 40)[None]).logits
    top = logits.topk(2, dim=-1).values
    assert (top[..., 0] - top[..., 1]).min() > 1e-4  # greedy does not hang on rounding


def test_seeds_differ_and_repeat(tiny_llama_dir):
    assert tiny_llama_dir("gqa") == tiny_llama_dir("gqa")
    first, second = (tiny_llama_dir("gqa", seed=seed) / "model.safetensors" for seed in (0, 1))
    assert first.read_bytes() != second.read_bytes()


def test_the_byte_tokenizer_round_trips(tiny_llama_dir):
    tokenizer = Tokenizer.from_file(str(tiny_llama_dir("gqa") / "tokenizer.json"))
    text = "the rain 비가 온다 ☔\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>").ids == [1]
    assert tokenizer.get_vocab_size() == 320
