"""What clients may send. Types are strict (neither "1" nor true is accepted for 1); `SamplingParams` checks ranges.

A field that is null counts as absent. Every field declared here has an effect; `refused_fields` decides about all
others.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Count = Annotated[int, Meta(ge=0)]
TokenIds = list[Count]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]

_ID = {"type": "integer", "minimum": 0}
_ITEM = {"anyOf": [{"type": "string"}, _ID, {"type": "array", "items": _ID, "minItems": 1}]}
Prompts = Annotated[
    str | Annotated[list[Any], Meta(extra_json_schema={"items": _ITEM, "minItems": 1})],
    Meta(description="A text, several texts, a text as token ids, or several of those."),
]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted; streams here are never padded


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's. One of them says what the answer must follow. `refused_fields` decides about all other fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Message(msgspec.Struct, omit_defaults=True):
    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    priority: Priority | None = None
    cache_salt: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: Prompts
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """`normalize` and `use_activation` are vLLM's older and newer name of one field."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either a prompt or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: TokenIds
    model: str | None = None
