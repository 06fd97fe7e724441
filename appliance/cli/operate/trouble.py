"""`atoll trouble`: what is wrong now, why, and what to do."""

from collections.abc import Iterator
from typing import Annotated

import typer

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, say, say_rows, spoken, told
from appliance.service.trouble import Trouble, troubles
from installer.base.errors import ExitCode
from installer.base.i18n import t
from installer.support.logs import printable

_HELP = """Show what is wrong now: what happened, the likely cause, what was not changed, and what to do.

Changes nothing. The screens of `atoll` show the same.
"""
_EXIT_CODES = "Exit codes: 0 nothing stops the service, 40 something does."


def register(app: typer.Typer) -> None:
    """Add the command to the `atoll` command tree."""
    app.command(name="trouble", help=_HELP, epilog=examples("atoll trouble", "atoll trouble --json", then=_EXIT_CODES))(
        command
    )


def command(
    prefix: Prefix = None,
    short: Annotated[bool, typer.Option("--short", help="One line for each.")] = False,
    as_json: Json = False,
) -> None:
    with told(as_json):
        found = troubles(layout_for(prefix))
    if as_json:
        print_json({"troubles": [each.to_json() for each in found]})
    elif not found:
        say(t("Nothing is wrong."))
    elif short:
        say_rows((each.id, each.happened) for each in found)
    else:
        for number, each in enumerate(found):
            if number:
                say()
            say(t("{number} of {count}: {title}", number=number + 1, count=len(found), title=each.title))
            say_rows(((label, printable(spoken(text))) for label, text in rows(each)), indent=2)
    if any(each.stops for each in found):
        raise typer.Exit(ExitCode.UNHEALTHY)


def rows(trouble: Trouble) -> Iterator[tuple[str, str]]:
    yield t("What happened"), trouble.happened
    if trouble.progress is not None:
        yield t("Progress"), f"{trouble.progress * 100:.0f} %"
    if trouble.cause:
        yield t("Likely cause"), trouble.cause
    yield t("Not changed"), trouble.unchanged
    for number, action in enumerate(trouble.actions):
        yield t("What to do") if not number else "", t("{number}  {text}", number=number + 1, text=action.text)
        if action.command:
            yield "", f"   {action.command}"
    for number, line in enumerate(trouble.evidence):
        yield t("Evidence") if not number else "", line
