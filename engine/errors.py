"""Errors that a person may see. Each says what happened; `hint` says what to do about it.

Their `str()` is English, for logs and API answers. Errors at start-up are messages (engine.message), which keep their
id and values, so that a front end in another language can translate them where they are shown (`retelling`, `told`).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Ids of errors that end an engine. A log record has one in its field `error_id`, so that programs need not parse the
# English message.
OUT_OF_MEMORY = "out-of-memory"
KILLED = "killed"        # by SIGKILL, most often from the kernel because the machine ran out of memory
SETTINGS = "settings"
MODEL = "model"

Flag = tuple[str, str, str]  # name, metavar, help

_retell: Callable[[str], str] = str
_front_end_flags: Sequence[Flag] = ()


class AtollError(Exception):
    """Base of all errors that are shown to people (without a traceback)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class InvalidRequestError(AtollError):
    """A request that can never be served: its sender must change it (HTTP 400).

    `param` is the dotted path of the field, `code` OpenAI's machine-readable word (``context_length_exceeded``).
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ConfigError(AtollError):
    """A flag or setting that cannot be honoured; `flag` names it (``--max-model-len``)."""

    def __init__(self, message: str, flag: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint)
        self.flag = flag


class ModelError(AtollError):
    """A model directory that cannot be loaded: missing or corrupt file, tensor or config field."""


class OutOfMemoryPlanError(ConfigError):
    """The memory plan does not fit this device; the message carries the numbers and the flag to change."""


class EngineDeadError(AtollError):
    """The engine process is gone or has not become ready."""


class QuarantinedError(AtollError):
    """The engine process died twice while this very request ran."""


def error_id(error: BaseException) -> str:
    """The error's id, or "" if programs cannot act upon it."""
    torch = sys.modules.get("torch")
    if isinstance(error, OutOfMemoryPlanError | MemoryError) or (
        torch is not None and isinstance(error, torch.OutOfMemoryError)
    ):
        return OUT_OF_MEMORY
    return SETTINGS if isinstance(error, ConfigError) else MODEL if isinstance(error, ModelError) else ""


def log_fields(error: BaseException) -> dict[str, Any]:
    """`extra=` for the log record of an error: its id, where it has one."""
    return {"fields": {"error_id": found} if (found := error_id(error)) else {}}


@contextmanager
def retelling(retell: Callable[[str], str], *, flags: Sequence[Flag] = ()) -> Iterator[None]:
    """Inside this context, `told` and `complain` pass each message through `retell`, which translates it.

    `flags`: those that the front end handles itself; `--help` lists them, too.
    """
    global _retell, _front_end_flags
    before, (_retell, _front_end_flags) = (_retell, _front_end_flags), (retell, flags)
    try:
        yield
    finally:
        _retell, _front_end_flags = before


def front_end_flags() -> Sequence[Flag]:
    return _front_end_flags


def told(text: str) -> str:
    """`text` in the language of the person who started the program."""
    return _retell(text)


def complain(program: str, error: AtollError, *, logged: bool = False) -> None:
    """Tell the person who started `program` why it gives up, in one line on stderr.

    `logged`: the log says it already, so a line is printed only at a terminal, and only if it is in another language.
    """
    said = f"{told(error.message)} {told(error.hint)}".strip()
    if not logged or (said != str(error) and sys.stderr.isatty()):
        print(f"{program}: {said}", file=sys.stderr)
