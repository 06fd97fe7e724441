"""`--help` of every command on a console of 80 columns, in both languages."""

from collections.abc import Iterator
from typing import Any

import pytest
from rich.cells import cell_len

from appliance.cli.app import COMMANDS, load
from appliance.cli.common import examples
from installer.base.i18n import speaking


def commands(command: Any, parent: Any, name: str) -> Iterator[tuple[Any, Any]]:
    context = command.context_class(command, info_name=name, parent=parent)
    yield command, context
    for below, each in getattr(command, "commands", {}).items():
        yield from commands(each, context, below)


OF_TYPER = [name for name, (_, attribute, _) in COMMANDS.items() if attribute != "main"]


@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize("name", OF_TYPER)
def test_nothing_is_cut_off_and_nothing_is_too_wide(name: str, language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with speaking(language):
        for command, context in commands(load(name), None, name):
            lines = command.get_help(context).splitlines()
            words = " ".join(lines).split()
            for parameter in command.params:
                if not parameter.hidden and parameter.param_type_name == "option":
                    assert all(flag in " ".join(words).replace(",", " ").split() for flag in parameter.opts), context
            for paragraph in (command.epilog or "").split("\n\n"):
                assert " ".join(paragraph.split()) in " ".join(words)
            wide = [line for line in lines if cell_len(line) > 80 and not line.lstrip().startswith("--")]
            assert wide == [], context.command_path


def test_a_long_example_can_be_copied_into_a_shell() -> None:
    command = "atoll bench serve --base-url https://llm:8443 --ca atoll-ca.crt --api-key-file key --profile chat"
    shown = examples(command, then="Exit codes: none.")
    assert shown == (
        "Examples:\n\n"
        "atoll bench serve --base-url https://llm:8443 --ca atoll-ca.crt \\\n"
        "    --api-key-file key --profile chat\n\n"
        "Exit codes: none."
    )
    assert shown.split("\n\n")[1].replace("\\\n", "").split() == command.split()
