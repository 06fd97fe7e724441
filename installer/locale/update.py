"""Bring the catalogue up to date: extract texts, merge them into atoll.po, compile atoll.mo. For developers (Babel)."""

import ast
import io
import sys
from datetime import UTC, datetime
from pathlib import Path

from babel.messages import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po
from engine_texts import engine_texts  # beside this file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
ROOMS = ("appliance/cli", "appliance/load", "appliance/service", "installer", "offline_bundle", "tui")
PO = HERE / "ko/LC_MESSAGES/atoll.po"
MEDIUM = ROOT / "offline_bundle/medium"


def extracted() -> Catalog:
    """Every text of the code and error of the engine, with their files; every paragraph of the commands' help."""
    catalogue = Catalog(project="atoll", charset="utf-8", fuzzy=False)
    for path in sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        for message in literals(path):
            catalogue.add(message, locations=[(str(path.relative_to(ROOT)), 0)])
    for text, paths in engine_texts(ROOT / "engine").items():
        catalogue.add(text, locations=[(path, 0) for path in sorted(paths)])
    for paragraph in help_paragraphs():
        catalogue.add(paragraph, locations=[("--help", 0)])
    return catalogue


def literals(path: Path) -> set[str]:
    """What the calls of t(…) and foreign(…) in a file are given, also inside other texts and f-strings."""
    calls = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
    first = (call.args[0] for call in calls if getattr(call.func, "id", "") in ("t", "foreign") and call.args)
    return {str(node.value) for node in first if isinstance(node, ast.Constant)}


def help_paragraphs() -> set[str]:
    """What the commands say of themselves, as the finished command tree has it."""
    from importlib import import_module

    from typer.main import get_group

    from appliance.cli import own_parsers
    from appliance.cli.app import COMMANDS, GROUP_OF, app, load
    from appliance.cli.help_texts import paragraphs
    from installer.base.i18n import speaking

    with speaking("en"):
        commands = [get_group(app), *(load(name) for name, (_, kind, _) in COMMANDS.items() if kind != "main")]
        lines = {help_line for _, _, help_line in COMMANDS.values()} | {title for title in GROUP_OF.values() if title}
        for module, attribute, _ in COMMANDS.values():
            if attribute == "main":
                lines |= own_parsers.paragraphs(getattr(import_module(module), attribute))
    return lines.union(*(paragraphs(command) for command in commands))


def words_of_install_sh(catalogue: Catalog) -> str:
    """The text of offline_bundle/medium/korean.py: install.sh runs where no catalogue is installed yet."""
    from offline_bundle.medium.scripts import part_paths

    wanted = set().union(*(literals(path) for path in part_paths()), literals(ROOT / "offline_bundle/text.py"))
    known = {str(message.id): str(message.string) for message in catalogue if message.id in wanted and message.string}
    lines = [f"    {source!r}: {known[source]!r},\n" for source in sorted(known)]
    about = '"""What install.sh says, in Korean. Made by installer/locale/update.py from the catalogue: edit that."""'
    return f"# ruff: noqa: E501\n{about}\n\nKOREAN = {{\n{''.join(lines)}}}\n"


def current() -> Catalog:
    with PO.open("rb") as file:
        return read_po(file, locale="ko")


def write(catalogue: Catalog) -> None:
    """atoll.po, with a header that does not change from day to day."""
    header = "# Atoll's Korean texts. Made by installer/locale/update.py; the translations are written here by hand.\n"
    for message in catalogue:
        message.flags.discard("fuzzy")
    buffer = io.BytesIO()
    write_po(buffer, catalogue, sort_output=True, omit_header=True, width=110, include_lineno=False)
    start = 'msgid ""\nmsgstr ""\n"Language: ko\\n"\n"Content-Type: text/plain; charset=utf-8\\n"\n\n'
    PO.write_bytes((header + start).encode() + buffer.getvalue())


def main() -> int:
    fresh, catalogue = extracted(), current() if PO.exists() else Catalog(locale="ko")
    catalogue.update(fresh, no_fuzzy_matching=True)
    catalogue.obsolete.clear()
    write(catalogue)
    catalogue.creation_date = catalogue.revision_date = datetime(2026, 1, 1, tzinfo=UTC)  # the same file every day
    with PO.with_suffix(".mo").open("wb") as file:
        write_mo(file, catalogue)
    (MEDIUM / "korean.py").write_text(words_of_install_sh(catalogue), "utf-8")
    empty = [message.id for message in catalogue if message.id and not message.string]
    for text in empty:
        print(f"no Korean yet: {text}")
    print(f"{len(catalogue)} texts, {len(empty)} without a translation")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
