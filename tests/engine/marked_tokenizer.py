"""A tokenizer of bytes and control tokens under a published chat template: the real syntax without the real model."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.text.tokenizer import TextTokenizer

DATA = Path(__file__).parent / "text" / "data"
# template -> (its file, control tokens, end of a turn); those of Qwen that tools and reasoning use are not special
_GEMMA = ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
          "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<|channel>", "<channel|>")
_QWEN = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
         "</think>")
# template -> (its file, control tokens, end of a turn); those of Qwen that tools and reasoning use are not special
TEMPLATES = {
    "gemma4": ("gemma-4-e2b.jinja", _GEMMA, "<turn|>"),
    "gemma4-31b": ("gemma-4-31b.jinja", _GEMMA, "<turn|>"),
    "qwen3.6": ("qwen3.6.jinja", _QWEN, "<|im_end|>"),
}


def bytes_and(marks: Iterable[AddedToken]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_tokens(list(marks))
    return tokenizer


def marked_tokenizer(family: str) -> TextTokenizer:
    file, tokens, end = TEMPLATES[family]
    marks = [AddedToken(token, special=family != "qwen3.6" or token.startswith("<|"), normalized=False)
             for token in tokens]
    tokenizer = bytes_and(marks)
    eos = tokenizer.token_to_id(end)
    assert eos is not None
    return TextTokenizer(
        tokenizer, config={"bos_token": "<bos>", "eos_token": end},
        template_source=(DATA / file).read_text(encoding="utf-8"), eos_token_ids=[eos])
