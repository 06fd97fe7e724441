"""The command classes of `atoll`: typer's, with the words that typer does not translate.

Every command and group is made with `Commands`, which takes the place of `typer.Typer`.
"""

from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from appliance.cli.common import spoken
from installer.base.i18n import joined, language_of, looked_up, t

HELP_WIDTH = 100  # columns; a wider terminal has room for more, but longer lines are hard to read


class _Context(typer.Context):
    def make_formatter(self) -> Any:
        from appliance.cli.language.help_layout import HelpLayout

        return HelpLayout(max_width=HELP_WIDTH)


class _Helped:
    """Mixin: the page of `--help`."""

    context_class = _Context

    def get_help_option(self, ctx: Any) -> Any:
        """In the operator's language. typer makes this option each time it is asked for."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None and option.help:
            option.help = looked_up(option.help, language_of())
        return option


class Command(_Helped, TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        allows_more, ctx.allow_extra_args = ctx.allow_extra_args, True
        try:
            rest = super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:  # usage_errors.py looks the option up there
                error.ctx = ctx  # type: ignore[attr-defined]
            raise
        if rest and not allows_more:
            ctx.fail(spoken(t("Got unexpected extra argument(s) ({names})", names=" ".join(rest))))
        return rest


class Group(_Helped, TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each with the first paragraph of its help, under the titles that commands have (`rich_help_panel`)."""
        titles: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                title = getattr(command, "rich_help_panel", None) or looked_up("Commands", language_of())
                titles.setdefault(title, []).append((name, (command.help or "").split("\n\n")[0]))
        for title, rows in titles.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is not None or name.startswith("-"):
            return super().resolve_command(ctx, args)
        near = get_close_matches(name, self.list_commands(ctx))
        if near:
            ctx.fail(spoken(t("No such command {name}. Did you mean {other}?", name=repr(name),
                              other=joined(map(repr, near)))))  # fmt: skip
        return ctx.fail(spoken(t("No such command {name}.", name=repr(name))))


class Commands(typer.Typer):
    """typer.Typer, whose commands and groups are of the classes above."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"cls": Group, "rich_markup_mode": None, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Any:
        return super().command(name, **{"cls": Command, **settings})
