"""Bring the catalogues up to date, one for each language directory beside this file: extract the texts, merge them into
atoll.po, compile atoll.mo. For developers (Babel)."""

import ast
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path

from babel import Locale
from babel.messages import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
ROOMS = ("appliance", "engine", "installer", "offline_bundle", "tui")
MARKS = ("t", "msg", "foreign")
MEDIUM = ROOT / "offline_bundle/medium"
OF_INSTALL_SH = {"ko": MEDIUM / "korean.py"}   # the languages that install.sh speaks


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


def words_of_install_sh(catalogue: Catalog, language: str) -> str:
    """A Python module with the words of install.sh, which runs where no catalogue is installed yet."""
    from offline_bundle.medium.scripts import part_paths

    wanted = set().union(*(literals(path) for path in part_paths()), literals(ROOT / "offline_bundle/text.py"))
    known = {str(message.id): str(message.string) for message in catalogue if message.id in wanted and message.string}
    lines = [f"    {source!r}: {known[source]!r},\n" for source in sorted(known)]
    name = name_of(language)
    about = f'"""What install.sh says, in {name}. Made by installer/locale/update.py from the catalogue: edit that."""'
    return f"# ruff: noqa: E501\n{about}\n\n{name.upper()} = {{\n{''.join(lines)}}}\n"


def languages() -> list[str]:
    """The languages that have a directory here."""
    return sorted(path.parent.name for path in HERE.glob("*/LC_MESSAGES"))


def name_of(language: str) -> str:
    """In English."""
    return str(Locale.parse(language).get_language_name("en"))


def current(path: Path, language: str) -> Catalog:
    """The catalogue as it is; an empty one for a new language."""
    if not path.exists():
        return Catalog(locale=language)
    with path.open("rb") as file:
        return read_po(file, locale=language)


def write(catalogue: Catalog, path: Path, language: str) -> None:
    """atoll.po, with a header that does not change from day to day."""
    header = (f"# Atoll's {name_of(language)} texts. Made by installer/locale/update.py; the translations are written "
              "here by hand.\n")  # fmt: skip
    for message in catalogue:
        message.flags.discard("fuzzy")
    buffer = io.BytesIO()
    write_po(buffer, catalogue, sort_output=True, omit_header=True, width=110, include_lineno=False)
    start = f'msgid ""\nmsgstr ""\n"Language: {language}\\n"\n"Content-Type: text/plain; charset=utf-8\\n"\n\n'
    path.write_bytes((header + start).encode() + buffer.getvalue())


def update(language: str, fresh: Catalog) -> int:
    """Bring one language up to date. Returns the number of texts that have no translation yet."""
    path = HERE / language / "LC_MESSAGES/atoll.po"
    catalogue = current(path, language)
    catalogue.update(fresh, no_fuzzy_matching=True)
    catalogue.obsolete.clear()
    write(catalogue, path, language)
    catalogue.creation_date = catalogue.revision_date = datetime(2026, 1, 1, tzinfo=UTC)  # the same file every day
    with path.with_suffix(".mo").open("wb") as file:
        write_mo(file, catalogue)
    if language in OF_INSTALL_SH:
        OF_INSTALL_SH[language].write_text(words_of_install_sh(catalogue, language), "utf-8")
    empty = [message.id for message in catalogue if message.id and not message.string]
    for text in empty:
        print(f"no {name_of(language)} yet: {text}")
    print(f"{language}: {len(catalogue)} texts, {len(empty)} without a translation")
    return len(empty)


def main() -> int:
    fresh = extracted()
    return 1 if sum(update(language, fresh) for language in languages()) else 0


if __name__ == "__main__":
    sys.exit(main())
