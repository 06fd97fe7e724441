"""What the commands about an installation share: which one is meant, how errors are shown, how JSON is printed."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len

from installer.base.errors import ExitCode, InstallError, io_error, usage_error
from installer.base.i18n import joined, language_of, t
from installer.base.i18n import told as in_language
from installer.base.layout import Layout

Prefix = Annotated[
    Path | None,
    typer.Option(
        "--prefix", metavar="DIR",
        help="Below a directory ($ATOLL_PREFIX). Without it: as root this server, else ~/.local/share/atoll.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; progress goes to stderr.")]
_EXAMPLE_WIDTH = 75


def layout_for(prefix: Path | None) -> Layout:
    """The installation that a command is for: --prefix, $ATOLL_PREFIX, the server (for root, or if it has an
    installation), else the user's own.

    `--prefix /` means the server too: nobody wants a supervised process among a system's units.
    """
    given = prefix or (Path(text) if (text := os.environ.get("ATOLL_PREFIX")) else None)
    if given is not None:
        return Layout.server() if given.resolve() == Path("/") else Layout.at(given)
    if os.geteuid() == 0 or Layout.server().journal.parent.is_dir():
        return Layout.server()
    return Layout.at(Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "atoll")


@contextlib.contextmanager
def told(as_json: bool) -> Iterator[None]:
    """Show errors for operators, and exit with their code."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of our output has gone, as in `atoll status | head -1`: click ends quietly
    except (InstallError, OSError) as error:
        known = error if isinstance(error, InstallError) else io_error(t("finish this command"), error)
        if as_json:
            print_json(known.to_json())
        else:
            print_error(known)
        raise typer.Exit(known.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def print_error(error: InstallError) -> None:
    """What happened, the end of the log, why, what was changed, what next: to stderr."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]{spoken(t('error'))}:[/] {escape(spoken(error.message))}")
    if error.log_tail:
        console.print(f"  {spoken(t('The last lines of the log:'))}")
        for line in error.log_tail:
            console.print(f"    {line}", markup=False)
    for text in (error.why, error.changed):
        if text:
            console.print(f"  {spoken(text)}", markup=False)
    if error.hint:
        console.print(f"  {spoken(t('Next: {command}', command=error.hint))}", markup=False)
    console.print(f"  {spoken(t('(exit code {code})', code=error.exit_code))}", markup=False)


def say(text: str = "", *, err: bool = False) -> None:
    """One line for a person, in the language of this terminal."""
    typer.echo(spoken(text), err=err)


def spoken(text: str) -> str:
    """`text` in the language of this terminal."""
    return in_language(text, language_of())


def padded(text: str, width: int) -> str:
    """`text`, spoken, filled up to `width` columns: Hangul takes two."""
    text = spoken(text)
    return text + " " * (width - cell_len(text))


def say_rows(
    labelled: Iterable[tuple[str, str]], *, indent: int = 0, width: int = 0, gap: int = 2, err: bool = False
) -> None:
    """Lines of a label and a text, the texts below one another whatever the language; labels have `width` or more."""
    lines = [(spoken(label), spoken(text)) for label, text in labelled]
    width = max([width, *(cell_len(label) for label, _ in lines)])
    for label, text in lines:
        typer.echo(f"{' ' * indent}{padded(label, width)}{' ' * gap}{text}".rstrip(), err=err)


def agrees(question: str, *, err: bool = False) -> bool:
    """A yes or no from the terminal; no if there is no answer."""
    return typer.confirm(spoken(question), err=err)


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if somebody agrees: by `--yes`, or at the terminal. Raises InstallError (usage)."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise usage_error(joined([t("This needs a yes, and no terminal is there to ask on."), question], " "),
                          t("If the answer is yes: {flag}", flag="--yes"))  # fmt: skip
    if not agrees(question):
        raise usage_error(t("The answer was no."))


def print_json(facts: Any) -> None:
    """One JSON object on stdout. Its texts are English, whatever the terminal's language."""
    typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))


def examples(*commands: str, then: str = "") -> str:
    """The epilog of a command's help; `then` follows, as a paragraph. A long command is continued as a shell takes it,
    so it can be copied."""
    return "\n\n".join(["Examples:", "\n".join(map(_continued, commands)), *([then] if then else [])])


def _continued(command: str) -> str:
    """In lines that fit a terminal of 80 columns. An option stays with its value."""
    first, *options = re.split(r" (?=-)", command)
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) < _EXAMPLE_WIDTH:
            lines[-1] += f" {option}"
        else:
            lines.append(f"    {option}")
    return " \\\n".join(lines)
