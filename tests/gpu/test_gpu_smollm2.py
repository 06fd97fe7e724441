"""A real small model: the GPU's greedy choices are those of the CPU path in float32, wherever they are not close.

ATOLL_TEST_MODEL names the directory of SmolLM2-135M-Instruct (or another model of a supported family).
"""

import os
from pathlib import Path

import pytest
import torch
from gpu_kit import on_cpu, on_gpu

from engine import LLM, SamplingParams
from engine.outputs import Logprob

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)
if "ATOLL_TEST_MODEL" not in os.environ:
    pytest.skip("ATOLL_TEST_MODEL names no model directory", allow_module_level=True)

MODEL = Path(os.environ["ATOLL_TEST_MODEL"])
TOKENS = 40
# Nats between the CPU's best and second token: what bf16 may not turn round. (The CPU path itself, in bf16, moves these
# log-probabilities by 0.035 on average and 0.26 at most, and turns choices round that stand 0.10 apart; an H100 moves
# them as far, and turned 4 of 473 round, of which the clearest stood 0.24 apart. Logits are bf16 too: steps of 0.125.)
CLEAR = 0.3
TEXTS = [
    "The capital of France is",
    "Water boils at one hundred degrees, and freezes at",
    "Once upon a time there was a lighthouse keeper who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The three primary colours are red,",
]
QUESTIONS = ["What is the capital of Korea?", "Write one sentence about the sea.", "How many legs has a spider?"]


@pytest.fixture(scope="module")
def cpu() -> LLM:
    return on_cpu(MODEL, skip_tokenizer_init=False, max_model_len=512)


@pytest.fixture(scope="module")
def gpu() -> LLM:
    return on_gpu(MODEL, skip_tokenizer_init=False, max_model_len=512, max_num_seqs=16)


@pytest.fixture(scope="module")
def answered(cpu: LLM) -> list[tuple[list[int], list[int]]]:
    """(prompt, the CPU's greedy answer) in tokens: texts and questions in the chat template."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = cpu.generate(TEXTS, params, use_tqdm=False)
    outputs += cpu.chat([[{"role": "user", "content": q}] for q in QUESTIONS], params, use_tqdm=False)
    return [(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs]


def read(llm: LLM, answered: list[tuple[list[int], list[int]]]) -> list[list[dict[int, Logprob]]]:
    """The two likeliest tokens (and the given one) at every position after the first of each text."""
    whole = [{"prompt_token_ids": prompt + answer} for prompt, answer in answered]
    outputs = llm.generate(whole, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    return [[entry or {} for entry in (output.prompt_logprobs or [])[1:]] for output in outputs]


def best_two(entry: dict[int, Logprob]) -> tuple[int, float]:
    """(the likeliest token, by how many nats)."""
    ranked = sorted(entry, key=lambda token: -entry[token].logprob)
    return ranked[0], entry[ranked[0]].logprob - entry[ranked[1]].logprob


def test_the_gpu_chooses_as_the_cpu_on_the_same_text(
    cpu: LLM, gpu: LLM, answered: list[tuple[list[int], list[int]]]
) -> None:
    """Teacher-forced at every position of the prompts and of the CPU's own answers."""
    wrong, turned, clear, total, worst = {}, [], 0, 0, 0.0
    for i, (mine, reference) in enumerate(zip(read(gpu, answered), read(cpu, answered), strict=True)):
        prompt, answer = answered[i]
        assert len(mine) == len(reference) == len(prompt) + len(answer) - 1
        for at, token in enumerate((prompt + answer)[1:]):
            want, margin = best_two(reference[at])
            got, _ = best_two(mine[at])
            total += 1
            worst = max(worst, abs(mine[at][token].logprob - reference[at][token].logprob))
            clear += margin > CLEAR
            if got != want:
                turned.append(round(margin, 3))
                if margin > CLEAR:
                    wrong[i, at] = (got, want, round(margin, 3))
    print(f"{total} choices, {clear} of them clear; other ones on the GPU, with the CPU's margin: {sorted(turned)}; "
          f"log-probabilities differ by up to {worst:.3f}")
    assert clear > total / 2
    assert len(turned) < total / 20
    assert not wrong, f"(text, position): (GPU, CPU, the CPU's margin in nats) {wrong}"


def test_answers_part_at_close_calls_only(cpu: LLM, gpu: LLM, answered: list[tuple[list[int], list[int]]]) -> None:
    """Free-running: decode steps, from graphs. Until the first close call, the same text."""
    margins = [
        [best_two(entry) for entry in entries[len(prompt) - 1 :]]
        for entries, (prompt, _) in zip(read(cpu, answered), answered, strict=True)
    ]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = gpu.generate([{"prompt_token_ids": prompt} for prompt, _ in answered], params, use_tqdm=False)
    wrong, kept = {}, 0
    for i, (output, (_, answer)) in enumerate(zip(outputs, answered, strict=True)):
        got = output.outputs[0].token_ids
        at = next((k for k, (a, b) in enumerate(zip(got, answer, strict=True)) if a != b), TOKENS)
        kept += at
        if at < TOKENS and margins[i][at][1] > CLEAR:
            wrong[i, at] = (got[at], answer[at], round(margins[i][at][1], 3))
    print(f"{kept} of {TOKENS * len(answered)} tokens before the first difference")
    assert not wrong, f"(text, position): (GPU, CPU, the CPU's margin in nats) {wrong}"
    assert kept > TOKENS * len(answered) / 2
