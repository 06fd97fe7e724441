"""Bring the catalogue up to date: extract texts, merge them into atoll.po, compile atoll.mo. For developers (Babel)."""

import ast
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path

from babel.messages import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
ROOMS = ("appliance", "engine", "installer", "offline_bundle", "tui")
MARKS = ("t", "msg", "foreign")
PO = HERE / "ko/LC_MESSAGES/atoll.po"
MEDIUM = ROOT / "offline_bundle/medium"


def extracted() -> Catalog:
    """Every text of the code, with its files; every paragraph of the commands' help."""
    catalogue = Catalog(project="atoll", charset="utf-8", fuzzy=False)
    for path in sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        for message in literals(path):
            catalogue.add(message, locations=[(str(path.relative_to(ROOT)), 0)])
    for paragraph in help_paragraphs():
        catalogue.add(paragraph, locations=[("--help", 0)])
    return catalogue


def literals(path: Path) -> set[str]:
    """The string literals that a file passes to t(…), msg(…) and foreign(…), even inside other texts and f-strings."""
    calls = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
    first = (call.args[0] for call in calls if getattr(call.func, "id", "") in MARKS and call.args)
    return {str(node.value) for node in first if isinstance(node, ast.Constant)}


def help_paragraphs() -> set[str]:
    """The help texts of all commands, from the finished command tree."""
    from importlib import import_module

    from typer.main import get_group

    from appliance.cli.app import COMMANDS, GROUP_OF, app, load
    from appliance.cli.language.help_texts import paragraphs
    from installer.base.i18n import speaking

    with speaking("en"):
        commands = [get_group(app), *(load(name) for name, (_, kind, _) in COMMANDS.items() if kind != "main")]
        lines = {help_line for _, _, help_line in COMMANDS.values()} | {title for title in GROUP_OF.values() if title}
        for module, attribute, _ in COMMANDS.values():
            if attribute == "main":
                lines |= help_of(getattr(import_module(module), attribute))
    return lines.union(*(paragraphs(command) for command in commands))


def help_of(program: Callable[[list[str]], object]) -> set[str]:
    """Every text of the `--help` of a program that brings its own parser."""
    from engine.errors import retelling

    found = {"usage: "}

    def note(text: str) -> str:
        found.add(text)
        return text

    with retelling(note), redirect_stdout(io.StringIO()), suppress(SystemExit):
        program(["--help"])
    return found


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
