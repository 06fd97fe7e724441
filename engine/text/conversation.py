"""Converts messages as clients send them to the one form that chat templates are written for.

    content    parts or null  ->  a string          tool_calls[].function.arguments   JSON text  ->  a mapping
    role       developer      ->  system            reasoning | reasoning_content     either     ->  both
"""

import json
from typing import Any

from engine.errors import InvalidRequestError
from engine.text.template import checked_kwargs
from engine.text.tokenizer import TextTokenizer
from engine.text.tool_prompt import with_tool_prompt

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "function": "tool"}
TEXT_PARTS = ("text", "input_text", "output_text")


def encode_chat(
    tokenizer: TextTokenizer,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Prompt ids of a conversation from outside. CPU-bound: call it off the event loop.

    Raises InvalidRequestError naming the message or part that cannot be used.
    """
    if tokenizer.template is None:
        raise InvalidRequestError(
            "This model has no chat template; use /v1/completions, or serve an instruction-tuned model.", "messages"
        )
    normalised = [_normalised(message, f"messages.{i}", tokenizer) for i, message in enumerate(messages)]
    shown = tokenizer.mark_untrusted(tools) if tools else None
    if "tools" not in tokenizer.template.variables:
        normalised, shown = with_tool_prompt(normalised, shown), None
    rendered = tokenizer.template.render(
        normalised,
        tools=shown,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        kwargs=tokenizer.mark_untrusted(checked_kwargs(kwargs)),
    )
    return tokenizer.encode_rendered(rendered)


def _normalised(message: dict[str, Any], where: str, tokenizer: TextTokenizer) -> dict[str, Any]:
    role = ROLES.get(message.get("role", ""))
    if role is None:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(ROLES)}.", f"{where}.role")
    result: dict[str, Any] = {"content": content_text(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            result[name] = message[name]
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is not None:
            result["reasoning_content"] = result["reasoning"] = reasoning
        if calls := message.get("tool_calls"):
            result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)]
        elif not result["content"] and message.get("refusal"):
            result["content"] = message["refusal"]
    return {"role": role} | tokenizer.mark_untrusted(result)


def content_text(content: str | list[Any] | None, where: str) -> str:
    """The text of a message; several text parts are joined by newlines. Raises InvalidRequestError for other media."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise InvalidRequestError(f"{where}.{i} must be a content part (an object).", f"{where}.{i}")
        kind = part.get("type", "text")
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if kind not in (*TEXT_PARTS, "refusal"):
            raise InvalidRequestError(
                f"{where}.{i}: this model takes text only, not parts of type {str(kind)[:40]!r}.", f"{where}.{i}.type"
            )
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}.{i}.text must be a string.", f"{where}.{i}.text")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool call with its arguments parsed: clients send them as a JSON string, but templates iterate over them."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}.function must be an object with a name.", f"{where}.function")
    arguments = parsed_arguments(function.get("arguments"), f"{where}.function.arguments")
    parsed = {"name": function["name"], "arguments": arguments}
    return {"type": "function", "function": parsed} | ({"id": call["id"]} if call.get("id") is not None else {})


def parsed_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """The arguments of a call, which clients send as JSON text. Raises InvalidRequestError naming `where`."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # refused below, with what is not an object
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{where} must be the JSON text of an object.", where)
    return arguments
