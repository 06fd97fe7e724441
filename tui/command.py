"""`atoll` without arguments, and `atoll setup`: open the screens, or say why this terminal cannot show them."""

import os
import sys
from typing import Annotated

import typer

from appliance.cli.common import Prefix, examples, layout_for, say, told
from appliance.service.desk import Layout
from appliance.service.words import language_of, t


def register(app: typer.Typer) -> None:
    @app.command(epilog=examples("atoll setup", "atoll setup --ascii --prefix ~/atoll"))
    def setup(
        prefix: Prefix = None,
        ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII in 16 colours only.")] = False,
    ) -> None:
        """Open the checklist as screens. Work that was begun there goes on without the terminal."""
        if not can_show():
            say(t("The screens need a terminal that can move its cursor (TERM is '{term}'). Use the command line: "
                  "atoll checklist", term=os.environ.get("TERM", "")), err=True)  # fmt: skip
            raise typer.Exit(2)
        with told(False):
            open_screens(layout_for(prefix), ascii_only=ascii_only)


def open_screens(layout: Layout, *, ascii_only: bool = False, dashboard: bool = False) -> None:
    """Run the program until it is left, at the checklist or at the dashboard."""
    from tui.app import Wizard
    from tui.look import plain_terminal

    wizard = Wizard(layout, language_of(), plain=ascii_only or plain_terminal(), dashboard=dashboard)
    wizard.run(mouse=not wizard.plain)
    if wizard.parting:
        say(wizard.parting)
    if wizard.return_code:
        raise typer.Exit(wizard.return_code)


def can_show() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
