"""The words of `--help` in another language: looked up, paragraph by paragraph, when a command is about to be used.

In the code they stay plain English literals, where typer wants them; the catalogue is made from what the finished
commands say (installer/locale/update.py).
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer.main import get_command

from appliance.cli.language.commands import Commands
from appliance.cli.language.engine_programs import LANGUAGE_FLAG
from installer.base.i18n import looked_up


def paragraphs(command: Any) -> Iterator[str]:
    """Every paragraph of a command's help that is words, those of its options and subcommands included."""
    found: list[str] = []

    def note(paragraph: str) -> str:
        found.append(paragraph)
        return paragraph

    _each(command, note)
    yield from found


def translate(command: Any, language: str) -> Any:
    """The same command, with its help in `language`, and each paragraph one line: terminals have many widths."""
    _add_language_option(command)
    _each(command, lambda paragraph: paragraph if language == "en" else looked_up(paragraph, language))
    return command


def _each(command: Any, change: Callable[[str], str]) -> None:
    for name in ("help", "epilog", "short_help"):
        if text := getattr(command, name, None):
            setattr(command, name, _changed(text, change))
    for parameter in command.params:
        if text := getattr(parameter, "help", None):
            parameter.help = _changed(text, change)
    for below in getattr(command, "commands", {}).values():
        _each(below, change)


def _changed(text: str, change: Callable[[str], str]) -> str:
    return "\n\n".join(part if _is_example(part) else change(" ".join(part.split())) for part in text.split("\n\n"))


def _is_example(paragraph: str) -> bool:
    """Lines to type are the same in every language."""
    return paragraph.lstrip().startswith(("\b", "atoll ", "sudo ")) or not paragraph.strip()


def _add_language_option(command: Any) -> None:
    """For the list of options only: `--lang` is taken from the arguments before a command sees them."""
    for below in getattr(command, "commands", {}).values():
        _add_language_option(below)
    if not getattr(command, "commands", {}):
        command.params.append(_language_option())


def _language_option() -> Any:
    holder = Commands(add_completion=False)

    name, metavar, text = LANGUAGE_FLAG

    @holder.command()
    def shape(lang: Annotated[str, typer.Option(name, metavar=metavar, help=text)] = "") -> None:
        pass

    (option,) = get_command(holder).params
    option.expose_value = False
    return option
