"""The fields of `POST /v1/responses`. Each corresponds to a field of a chat request, or is refused by name."""

from typing import Any, Literal

import msgspec

from engine.server.openai.request.schema import ChatRequest, StreamOptions


class TextConfig(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(msgspec.Struct):
    """`summary` is accepted: the reasoning itself is in the answer."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


class ResponsesChat(ChatRequest, kw_only=True):
    """The same request as a chat. `places`: the field or item that each message comes from."""

    origin: ResponsesRequest
    places: list[str]


class ResponseObject(msgspec.Struct):
    """An answer. Lists and objects of the request are repeated unchanged."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: dict[str, Any] | None
    metadata: dict[str, str]


class ResponseEvent(msgspec.Struct):
    """One event of a stream; its type determines the further fields, as in OpenAI's API."""

    type: str
    sequence_number: int
