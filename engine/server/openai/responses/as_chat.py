"""Converts a request of `/v1/responses` to a chat: its items become messages. Nothing is stored, so a request carries
the whole conversation."""

import re
from typing import Any

import msgspec

from engine.errors import InvalidRequestError
from engine.server.http.errors import from_validation
from engine.server.openai.chat.tool_use import CHOICES
from engine.server.openai.request.responses_schema import ResponsesChat, ResponsesRequest
from engine.server.openai.request.schema import Message, ResponseFormat
from engine.text.conversation import parsed_arguments

_INCLUDES = ("reasoning.encrypted_content",)  # accepted: the answer contains the reasoning in plain text
_SAME = ("model", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
         "frequency_penalty", "repetition_penalty", "seed", "stop", "chat_template_kwargs", "thinking_token_budget",
         "priority", "cache_salt")

# Fields of a chat under the names that they have here; the longer names first.
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
          "response_format.json_schema": "text.format", "response_format": "text.format",
          "tool_choice.allowed_tools": "tool_choice"}


def as_chat(request: ResponsesRequest) -> ResponsesChat:
    """The request as a chat. Raises InvalidRequestError, which names the field or item that cannot be used."""
    for name in request.include or ():
        if name not in _INCLUDES:
            raise InvalidRequestError(f"include: {name[:60]!r} cannot be added to an answer by this server; leave it "
                                      "out.", "include")
    messages, places = _messages(request)
    return ResponsesChat(
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        tools=[_tool(tool, i) for i, tool in enumerate(request.tools)] if request.tools else None,
        tool_choice=_choice(request.tool_choice),
        response_format=_format(request),
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        origin=request,
        places=places,
        **{name: getattr(request, name) for name in _SAME},
    )


def _messages(request: ResponsesRequest) -> tuple[list[Message], list[str]]:
    """The messages, and the field or item that each comes from."""
    if isinstance(request.input, str):
        items = [("input", {"role": "user", "content": request.input})]
    else:
        items = [(f"input.{i}", item) for i, item in enumerate(request.input)]
    if request.instructions:
        items.insert(0, ("instructions", {"role": "system", "content": request.instructions}))
    messages: list[Message] = []
    places: list[str] = []
    for where, item in items:
        _add(messages, item, where)
        places += [where] * (len(messages) - len(places))
        if item.get("type", "message") == "message":
            places[-1] = where  # the content comes from here, even if reasoning came before it
    if not messages:
        raise InvalidRequestError("input must not be empty.", "input")
    return messages, places


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
        if not isinstance(output, str | list):
            raise InvalidRequestError(f"{where}.output must be a string or a list of content parts.", f"{where}.output")
        call_id = item.get("call_id")
        if call_id is not None and not isinstance(call_id, str):
            raise InvalidRequestError(f"{where}.call_id must be a string.", f"{where}.call_id")
        messages.append(_converted({"role": "tool", "content": output, "tool_call_id": call_id}, where))
        return
    if kind not in ("function_call", "reasoning"):
        raise InvalidRequestError(f"{where}: items of type {str(kind)[:40]!r} are not supported by this server.",
                                  f"{where}.type")
    reasoning = ""
    if kind == "reasoning":
        texts = [part.get("text") for name in ("content", "summary") for part in item.get(name) or ()
                 if isinstance(part, dict)]
        reasoning = "\n".join(text for text in texts if isinstance(text, str))
        if not reasoning:
            return  # it holds at most what only another server can read
    if said is None:
        said = Message("assistant")
        messages.append(said)
    if kind == "reasoning":
        said.reasoning = reasoning
    else:
        if not isinstance(item.get("name"), str):
            raise InvalidRequestError(f"{where}.name is required.", f"{where}.name")
        parsed_arguments(item.get("arguments"), f"{where}.arguments")
        call = {"id": item.get("call_id"), "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        said.tool_calls = [*(said.tool_calls or []), call]


def _converted(message: dict[str, Any], where: str) -> Message:
    try:
        return msgspec.convert({name: value for name, value in message.items() if value is not None}, Message)
    except msgspec.ValidationError as error:
        detail = from_validation(error, Message).detail
        raise InvalidRequestError(f"{where}.{detail.message}", f"{where}.{detail.param}") from None


def _tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequestError(f"tools.{i}: this server has no tools of its own; send functions.", f"tools.{i}.type")
    if not isinstance(tool.get("name"), str):
        raise InvalidRequestError(f'tools.{i} must be {{"type": "function", "name": …}}.', f"tools.{i}.name")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice(choice: Any) -> Any:
    if choice is None or choice in CHOICES:
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_allowed_tool(tool, i) for i, tool in enumerate(tools)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise InvalidRequestError(
        'tool_choice must be "none", "auto", "required", {"type": "function", "name": …} or '
        '{"type": "allowed_tools", "mode": …, "tools": […]}.', "tool_choice")


def _allowed_tool(tool: Any, i: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise InvalidRequestError(f'tool_choice.tools.{i} must be {{"type": "function", "name": …}}.',
                                  f"tool_choice.tools.{i}")
    return {"type": "function", "function": {"name": tool["name"]}}


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


def renamed(body: ResponsesChat, error: InvalidRequestError) -> InvalidRequestError:
    """An error of the chat, in the names of the request that the chat was made from."""
    if not error.param:
        return error
    param = ours = error.param
    if message := re.match(r"messages\.(\d+)", param):
        place = body.places[int(message[1])]
        ours = place + param[message.end():]
        if body.messages[int(message[1])].role == "tool":
            ours = ours.replace(f"{place}.content", f"{place}.output")
    elif param.startswith("tools."):
        ours = param.replace(".function", "", 1)
    else:
        for theirs, name in _NAMES.items():
            if param == theirs or param.startswith(f"{theirs}."):
                ours = name + param[len(theirs):]
                break
    said = str(error)
    if param != "messages":  # a word of plain sentences, too
        said = said.replace(param.removesuffix(".type"), ours.removesuffix(".type"))
    return InvalidRequestError(said, ours, error.code)
