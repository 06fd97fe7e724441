"""`atoll` without arguments, and `atoll setup`: open the screens, or say why this terminal cannot show them."""

import os
import sys
from typing import Annotated

import typer

from appliance.cli.common import Prefix, examples, layout_for, say, told
from appliance.service.words import language_of, t


def register(app: typer.Typer) -> None:
    @app.command(epilog=examples("atoll setup", "atoll setup --ascii --prefix ~/atoll"))
    def setup(
        prefix: Prefix = None,
        ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII in 16 colours only.")] = False,
    ) -> None:
        """Open the checklist as screens. Work that was begun there goes on without the terminal."""
        if not _fits():
            say(t("The screens need a terminal that can move its cursor (TERM is '{term}'). Use the command line: "
                  "atoll checklist", term=os.environ.get("TERM", "")), err=True)  # fmt: skip
            raise typer.Exit(2)
        with told(False):
            from tui.app import Wizard
            from tui.look import plain_terminal

            wizard = Wizard(layout_for(prefix), language_of(), plain=ascii_only or plain_terminal())
            wizard.run(mouse=not wizard.plain)
            if wizard.parting:
                say(wizard.parting)
            if wizard.return_code:
                raise typer.Exit(wizard.return_code)


def _fits() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
