"""Questions to the demonstration model whose answers any CPU and any GPU gives, whatever it rounds.

Most of its answers contain a near tie: after "What is the capital of France?" the two best tokens are 0.1 apart, less
than bf16 rounds. Tests that look for words in a greedy answer ask these questions. `margins` proves the choice:
tests/engine/test_questions.py asserts that along each answer no other token comes near.
"""

from pathlib import Path

import torch

QUESTION = "What is the capital of France? Answer with one word."
ANSWER = "The capital of France is Paris."
ANSWER_TOKENS = 8        # its end token included
BEGINNING = "The capital of France is"  # a text to complete: " Paris"

SURE = 1.0  # logits: several times what bf16 activations and logits of that model are off


def margins(model_dir: Path, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """The greedy tokens after `prompt` in float32, by transformers, and how far each is above the second best."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokens, gaps = [], []
    with torch.inference_mode():
        for _ in range(num_tokens):
            best = model(torch.tensor([prompt + tokens])).logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
    return tokens, gaps
