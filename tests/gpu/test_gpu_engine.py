"""The whole engine on a GPU against the CPU path, on random weights: `tests/gpu/run.sh` runs this on a GPU machine."""

from pathlib import Path

import pytest
import torch
from gpu_kit import FAMILIES, checkpoint, generated, on_cpu, on_gpu, prompts

from engine import LLM, SamplingParams

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

TOKENS = 24


@pytest.fixture(params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return checkpoint(tmp_path / request.param, request.param)


Scores = tuple[torch.Tensor, torch.Tensor]  # log-probabilities of all prompts' tokens, and of all answers' tokens


def answer(llm: LLM, asked: list[dict]) -> tuple[list[dict], Scores]:
    """Greedy answers: the whole texts, and the scores: of the prompts (mixed steps) and of the answers (decode)."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    whole, of_prompts, of_answers = [], [], []
    for one, output in zip(asked, llm.generate(asked, params, use_tqdm=False), strict=True):
        ids, tokens = one["prompt_token_ids"], output.outputs[0].token_ids
        whole.append({"prompt_token_ids": ids + tokens})
        for token, entry in zip(ids[1:], (output.prompt_logprobs or [])[1:], strict=True):
            of_prompts.append((entry or {})[token].logprob)
        for token, entry in zip(tokens, output.outputs[0].logprobs or [], strict=True):
            of_answers.append(entry[token].logprob)
    return whole, (torch.tensor(of_prompts), torch.tensor(of_answers))


def read(llm: LLM, whole: list[dict]) -> Scores:
    """The scores that `llm` gives the same texts."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    of_prompts, of_answers = [], []
    for one, output in zip(whole, llm.generate(whole, params, use_tqdm=False), strict=True):
        ids, found = one["prompt_token_ids"], output.prompt_logprobs or []
        scores = [(found[i] or {})[ids[i]].logprob for i in range(1, len(ids))]
        of_prompts += scores[:-TOKENS]
        of_answers += scores[-TOKENS:]
    return torch.tensor(of_prompts), torch.tensor(of_answers)


def errors(ours: Scores, reference: Scores) -> list[float]:
    """Relative errors, of prompts and of answers."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(ours, reference, strict=True)]


@pytest.mark.parametrize("flags, limit", [
    ({}, 2e-2), ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, 1e-1),
], ids=["bf16", "fp8"])  # fmt: skip
def test_scores_follow_fp32(model: Path, flags: dict, limit: float) -> None:
    whole, scores = answer(on_gpu(model, max_num_seqs=16, **flags), prompts(12))
    found = errors(scores, read(on_cpu(model), whole))
    print(f"{model.name} {flags}: relative error of the scores of prompts {found[0]:.2e}, of answers {found[1]:.2e}")
    assert max(found) < limit, f"prompts {found[0]:.2e}, answers {found[1]:.2e}, limit {limit}"


def test_graphs_overlap_and_chunks_change_nothing_that_matters(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", "qwen3")
    asked = prompts(40, seed=3)
    params = [SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=i, ignore_eos=True) for i in range(40)]

    def run(**kwargs) -> list[list[int]]:
        return generated(on_gpu(model, **kwargs), asked, params)

    base = run()
    assert run() == base
    for other in (run(enforce_eager=True, overlap=False), run(max_num_batched_tokens=1024)):
        same = sum(a == b for x, y in zip(base, other, strict=True) for a, b in zip(x, y, strict=True))
        assert same / (40 * TOKENS) > 0.5  # bf16 sums in another order part ways at close calls, never at once
        assert sum(x[0] == y[0] for x, y in zip(base, other, strict=True)) >= 38
