"""Every field that clients send and `schema` does not declare: harmless, or refused by name.

A field is refused unless it is known to leave the answer as it is: a dropped field is a wrong answer that nobody
notices. docs/en/api.md lists the same names for clients.
"""

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

from engine.server.http.errors import ApiError, invalid, shortened
from engine.server.openai.request.responses_schema import ReasoningConfig, ResponsesRequest, TextConfig
from engine.server.openai.request.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TokenizeRequest,
)

# Accepted with any value: none of them has a say in the answer.
HARMLESS = {
    "guided_decoding_backend": "which library follows grammars; there is one",
    "user": "a name of the end user, for the provider's own records",
    "safety_identifier": "the same, under its newer name",
    "metadata": "labels of stored answers; nothing is stored",
    "prediction": "a guess at the answer that may save time and changes no token",
    "prompt_cache_key": "routes alike prompts to one machine; there is one",
    "prompt_cache_options": "how long prompts stay cached; memory decides",
    "prompt_cache_retention": "the same, under its older name",
    "session_id": "routes a conversation to one machine; there is one",
    "stream_interval": "how many tokens an event of a stream collects; the text is the same",
    "truncation_side": "which end truncate_prompt_tokens cuts; that one is refused",
    "return_mm_kwargs": "about images; requests with images are refused",
    "return_token_offsets": "vLLM ignores it here too",
}

_THINKING = "send reasoning_effort or thinking_token_budget"
_CONSTRAINT = "send response_format or structured_outputs"
_STORE = "it stores no answers"
_TOOLS = "use tools, with a model and version that support them"

# Refused, with what to do instead, unless the value asks for nothing.
REFUSED = {
    # OpenAI
    "audio": "it produces text only",
    "background": "it stores no answers; wait for the answer, or stream it",
    "best_of": "ask for n choices and pick one",
    "conversation": "it stores no conversations; send all items as input",
    "function_call": _TOOLS,
    "functions": _TOOLS,
    "modalities": "it produces text only",
    "max_tool_calls": "it runs no tools; the client counts its calls",
    "moderation": "it has no moderation model",
    "previous_response_id": "it stores no answers; send all items as input",
    "service_tier": "it has one tier",
    "store": _STORE,
    "suffix": "it completes at the end only",
    "truncation": "shorten the input before sending it",
    "verbosity": "say in the prompt how long the answer should be",
    "web_search_options": "it has no Internet",
    # limits and switches of thinking
    "enable_thinking": 'send {"chat_template_kwargs": {"enable_thinking": …}}',
    "max_thinking_tokens": _THINKING,
    "reasoning": _THINKING,
    "reasoning_budget": _THINKING,
    "separate_reasoning": "reasoning has a field of its own; leave it out of the answer with include_reasoning",
    "think": 'send {"chat_template_kwargs": {"enable_thinking": …}}',
    "thinking": _THINKING,
    "thinking_budget": _THINKING,
    "thinking_budget_tokens": _THINKING,
    # vLLM
    "allowed_token_ids": "raise or lower tokens with logit_bias",
    "bad_words": "lower tokens with logit_bias",
    "chat_template": "the template is the model's own",
    "documents": "put documents into the messages",
    "ec_transfer_params": "its cache is not shared between machines",
    "embed_dtype": "embeddings are float32",
    "endianness": "embeddings are little-endian",
    "guided_whitespace_pattern": "it writes JSON on one line",
    "kv_transfer_params": "its cache is not shared between machines",
    "length_penalty": "it is for beam search, which this server does not have",
    "logprob_token_ids": "use top_logprobs",
    "media_io_kwargs": "it takes text only",
    "mm_processor_kwargs": "it takes text only",
    "prompt_embeds": "it takes text or token ids",
    "repetition_detection": "use repetition_penalty or frequency_penalty",
    "request_id": "send the header X-Request-Id",
    "return_prompt_text": "use return_token_ids and /detokenize",
    "return_tokens_as_token_ids": "use return_token_ids",
    "routed_experts_prompt_start": "it does not report experts",
    "truncate_prompt_tokens": "shorten the prompt before sending it",
    "use_beam_search": "it samples",
    "vllm_xargs": "it loads no extensions",
    "watermarking": "it does not mark its output",
    # other servers
    "custom_logit_processor": "it runs no code from a request",
    "ebnf": _CONSTRAINT,
    "extra_body": "send its fields at the top level of the request",
    "format": "send response_format",
    "grammar": _CONSTRAINT,
    "json_schema": "send response_format",
    "lora_path": "it has no adapters",
    "max_new_tokens": "send max_tokens",
    "n_predict": "send max_tokens",
    "options": "send the options as fields of the request",
    "regex": _CONSTRAINT,
}

# Values of refused fields that ask for nothing. Null always does.
_NOTHING: tuple[Any, ...] = (False, "", [], {})
_ALSO_NOTHING: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "function_call": ("none",),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "routed_experts_prompt_start": (0,),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "thinking_budget": (-1,),
    "verbosity": ("medium",),
}
# Here false switches off what is otherwise on, so only these values ask for nothing.
_SWITCHES: dict[str, tuple[Any, ...]] = {"enable_thinking": (), "separate_reasoning": (True,), "think": ()}

