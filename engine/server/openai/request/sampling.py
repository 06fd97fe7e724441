"""Makes `SamplingParams` from a request's fields, the model's defaults, the endpoint's limits and the room in the
context."""

import json
from pathlib import Path
from typing import Any

from engine.core.params import SamplingParams
from engine.errors import InvalidRequestError
from engine.server.http.limits import Limits
from engine.server.ipc.messages import EngineInfo
from engine.server.openai.request.schema import SamplingFields

# Fields for which generation_config.json supplies defaults, as in vLLM (`--generation-config auto`).
DEFAULTS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}


def sampling_defaults(directory: Path | str) -> dict[str, float | int]:
    """The model vendor's sampling defaults, {} if there are none. Invalid values are left out."""
    try:
        config = json.loads((Path(directory) / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    defaults: dict[str, Any] = {}
    for name, kind in DEFAULTS.items():
        value = config.get(name) if isinstance(config, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                SamplingParams(**{name: kind(value)})
            except InvalidRequestError:
                continue
            defaults[name] = kind(value)
    return defaults


def sampling_params(
    request: SamplingFields,
    info: EngineInfo,
    limits: Limits,
    defaults: dict[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Raises InvalidRequestError naming the field. `max_tokens` must already fit the context (`answer_room`)."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if any(len(text) > limits.max_stop_characters for text in stop):
        raise InvalidRequestError(f"A stop string may have {limits.max_stop_characters} characters.", "stop")
    if len(request.stop_token_ids or []) > limits.max_stop_token_ids:
        raise InvalidRequestError(f"At most {limits.max_stop_token_ids} stop tokens are allowed.", "stop_token_ids")
    for token_id in request.stop_token_ids or []:
        check_token(token_id, info.vocab_size, "stop_token_ids")
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                     "repetition_penalty", "n", "seed", "min_tokens", "ignore_eos", "skip_special_tokens",
                     "include_stop_str_in_output")
        if (value := getattr(request, name)) is not None
    }
    return SamplingParams(
        **{**defaults, **given},
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=request.stop_token_ids or [],
        logit_bias=_logit_bias(request.logit_bias or {}, info.vocab_size, limits),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def constrained(params: SamplingParams, grammar: tuple[str, str] | None, info: EngineInfo) -> SamplingParams:
    """`params` for an answer that must follow `grammar`: (llguidance's form, the field that asks for it), or None.

    Raises InvalidRequestError.
    """
    if grammar is None:
        return params
    params.grammar, param = grammar
    if not info.grammars:
        raise InvalidRequestError(f"{param}: the engine of this model cannot follow grammars.", param)
    return params


def answer_room(
    prompt_tokens: int, max_model_len: int, asked: int | None, asked_as: str, prompt_as: str, default: int | None = None
) -> int:
    """How many tokens the answer may have: what was asked for, or else `default` (None: all that is left). Raises
    InvalidRequestError, with the numbers, if the prompt or the sum does not fit the context.

    The message contains the error code, because clients look for it there as well as in its own field.
    """
    limit = f"This model's maximum context length is {max_model_len} tokens. However, "
    if prompt_tokens >= max_model_len:
        raise InvalidRequestError(
            f"{limit}your prompt has {prompt_tokens} tokens and leaves no room for an answer; shorten it. "
            "(context_length_exceeded)", prompt_as, "context_length_exceeded",
        )
    room = max_model_len - prompt_tokens
    if asked is None:
        return room if default is None else min(room, default)
    if asked < 1:
        raise InvalidRequestError(f"{asked_as} must be at least 1, got {str(asked)[:40]}.", asked_as)
    if asked > room:
        raise InvalidRequestError(
            f"{limit}you asked for {str(asked)[:40]} tokens ({asked_as}) after {prompt_tokens} in the prompt; ask "
            f"for at most {room}. (context_length_exceeded)", asked_as, "context_length_exceeded",
        )
    return asked


def check_length_before_encoding(characters: int, longest_token: int, max_model_len: int, prompt_as: str) -> None:
    """Refuse a prompt that cannot fit however it is tokenised, before time is spent on tokenising it."""
    if characters > longest_token * max_model_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
            f"{characters} characters, which is more than {characters // longest_token} tokens. "
            "(context_length_exceeded)", prompt_as, "context_length_exceeded",
        )


def check_token(token_id: int, vocab_size: int, param: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(
            f"{param}: {str(token_id)[:40]} is not a token of this model (0 to {vocab_size - 1}).", param
        )


def _logit_bias(biases: dict[str, float], vocab_size: int, limits: Limits) -> dict[int, float]:
    if len(biases) > limits.max_logit_bias:
        raise InvalidRequestError(f"logit_bias may name at most {limits.max_logit_bias} tokens.", "logit_bias")
    result: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequestError(f"logit_bias: {key[:40]!r} is not a token id.", "logit_bias")
        check_token(int(key), vocab_size, "logit_bias")
        result[int(key)] = bias
    return result
