"""Embeddings: the hidden states of a prompt, pooled into one vector.

    last    the last token's hidden state, which a step computes anyway
    mean    the mean over all tokens: each chunk of the prompt adds to a sum, which stays on the device between steps

Both are taken after the model's last norm and summed in float32. The vectors are not normalised here: the gateway does
that after it has cut them to the dimensions that the client asked for.
"""

import numpy as np
import torch

from engine.core.batch import StepPlan


def needs_all_states(plan: StepPlan) -> bool:
    """Whether a step must compute the hidden states of all its tokens, not only of the last ones."""
    return any(chunk.pooling == "mean" for chunk in plan.pooled.values())


class Pooler:
    """Running sums of prompts whose mean is being computed, by row. A prompt that restarts overwrites its row."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def pool(self, plan: StepPlan, last: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor | None:
        """`last` [P, H]: hidden states of the last tokens of the chunks that end; `whole` [T, H]: of all tokens, for a
        mean. Returns the vectors of the chunks that end [P, H], float32, in the order of the plan; None for none.
        """
        pooled = last.float()
        place = q_start = 0
        for seq in plan.seqs:
            chunk = plan.pooled.get(seq.row)
            if chunk is not None and chunk.pooling == "mean":
                assert whole is not None
                total = whole[q_start : q_start + seq.num_tokens].sum(0, dtype=torch.float32)
                before = self._sums.pop(seq.row, None)
                if seq.start:
                    assert before is not None, "a mean begins at the first token"
                    total += before
                if chunk.ends:
                    pooled[place] = total / (seq.start + seq.num_tokens)
                else:
                    self._sums[seq.row] = total
            place += chunk is not None and chunk.ends
            q_start += seq.num_tokens
        return pooled if place else None


def unpack(plan: StepPlan, pooled: torch.Tensor | None) -> dict[int, bytes | None]:
    """The vectors as bytes, by place in plan.seqs; None where one is not finite. `pooled`: on the host."""
    if pooled is None:
        return {}
    vectors = pooled.numpy().astype("<f4", copy=False)
    return {
        place: vector.tobytes() if np.isfinite(vector).all() else None
        for place, vector in zip(plan.pooled_ends, vectors, strict=True)
    }
