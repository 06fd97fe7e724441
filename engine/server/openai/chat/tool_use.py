"""What a request lets the model do with tools: `tools`, `tool_choice`, `parallel_tool_calls`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.errors import InvalidRequestError
from engine.server.http.limits import Limits
from engine.server.openai.serving import ServedModel
from engine.text.parsers.calls import Schema

_NAME = re.compile(r"[\w.:/-]{1,128}")
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`schemas`: the parameters of each function that may be called. `forced`: "required", or "named" with a single
    schema; "" leaves it to the model. `limited`: `tool_choice` allows only some of the tools, so the answer needs a
    grammar even if nothing is forced: the prompt shows all of them."""

    calls: bool = False
    forced: str = ""
    limited: bool = False
    parallel: bool = True
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()

    def finish_reason(self, reason: str, called: bool) -> str:
        """OpenAI's finish reason: "tool_calls" after a call, unless the request named that very function."""
        return "tool_calls" if called and reason == "stop" and self.forced != "named" else reason


def tool_use(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool | None,
             model: ServedModel) -> ToolUse:
    """The tool use of a request whose tools have been checked (`check_tools`). Raises InvalidRequestError."""
    if not tools or choice == "none":
        return ToolUse()
    if model.output.tools is None:
        raise InvalidRequestError(
            "tools: no parser of tool calls fits this model. Its operator can name one with --tool-call-parser; "
            'tool_choice "none" shows the tools to the model without calling them.', "tools")
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    forced, limited = "", False
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        # The prompt keeps all tools, as OpenAI documents it: requests that allow different ones share cached prefixes.
        allowed = choice["allowed_tools"]
        names = {tool["function"]["name"] for tool in allowed["tools"]}
        functions = {name: function for name, function in functions.items() if name in names}
        limited, choice = True, allowed["mode"]
    if isinstance(choice, dict):
        forced, name = "named", choice["function"]["name"]
        if name not in functions:
            raise InvalidRequestError("tool_choice names a function that is not among tools.", "tool_choice")
        functions = {name: functions[name]}
    elif choice == "required":
        forced = "required"
    elif not model.auto_tools:
        raise InvalidRequestError(
            'tool_choice "auto" is switched off for this model (--no-enable-auto-tool-choice); send another.',
            "tool_choice")
    return ToolUse(
        True, forced, limited, parallel is not False and forced != "named",
        {name: function.get("parameters") or {} for name, function in functions.items()},
        frozenset(name for name, function in functions.items() if function.get("strict")),
    )


def check_tools(tools: list[dict[str, Any]] | None, choice: Any, limits: Limits) -> None:
    """Check the form of both fields. Raises InvalidRequestError."""
    if len(tools or ()) > limits.max_tools:
        raise InvalidRequestError(f"At most {limits.max_tools} tools are allowed.", "tools")
    if tools and len(msgspec.json.encode(tools)) > limits.max_tool_characters:
        raise InvalidRequestError(f"The tools may have {limits.max_tool_characters} characters in all, as JSON.",
                                  "tools")
    names: set[str] = set()
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(name, str):
            raise InvalidRequestError(f'tools.{i} must be {{"type": "function", "function": {{"name": …}}}}.',
                                      f"tools.{i}")
        if not _NAME.fullmatch(name):
            raise InvalidRequestError("The name of a function may have 128 letters, digits and . : / _ -.",
                                      f"tools.{i}.function.name")
        if name in names:
            raise InvalidRequestError("Two functions have the same name.", f"tools.{i}.function.name")
        names.add(name)
        for part, kind, what in (("parameters", dict, "an object"), ("description", str, "a string"),
                                 ("strict", bool, "true or false")):
            if function.get(part) is not None and not isinstance(function[part], kind):
                raise InvalidRequestError(f"tools.{i}.function.{part} must be {what}.", f"tools.{i}.function.{part}")
    _check_choice(choice, names)


def _check_choice(choice: Any, names: set[str]) -> None:
    allowed = None
    if choice is None or choice in CHOICES:
        asks = "asks for a call" if choice == "required" else ""
    elif _names_function(choice):
        asks = "asks for a call"
    else:
        allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
        if not isinstance(allowed, dict) or choice.get("type") != "allowed_tools":
            raise InvalidRequestError(
                'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": …}} or '
                '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}.', "tool_choice")
        asks = "allows only some tools"
    if asks and not names:
        raise InvalidRequestError(f"tool_choice {asks}, but there are no tools.", "tool_choice")
    if allowed is not None:
        _check_allowed(allowed, names)


def _check_allowed(allowed: dict[str, Any], names: set[str]) -> None:
    field = "tool_choice.allowed_tools"
    if allowed.get("mode") not in ("auto", "required"):
        raise InvalidRequestError(f'{field}.mode must be "auto" or "required".', f"{field}.mode")
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError(f"{field}.tools must list at least one function that may be called.",
                                  f"{field}.tools")
    for i, tool in enumerate(tools):
        if not _names_function(tool):
            raise InvalidRequestError(
                f'{field}.tools.{i} must be {{"type": "function", "function": {{"name": …}}}}.', f"{field}.tools.{i}")
        if tool["function"]["name"] not in names:
            raise InvalidRequestError(f"{field}.tools.{i} names a function that is not among tools.",
                                      f"{field}.tools.{i}")


def _names_function(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
