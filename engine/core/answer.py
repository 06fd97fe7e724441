"""What a step's result adds to a sequence, and what its client hears of it."""

import time

from engine.core.batch import ScheduledSeq, SeqResult
from engine.core.request import FinishReason, StepOutput
from engine.core.sequence import Sequence


def take(seq: Sequence, item: ScheduledSeq, result: SeqResult) -> StepOutput | None:
    """Append the result to the sequence. Returns what is new in its answer, if anything; with a finish reason, the
    sequence has come to its end."""
    if result.prompt_logprobs is not None:
        # Index by position: a preempted sequence computes its prompt again, perhaps before an earlier result has been
        # read.
        known = seq.prompt_logprobs = seq.prompt_logprobs or [None]
        assert item.start < len(known), "prompt logprobs have a gap"
        known += result.prompt_logprobs[len(known) - 1 - item.start :]
    if not item.samples:
        return None if result.embedding is None else _take_embedding(seq, result.embedding)
    token_id = result.token_id
    assert token_id is not None
    seq.num_placeholders -= 1
    seq.token_ids.append(token_id)
    output = StepOutput(seq.request_id, [token_id])
    if seq.matcher is not None:
        seq.matcher.accept(token_id)
        output.complete = seq.matcher.finished and not seq.ends_at(token_id)
    if result.logprobs is not None:
        output.logprobs = [result.logprobs]
    if seq.num_output_tokens == 1:
        seq.times.first_token = time.monotonic()
        output.num_cached_tokens = seq.num_cached_tokens
        if seq.params.prompt_logprobs is not None:
            output.prompt_logprobs = list(seq.prompt_logprobs)
    reason = output.finish_reason = seq.finish_reason_for(token_id)
    if reason:
        output.times = seq.times
        if reason is FinishReason.STOP and token_id in seq.stop_ids and token_id not in seq.eos_ids:
            output.stop_reason = token_id
    return output


def _take_embedding(seq: Sequence, embedding: bytes) -> StepOutput:
    seq.num_placeholders = 0
    seq.times.first_token = time.monotonic()
    return StepOutput(
        seq.request_id, finish_reason=FinishReason.STOP, num_cached_tokens=seq.num_cached_tokens, times=seq.times,
        embedding=embedding,
    )  # fmt: skip


def failed(seq: Sequence, error: str) -> StepOutput:
    """The last output of a sequence that a step's failure ended."""
    return StepOutput(seq.request_id, finish_reason=FinishReason.ERROR, error=error, times=seq.times)
