"""`atoll support-bundle`: one file for support."""

from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, say, spoken, told
from appliance.engines import engine_facts
from appliance.service.words import human_bytes
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.release import release
from installer.support import archive
from installer.support.archive import Taken
from installer.support.items import Item

_HELP = """Collect what is needed to find a fault into one archive that only you can read.

Only items on a list are included (--list shows it): no keys, tokens, prompts or answers. MANIFEST.json in the archive
says what each item is for. Look through the archive before you give it away; nothing is sent anywhere.
"""
_EXIT_CODES = "Exit codes: 0 written, 2 usage or nothing installed, 30 it cannot be written."


def register(app: typer.Typer) -> None:
    """Add the command to the `atoll` command tree."""
    lines = (
        "atoll support-bundle", "atoll support-bundle --list",
        "atoll support-bundle --redact-addresses --since '2 hours ago' --out /media/usb/support.tar.gz",
    )
    app.command(name="support-bundle", help=_HELP, epilog=examples(*lines, then=_EXIT_CODES))(command)


def command(
    prefix: Prefix = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write it.", show_default="atoll-support-HOST-TIME.tar.gz, here"),
    ] = None,
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back logs go.")] = archive.SINCE,
    redact_addresses: Annotated[
        bool,
        typer.Option("--redact-addresses", help="Replace IP addresses and this machine's names with placeholders."),
    ] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Show what would be taken and why; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    with told(as_json):
        layout = layout_for(prefix)
        extra = [Item("memory-plan.txt", t("how the engines divide their memory"), lambda: _plans(layout))]
        if list_only:
            _list(archive.planned(layout, extra), as_json)
            return
        said = (lambda taken: None) if as_json else _say
        target = (out or Path(archive.default_name())).absolute()
        made = archive.make(
            layout, target, extra=extra, since=since, redact_addresses=redact_addresses, said=said
        )
    if as_json:
        print_json(made.to_json())
        return
    say(t("\nWritten: {path}  ({bytes}, readable by you only)", path=made.path, bytes=human_bytes(made.bytes)))
    say(t("Look through it before you give it away: tar -tzf FILE lists it, MANIFEST.json explains it."))


def _list(items: list[Item], as_json: bool) -> None:
    if as_json:
        print_json({"members": [{"name": item.name, "why": item.why} for item in items]})
        return
    for item in items:
        typer.echo(f"{item.name:34} {spoken(item.why)}")


def _say(taken: Taken) -> None:
    what = human_bytes(taken.bytes)
    if taken.not_taken:
        what = t("not taken: {why}", why=taken.not_taken)
    elif taken.cut:
        what = t("{size}, cut", size=what)
    typer.echo(f"  {taken.name:34} {spoken(what)}")


def _plans(layout: Layout) -> str:
    info = release.read_info(layout, release.live(layout) or "")
    models = [str(bundle["instance"]) for bundle in release.bundles_of(info)]
    found = engine_facts(layout, models)
    return "\n".join(f"{name}\n{facts.get('memory_plan') or facts}" for name, facts in found.items()) + "\n"
