"""Log-probabilities in OpenAI's two formats (chat, text completion) and as vLLM's `prompt_logprobs`."""

from collections.abc import Sequence

from engine.core.request import TokenLogprobs
from engine.server.openai.reply.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from engine.text.tokenizer import TextTokenizer

# JSON has no infinity: a token masked out of the distribution gets what OpenAI reports for "practically impossible".
LOWEST = -9999.0


def finite(logprob: float) -> float:
    return max(logprob, LOWEST) if logprob == logprob else LOWEST  # NaN is not equal to itself


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: TextTokenizer) -> ChatLogprobs:
    return ChatLogprobs([
        TokenLogprob(
            tokenizer.token_text(entry.token_id),
            finite(entry.logprob),
            list(tokenizer.token_bytes(entry.token_id)),
            [
                TopLogprob(tokenizer.token_text(i), finite(value), list(tokenizer.token_bytes(i)))
                for i, value in entry.top
            ],
        )
        for entry in entries
    ])


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    tokenizer: TextTokenizer,
    alternatives: int,
) -> CompletionLogprobs:
    """`entries` is parallel to `token_ids`; None where there is no value (the first token of a prompt)."""
    result = CompletionLogprobs([], [], [], list(offsets))
    for token_id, entry in zip(token_ids, entries, strict=True):
        token = printable(token_id, tokenizer)
        result.tokens.append(token)
        result.token_logprobs.append(None if entry is None else finite(entry.logprob))
        if entry is None:
            result.top_logprobs.append(None)
        else:  # best first; the token itself is always among them, as OpenAI promises
            top = {printable(i, tokenizer): finite(value) for i, value in entry.top[:alternatives]}
            result.top_logprobs.append({token: finite(entry.logprob)} | top if token not in top else top)
    return result


def printable(token_id: int, tokenizer: TextTokenizer) -> str:
    """A token as a dictionary key: incomplete characters are written as bytes, so that no two tokens look the same."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def prompt_logprobs(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs | None], tokenizer: TextTokenizer
) -> PromptLogprobs:
    """vLLM's format: one object per prompt token, from token id to value, rank and text."""
    result: PromptLogprobs = []
    for entry in entries[: len(prompt)]:
        if entry is None:
            result.append(None)
            continue
        values = {
            str(i): PromptLogprob(finite(value), rank, tokenizer.token_text(i))
            for rank, (i, value) in enumerate(entry.top, start=1)
        }
        values[str(entry.token_id)] = PromptLogprob(
            finite(entry.logprob), entry.rank, tokenizer.token_text(entry.token_id)
        )
        result.append(values)
    return result