# vLLM's fields of structured_outputs: those without effect here, and those that are refused.
_STRUCTURED_HARMLESS = ("_backend", "_backend_was_auto", "disable_any_whitespace", "disable_fallback")
_STRUCTURED_REFUSED = {
    "disable_additional_properties": "write additionalProperties into the schema",
    "structural_tag": "send tools with strict, or a grammar",
    "whitespace_pattern": REFUSED["guided_whitespace_pattern"],
}

_IN_JSON_SCHEMA = ("name", "description", "schema", "strict")

# What a field of one endpoint is called at another.
_COUNTERPARTS = (("messages", "prompt", "input"), ("max_tokens", "max_completion_tokens", "max_output_tokens"),
                 ("response_format", "text"), ("reasoning_effort", "reasoning"))

# Of a message, these would change the prompt; what else a message carries (ids, annotations) does not.
NOT_IN_MESSAGES = {
    "audio": "messages are text",
    "function_call": "use tool_calls",
    "partial": "send continue_final_message",
    "prefix": "send continue_final_message",
}

_DECLARED: dict[type, frozenset[str]] = {
    kind: frozenset(field.encode_name for field in msgspec.structs.fields(kind))
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest,
                 StreamOptions, ResponseFormat, StructuredOutputs, TextConfig, ReasoningConfig)
}
_NESTED = {"stream_options": StreamOptions, "response_format": ResponseFormat, "text": TextConfig,
           "reasoning": ReasoningConfig}
_ANSWERING = (ChatRequest, CompletionRequest, ResponsesRequest, EmbeddingRequest)
_OF_A_GENERATION = _DECLARED[ChatRequest] | _DECLARED[CompletionRequest]


def check_fields(body: dict[str, Any], kind: type, *, refuse_unknown: bool = True) -> None:
    """Raises ApiError 400 naming the first field of `body` that asks for something and would be dropped.

    With `refuse_unknown` False, fields that nobody knows pass; those that are known to matter never do.
    """
    declared = _DECLARED[kind]
    for name, value in body.items():
        if name in declared or value is None or name in HARMLESS:
            continue
        if name in REFUSED:
            if not _asks_for_nothing(name, value):
                raise invalid(f"{name} is not supported by this server: {REFUSED[name]}.", name)
        elif name in _OF_A_GENERATION:
            # Counting the tokens of a whole request is what /tokenize is for: sampling does not change them.
            if kind in _ANSWERING and not _asks_for_nothing(name, value):
                raise invalid(f"{name} is not a field of this endpoint{_nearest(name, declared)}", name,
                              "unknown_parameter")
        elif refuse_unknown:
            raise _unknown(name, "", declared)
    for field, inner in _NESTED.items():
        if field in declared and isinstance(inside := body.get(field), dict):
            _check_nested(field, inside, _DECLARED[inner], refuse_unknown)
    if kind in _ANSWERING and isinstance(asked := body.get("structured_outputs"), dict):
        _check_structured(asked, refuse_unknown)
    _check_messages(body.get("messages"))


def _check_nested(field: str, inside: dict[str, Any], declared: frozenset[str], refuse_unknown: bool) -> None:
    for name, value in inside.items():
        if name in declared or _asks_for_nothing(name, value):
            continue
        if field == "response_format" and name in _IN_JSON_SCHEMA:  # some servers look for them here
            raise invalid(f'response_format.{name} belongs into {{"type": "json_schema", "json_schema": {{"{name}": '
                          '…}}.', f"response_format.{name}")
        if refuse_unknown:
            raise _unknown(name, f"{field}.", declared)


def _check_structured(asked: dict[str, Any], refuse_unknown: bool) -> None:
    """vLLM's clients send every field of theirs, most of them null or false."""
    declared = _DECLARED[StructuredOutputs]
    for name, value in asked.items():
        if name in declared or name in _STRUCTURED_HARMLESS or value is None:
            continue
        if name in _STRUCTURED_REFUSED:
            if not _asks_for_nothing(name, value):
                raise invalid(f"structured_outputs.{name} is not supported by this server: "
                              f"{_STRUCTURED_REFUSED[name]}.", f"structured_outputs.{name}")
        elif refuse_unknown:
            raise _unknown(name, "structured_outputs.", declared)


def _check_messages(messages: Any) -> None:
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in NOT_IN_MESSAGES if isinstance(message, dict) else ():
            if message.get(name) is not None and message[name] is not False:
                raise invalid(f"messages.{i}.{name} is not supported by this server: {NOT_IN_MESSAGES[name]}.",
                              f"messages.{i}.{name}")


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Compares types too: Python's 0 and 1 equal false and true."""
    values = _SWITCHES.get(name, (*_NOTHING, *_ALSO_NOTHING.get(name, ())))
    return value is None or any(type(value) is type(nothing) and value == nothing for nothing in values)


def _unknown(name: str, where: str, known: Iterable[str]) -> ApiError:
    param = f"{where}{shortened(name, 64)}"
    return invalid(f"{param} is not a field that this server knows{_nearest(name, known)}", param, "unknown_parameter")


def _nearest(name: str, known: Iterable[str]) -> str:
    """The end of the sentence that refuses `name`: the field that does the same, or is spelt almost the same."""
    same = [other for group in _COUNTERPARTS if name in group for other in group if other in known]
    near = same or (difflib.get_close_matches(name, known, n=1, cutoff=0.7) if len(name) <= 64 else [])
    return f"; did you mean {near[0]}?" if near else "."
