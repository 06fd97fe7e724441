"""How far an engine's scores are from those of another that reads the same texts."""

import torch
from gpu_kit import prompts

from engine import LLM, SamplingParams

TOKENS = 24  # of an answer

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


def lost(llm: LLM, exact: LLM) -> list[float]:
    """What `llm` loses against `exact`: relative errors of scores, of prompts and of its own greedy answers."""
    whole, scores = answer(llm, prompts(12))
    return errors(scores, read(exact, whole))
