"""`--json`: one object on stdout, in success and in failure, with the same exit codes as the text form."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer


def emit(value: dict[str, Any]) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


@contextmanager
def json_errors(enabled: bool) -> Iterator[None]:
    """Turn an error meant for a person into ``{"ok": false, "error": {code, message, hint}}`` when `enabled`.

    Otherwise it passes through to the command tree, which prints it as text.
    """
    try:
        yield
    except Exception as e:
        message, hint, code = (getattr(e, a, None) for a in ("message", "hint", "exit_code"))
        if not enabled or message is None or code is None:
            raise
        emit({"ok": False, "error": {"code": code, "message": message, "hint": hint}})
        raise typer.Exit(int(code)) from None
