"""`--json`: one object on stdout, in success and in failure, with the same exit codes as the text form."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from appliance.cli.common import print_json


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
        print_json({"ok": False, "error": {"code": code, "message": message, "hint": hint}})
        raise typer.Exit(int(code)) from None
