"""Wrong flags: told as every other error, in the operator's language.

typer writes its complaints in English only. Here they are written again from what its errors carry: the kind of error,
the option, the parameter. The two that carry nothing are raised in commands.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from appliance.cli.common import say
from installer.base.i18n import joined, language_of, t
from offline_bundle.text import complaint


@contextmanager
def usage_errors_told() -> Iterator[None]:
    """Errors of the library leave the block with another `show`, which typer calls."""
    try:
        yield
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if getattr(error, "ctx", None) is not None and "NoArgsIsHelpError" not in kinds:
            _show_as_ours(error, kinds)
        raise


def _show_as_ours(error: Any, kinds: set[str]) -> None:
    message = (_said(error, kinds) if language_of() != "en" else None) or error.format_message()
    context = error.ctx

    def show(file: Any = None) -> None:
        say(t("error: {message}", message=message), err=True)
        for line in context.get_usage().splitlines():
            say(joined(["  ", line], ""), err=True)
        if names := context.help_option_names:
            say(joined(["  ", t("Help: {command}", command=f"{context.command_path} {names[-1]}")], ""), err=True)

    error.show = show


def _said(error: Any, kinds: set[str]) -> str | None:
    if "NoSuchOption" in kinds:
        if error.possibilities:
            return t("No such option: {name} (Possible options: {names})", name=error.option_name,
                     names=joined(sorted(error.possibilities)))  # fmt: skip
        return t("No such option: {name}", name=error.option_name)
    if "MissingParameter" in kinds:
        name = _hint(error)
        if error.param.param_type_name == "option":
            return t("Missing option {name}.", name=name)
        return t("Missing argument {name}.", name=name)
    if "BadOptionUsage" in kinds:
        option = next((p for p in error.ctx.command.params if error.option_name in p.opts), None)
        if option is not None and option.is_flag:
            return t("Option {name} does not take a value.", name=repr(error.option_name))
        return t("Option {name} requires an argument.", name=repr(error.option_name))
    if "BadParameter" in kinds:
        return t("Invalid value for {name}: {problem}", name=_hint(error), problem=_problem(error))
    return None


def _hint(error: Any) -> str:
    hint = error.param_hint or error.param.get_error_hint()
    return hint if isinstance(hint, str) else " / ".join(repr(each) for each in hint)


def _problem(error: Any) -> str:
    """pydantic checks numbers and choices, and says what was wrong with its errors."""
    found = getattr(error.__cause__, "errors", None)
    return complaint(found()[0]) if found is not None else error.message

