"""`atoll` without arguments, and `atoll setup`: open the screens, or say why this terminal cannot show them."""

import contextlib
import os
from typing import Annotated

import typer

from appliance.cli.common import Prefix, examples, layout_for, say, told
from appliance.service.desk import Layout
from appliance.service.words import language_of
from tui.pauses import keep_short
from tui.terminal import has_colours, is_plain, why_not

ESCAPE_MS = "25"   # after which an Esc counts as a key
FRAMES = "120"     # a second, at most: what a key changes is drawn with the next one


def register(app: typer.Typer) -> None:
    @app.command(epilog=examples("atoll setup", "atoll setup --ascii --prefix ~/atoll"))
    def setup(
        prefix: Prefix = None,
        ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII in 16 colours only.")] = False,
    ) -> None:
        """Open the checklist as screens. Work that was started there continues without the terminal."""
        if said := why_not("atoll checklist"):
            say(said, err=True)
            raise typer.Exit(2)
        with told(False):
            open_screens(layout_for(prefix), ascii_only=ascii_only)


def open_screens(layout: Layout, *, ascii_only: bool = False, dashboard: bool = False) -> None:
    """Run the program until it is left, at the checklist or at the dashboard."""
    for size in ("COLUMNS", "LINES"):  # a profile may export another terminal's size, and the screen would be cut to it
        os.environ.pop(size, None)
    plain = ascii_only or is_plain()
    if not plain:  # on a serial line the bytes of one key may come slowly: keep the default delay
        os.environ.setdefault("ESCDELAY", ESCAPE_MS)
        os.environ.setdefault("TEXTUAL_FPS", FRAMES)
    from tui.app import Wizard

    keep_short()
    language = "en" if plain else language_of()  # ASCII has no Hangul
    wizard = Wizard(layout, language, plain=plain, colours=not plain or has_colours(), dashboard=dashboard)
    wizard.run(mouse=not wizard.plain)
    if wizard.parting:
        with contextlib.suppress(OSError):  # the terminal may be gone
            say(wizard.parting)
    if wizard.return_code:
        raise typer.Exit(wizard.return_code)
