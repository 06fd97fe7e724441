"""What the command-line library says about wrong flags, in the operator's language."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from appliance.cli.common import spoken
from installer.base.i18n import foreign, retold

SAID = (
    foreign("No such option: {name}"),
    foreign("No such option: {name} (Possible options: {names})"),
    foreign("No such option: {name} Did you mean {other}?"),
    foreign("No such command {name}."),
    foreign("No such command {name}. Did you mean {other}?"),
    foreign("Missing command."),
    foreign("Missing option {name}."),
    foreign("Missing argument {name}."),
    foreign("Got unexpected extra argument(s) ({names})"),
    foreign("Got unexpected extra argument ({names})"),
    foreign("Option {name} requires an argument."),
    foreign("Option {name} does not take a value."),
    foreign("Invalid value for {name}: {problem}"),
    foreign("{value} is not a valid integer."),
    foreign("{value} is not a valid int."),
    foreign("{value} is not a valid float."),
    foreign("{value} is not in the range {range}."),
    foreign("{value} is not one of {names}."),
    foreign("Input should be less than or equal to {most}"),
    foreign("Input should be greater than or equal to {least}"),
    foreign("Input should be a valid integer, unable to parse string as an integer"),
    foreign("Input should be a valid number, unable to parse string as a number"),
    foreign("Value error, {problem}"),
    # and around its errors and helps
    foreign("Arguments"),
    foreign("Options"),
    foreign("Commands"),
    foreign("Error"),
    foreign("Aborted."),
    foreign("Aborted!"),
    foreign("[required]"),
    foreign("[default: {}]"),
    foreign("Try [blue]'{command_path} {help_option}'[/] for help."),
    foreign("Show this message and exit."),
)


@contextmanager
def usage_errors_told() -> Iterator[None]:
    """Errors of the library leave the block with a message in the operator's language."""
    try:
        yield
    except Exception as error:
        if (say_it := getattr(error, "format_message", None)) is not None and getattr(error, "ctx", None) is not None:
            _reword(error, spoken(retold(say_it())))
        raise


def _reword(error: Any, message: str) -> None:
    error.format_message = lambda: message
