"""Turns the texts or token ids of a request into lists of token ids, checked before the engine sees them."""

from typing import Any

from engine.errors import InvalidRequestError
from engine.server.ipc.messages import EngineInfo
from engine.server.openai.request.sampling import check_length_before_encoding, check_token
from engine.server.openai.serving import Gateway, ServedModel


def parse_prompts(given: str | list[Any], most: int, name: str) -> list[str] | list[list[int]]:
    """The field `name`, in any of its four forms, as a list of texts or a list of id lists. Raises
    InvalidRequestError."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError(f"{name} must not be empty.", name)
    if _is_ids(given):
        return [given]
    if len(given) > most:
        raise InvalidRequestError(f"At most {most} {name}s are allowed, got {len(given)}.", name)
    if all(isinstance(item, str) for item in given):
        return given
    for i, item in enumerate(given):
        if not isinstance(item, list) or not _is_ids(item):
            raise InvalidRequestError(
                f"{name} must be a string, a list of strings, a list of token ids, or a list of lists of token ids.",
                f"{name}.{i}",
            )
    return given


def _is_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


async def encoded(
    gateway: Gateway, model: ServedModel, info: EngineInfo, given: str | list[Any], most: int, name: str, *,
    special: bool,
) -> list[list[int]]:
    """The token ids of each prompt; `special` adds the tokenizer's own tokens to texts. Raises InvalidRequestError."""
    prompts = parse_prompts(given, most, name)
    found: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_length_before_encoding(len(prompt), model.tokenizer.longest_token, info.max_model_len, name)
            prompt = await gateway.off_loop(model.tokenizer.encode_text, prompt, special)
        else:
            for token_id in (min(prompt, default=0), max(prompt, default=0)):
                check_token(token_id, info.vocab_size, name)
        if not prompt:
            raise InvalidRequestError(f"{name} must not be empty.", name if len(prompts) == 1 else f"{name}.{i}")
        found.append(prompt)
    return found
