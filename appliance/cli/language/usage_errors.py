"""Wrong flags, in the operator's language.

The command-line library writes its complaints in English only. So they are made here from what its errors carry (the
kind of error, the option, the parameter), and for two that carry nothing the check itself is made here. In English
nothing changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from appliance.cli.common import spoken
from installer.base.i18n import joined, language_of, t
from offline_bundle.text import complaint


@contextmanager
def usage_errors_told() -> Iterator[None]:
    """Errors of the library leave the block with a message in the operator's language."""
    try:
        yield
    except Exception as error:
        if language_of() != "en" and getattr(error, "ctx", None) is not None and (said := _said(error)):
            _reword(error, spoken(said))
        raise


def checks_told(command: Any) -> None:
    """Have `command` and those below it refuse unknown commands and surplus arguments in the operator's language."""
    if hasattr(command, "resolve_command"):
        _refuse_unknown_commands(command)
    elif not command.allow_extra_args:
        _refuse_surplus(command)
    for below in getattr(command, "commands", {}).values():
        checks_told(below)


def _said(error: Any) -> str | None:
    kinds = {kind.__name__ for kind in type(error).__mro__}
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


def _reword(error: Any, message: str) -> None:
    error.format_message = lambda: message


def _refuse_unknown_commands(group: Any) -> None:
    resolve = group.resolve_command

    def resolved(ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if group.get_command(ctx, name) is None and not name.startswith("-"):
            near = get_close_matches(name, group.list_commands(ctx))
            if near:
                ctx.fail(spoken(t("No such command {name}. Did you mean {other}?", name=repr(name),
                                  other=joined(map(repr, near)))))  # fmt: skip
            ctx.fail(spoken(t("No such command {name}.", name=repr(name))))
        return resolve(ctx, args)

    group.resolve_command = resolved


def _refuse_surplus(command: Any) -> None:
    parse = command.parse_args
    command.allow_extra_args = True

    def parsed(ctx: Any, args: list[str]) -> list[str]:
        try:
            rest = parse(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]  # whose option it is
            raise
        if rest:
            ctx.fail(spoken(t("Got unexpected extra argument(s) ({names})", names=" ".join(rest))))
        return rest

    command.parse_args = parsed
