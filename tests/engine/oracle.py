"""transformers as the judge: greedy tokens of one request alone, in float32."""

from functools import lru_cache
from pathlib import Path

import torch


@lru_cache(maxsize=16)
def load(model_dir: Path):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    multimodal = AutoConfig.from_pretrained(model_dir).model_type == "qwen3_vl"  # no class of the text alone
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    return auto.from_pretrained(model_dir, dtype=torch.float32).eval()


@lru_cache(maxsize=4096)
def greedy(model_dir: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """`num_tokens` greedy tokens after `prompt`, end tokens ignored."""
    model = load(model_dir)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=num_tokens,
            max_new_tokens=num_tokens, pad_token_id=0, eos_token_id=None, bos_token_id=None,
        )
    return out[0, len(prompt):].tolist()


def logits(model_dir: Path, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return load(model_dir)(torch.tensor([ids])).logits[0]


def embedding(model_dir: Path, ids: list[int], pooling: str, dimensions: int | None = None) -> torch.Tensor:
    """The last hidden states of a prompt alone, pooled, cut and brought to length 1."""
    with torch.inference_mode():
        states = load(model_dir)(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    vector = (states[-1] if pooling == "last" else states.mean(0))[:dimensions]
    return vector / vector.norm()
