"""A step's result: tokens and log-probabilities, by sequence; and which log-probabilities of prompts it needs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from engine.core.batch import SeqResult, StepPlan, StepResult
from engine.core.request import TokenLogprobs

NAN_ERROR = "The model produced values that are not numbers for this request."
PROMPT_LOGITS_ROWS = 256  # prompt logprobs are computed this many positions at a time: [256, V] logits, not [T, V]


class PromptPart(NamedTuple):
    """Tokens of a prompt whose log-probabilities are wanted, from the hidden states of the tokens before them."""

    hidden: slice    # which tokens of the step
    row: int         # of the request table
    targets: slice   # the positions in that row that they predict
    num_top: int     # alternatives


def prompt_parts(plan: StepPlan, prompt_len: Sequence[int]) -> dict[int, list[PromptPart]]:
    """By index in plan.seqs, for each sequence that asked: its prompt tokens of this step, in parts whose logits fit
    into memory. `prompt_len`: of the sequence in each row."""
    found: dict[int, list[PromptPart]] = {}
    q_start = 0
    for i, seq in enumerate(plan.seqs):
        if seq.prompt_logprobs is not None:
            count = min(seq.num_tokens, prompt_len[seq.row] - 1 - seq.start)
            found[i] = []
            for at in range(0, count, PROMPT_LOGITS_ROWS):
                end = min(at + PROMPT_LOGITS_ROWS, count)
                targets = slice(seq.start + 1 + at, seq.start + 1 + end)
                found[i].append(PromptPart(slice(q_start + at, q_start + end), seq.row, targets, seq.prompt_logprobs))
        q_start += seq.num_tokens
    return found


class Packed(Protocol):
    """Log-probabilities of some positions, in the form in which they come from the device."""

    def unpack(self) -> list[TokenLogprobs]: ...


def step_result(
    plan: StepPlan,
    tokens: Sequence[int],
    logprobs: Mapping[int, TokenLogprobs],
    prompt_logprobs: Mapping[int, Sequence[Packed]],
    embeddings: Mapping[int, bytes | None],
) -> StepResult:
    """tokens: one for each sequence that samples, negative if there was nothing to sample from. logprobs: by index in
    `tokens`. prompt_logprobs, embeddings: by index in plan.seqs; an embedding that is not finite is None."""
    results, at = [], 0
    for i, seq in enumerate(plan.seqs):
        parts = prompt_logprobs.get(i)
        listed = None if parts is None else [entry for part in parts for entry in part.unpack()]
        if not seq.samples:
            embedding = embeddings.get(i)
            error = NAN_ERROR if embedding is None and i in embeddings else None
            results.append(SeqResult(prompt_logprobs=listed, error=error, embedding=embedding))
            continue
        token = tokens[at]
        results.append(SeqResult(error=NAN_ERROR) if token < 0 else SeqResult(token, logprobs.get(at), listed))
        at += 1
    return StepResult(plan.step_id, results)
