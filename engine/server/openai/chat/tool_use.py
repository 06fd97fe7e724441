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
    schema; "" leaves it to the model."""

    calls: bool = False
    forced: str = ""
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
    forced = ""
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
        True, forced, parallel is not False and forced != "named",
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
    _check_choice(choice, bool(tools))


def _check_choice(choice: Any, any_tools: bool) -> None:
    if choice is None or choice in CHOICES:
        named = choice == "required"
    else:
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named:
            raise InvalidRequestError('tool_choice must be "none", "auto", "required" or {"type": "function", '
                                      '"function": {"name": …}}.', "tool_choice")
    if named and not any_tools:
        raise InvalidRequestError("tool_choice asks for a call, but there are no tools.", "tool_choice")
