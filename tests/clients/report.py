"""What every client's script shares: numbered checks, and where the server is. Standard library only."""

import os
import sys
import traceback
from collections.abc import Callable

URL = os.environ["ATOLL_URL"]              # without /v1
KEY = os.environ["OPENAI_API_KEY"]
MODEL = os.environ["ATOLL_MODEL"]
TOOLS = os.environ.get("ATOLL_TOOLS") == "1"  # the server can force a tool call, so that a small model makes one

QUESTION = "What is the capital of France?"
WEATHER = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}

_checks: list[tuple[Callable[[], None], bool]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    _checks.append((function, False))
    return function


def with_tools(function: Callable[[], None]) -> Callable[[], None]:
    """A check that needs a forced tool call."""
    _checks.append((function, True))
    return function


def main() -> int:
    passed = failed = skipped = 0
    for function, tools in _checks:
        name = function.__name__.replace("_", " ")
        if tools and not TOOLS:
            skipped += 1
            print(f"  -  {name} (this server does not force tool calls)")
            continue
        try:
            function()
        except BaseException:
            failed += 1
            print(f"  FAILED  {name}")
            traceback.print_exc(file=sys.stdout)
        else:
            passed += 1
            print(f"  ok  {name}")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0
