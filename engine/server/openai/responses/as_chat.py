"""Converts a request of `/v1/responses` to a chat: its items become messages. Nothing is stored, so a request carries
the whole conversation."""

from typing import Any

import msgspec

from engine.errors import InvalidRequestError
from engine.server.openai.request.responses_schema import ResponsesChat, ResponsesRequest
from engine.server.openai.request.schema import Message, ResponseFormat

_INCLUDES = ("reasoning.encrypted_content",)  # accepted: the answer contains the reasoning in plain text
_SAME = ("model", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
         "frequency_penalty", "repetition_penalty", "seed", "stop", "chat_template_kwargs", "thinking_token_budget",
         "priority", "cache_salt")


def as_chat(request: ResponsesRequest) -> ResponsesChat:
    """The request as a chat. Raises InvalidRequestError, which names the field or item that cannot be used."""
    for name in request.include or ():
        if name not in _INCLUDES:
            raise InvalidRequestError("include: this server adds nothing to an answer.", "include")
    return ResponsesChat(
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        tools=[_tool(tool, i) for i, tool in enumerate(request.tools)] if request.tools else None,
        tool_choice=_choice(request.tool_choice),
        response_format=_format(request),
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        origin=request,
        **{name: getattr(request, name) for name in _SAME},
    )


def _messages(request: ResponsesRequest) -> list[Message]:
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    if request.instructions:
        items = [{"role": "system", "content": request.instructions}, *items]
    messages: list[Message] = []
    for i, item in enumerate(items, -1 if request.instructions else 0):
        _add(messages, item, f"input.{i}")
    if not messages:
        raise InvalidRequestError("input must not be empty.", "input")
    return messages


def _add(messages: list[Message], item: dict[str, Any], where: str) -> None:
    """Append an item. The items of one turn of the model (reasoning, text, calls) become one message, and so do leading
    system items."""
    kind = item.get("type", "message")
    last = messages[-1] if messages else None
    said = last if last is not None and last.role == "assistant" else None
    if kind == "message":
        content = item.get("content")
        if content is None:
            raise InvalidRequestError(f"{where}.content is required.", f"{where}.content")
        message = _converted({"role": item.get("role"), "content": content}, where)
        if said is not None and message.role == "assistant" and said.content is None and not said.tool_calls:
            said.content = message.content
        elif (last is not None and len(messages) == 1 and last.role == "system" and isinstance(last.content, str)
              and message.role in ("system", "developer") and isinstance(content, str)):
            last.content = f"{last.content}\n\n{content}"  # some templates accept only one
        else:
            messages.append(message)
        return
    if kind == "function_call_output":
        output = item.get("output")
        messages.append(_converted({"role": "tool", "content": output, "tool_call_id": item.get("call_id")}, where))
        return
    if kind not in ("function_call", "reasoning"):
        raise InvalidRequestError(f"{where}: items of type {str(kind)[:40]!r} are not supported by this server.",
                                  f"{where}.type")
    if said is None:
        said = Message("assistant")
        messages.append(said)
    if kind == "reasoning":
        texts = [part.get("text") for name in ("content", "summary") for part in item.get(name) or ()
                 if isinstance(part, dict)]
        said.reasoning = "\n".join(text for text in texts if isinstance(text, str)) or None
    else:
        call = {"id": item.get("call_id"), "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        said.tool_calls = [*(said.tool_calls or []), call]


def _converted(message: dict[str, Any], where: str) -> Message:
    try:
        return msgspec.convert(message, Message)
    except msgspec.ValidationError:
        raise InvalidRequestError(f"{where} is no message with a role and content.", where) from None


def _tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequestError(f"tools.{i}: this server has no tools of its own; send functions.", f"tools.{i}.type")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    given = request.text.format if request.text is not None else None
    if given is None:
        return None
    schema = {name: given[name] for name in ("name", "description", "schema", "strict") if name in given}
    try:
        return msgspec.convert({"type": given.get("type"), "json_schema": schema or None}, ResponseFormat)
    except msgspec.ValidationError:
        raise InvalidRequestError('text.format.type must be "text", "json_object" or "json_schema".',
                                  "text.format.type") from None
