"""The command line, generated from settings: argparse with vLLM's spellings, TOML files, suggestions and refusals."""

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from engine.errors import ConfigError, told
from engine.message import msg
from engine.server.settings import vllm_flags
from engine.server.settings.help_parser import HelpParser, help_text
from engine.server.settings.sources import environment_flags, serve_argv_of
from engine.server.settings.values import reader_of
from engine.setting import Setting, settings_of, value_type

# In this order in --help.
GROUPS = ("model", "memory", "scheduling", "process", "engines", "endpoint", "logging and configuration",
          "reload (run as root by the unit)")


class _Why(argparse.Action):
    def __init__(self, *args: Any, why: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.why = why


class Note(_Why):
    """Accept a flag that has no effect here, with a note to the operator."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        cast(FlagParser, parser).notes.append(f"{option_string} changes nothing here: {self.why}")


class Refuse(_Why):
    """Refuse a flag (but not its `--no-` form) with the reason."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        if option_string and option_string.startswith("--no-"):
            return  # the flag asks for what we do anyway
        raise ConfigError(msg("{option_string} is refused: {why}", option_string=option_string, why=self.why),
                          option_string)  # never echoes the value


class OnlyOne(_Why):
    """Accept the count 1 and nothing else."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        if values[0] != 1:
            raise ConfigError(msg("{option_string} {values} is refused: {why}", option_string=option_string,
                                  values=values[0], why=self.why), option_string, msg("Use 1."))


class FlagParser(HelpParser):
    """argparse with differences: flags come from settings, errors are ConfigErrors, `_` equals `-` in flags, an unknown
    flag gets a suggestion, and a file and the environment supply what the command line does not say."""

    def __init__(self, *settings: type, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False, **kwargs)
        self.notes: list[str] = []
        self._listed: list[str] = []  # flags that --help shows
        self._fields = {name: entry for cls in settings for name, entry in settings_of(cls).items()}
        groups = {entry[1].group: None for entry in self._fields.values()}
        for title in sorted(groups, key=GROUPS.index):
            group = self.add_argument_group(told(title))
            for name, (field, declared) in self._fields.items():
                if declared.group == title:
                    added = _add(group, name, field.type, declared, field.default)
                    self._listed += [] if declared.hidden else added.option_strings
        self.add_help_flags()

    def add_vllm_flags(self) -> None:
        """Add flags that scripts for vLLM use: other names of ours, flags accepted with a note, and flags refused with
        a reason."""
        hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "dest": "_compatibility"}
        for flag, name in vllm_flags.OTHER_NAMES.items():
            field, declared = self._fields[name]
            _add(self, name, field.type, declared, field.default, flag)
        self.add_argument("--tokenizer", metavar="PATH", help=argparse.SUPPRESS)  # accepted if it is the model's own
        for name, why in vllm_flags.IGNORED_SWITCHES.items():
            self.add_argument(f"--{name}", f"--no-{name}", action=Note, nargs=0, why=why, **hidden)
        for name, why in vllm_flags.IGNORED_VALUES.items():
            self.add_argument(f"--{name}", action=Note, nargs=1, why=why, **hidden)
        for name, why in vllm_flags.REFUSED_SWITCHES.items():
            self.add_argument(f"--{name}", f"--no-{name}", action=Refuse, nargs=0, why=why, **hidden)
        for name, why in vllm_flags.REFUSED_VALUES.items():
            self.add_argument(f"--{name}", action=Refuse, nargs="+", why=why, **hidden)
        for names, why in vllm_flags.ONLY_ONE.items():
            self.add_argument(*names, action=OnlyOne, type=int, nargs=1, why=why, **hidden)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.rstrip(".") + ".")

    def parse(
        self, argv: Sequence[str], from_file: Callable[[dict[str, Any]], list[str]] = serve_argv_of,
        environment: str = "",
    ) -> tuple[dict[str, Any], list[str]]:
        """(values that were given, notes). The one positional argument is the model.

        The command line wins over the environment (variables that begin with `environment`), which wins over the file
        of `--config`. `from_file` returns the file's flags; it may remove entries from the dictionary that only select
        a part of the file.
        """
        given = vars(self._parse([_dashes(arg) for arg in argv]))
        outside = self._parse_environment(environment) if environment else {}
        if "config" in given:
            outside = vars(self._parse(from_file(given))) | outside
        given = outside | given
        given.pop("_compatibility", None)
        for name, (_, declared) in self._fields.items():
            if isinstance(declared.choices, dict) and name in given:
                given[name] = declared.choices[given[name]]
        return given, list(dict.fromkeys(self.notes))

    def _parse_environment(self, prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for variable, argv in environment_flags(prefix, self._fields):
            try:
                found |= vars(self._parse(argv))
            except ConfigError as error:
                raise ConfigError(msg("The environment variable {variable} cannot be used: {message}",
                                      variable=variable, message=error.message), error.flag,
                                  error.hint) from None
        return found

    def _parse(self, argv: list[str]) -> argparse.Namespace:
        try:
            namespace, rest = self.parse_known_args(argv)
        except argparse.ArgumentError as error:
            raise _refusal(error) from None
        for arg in rest:
            if arg.startswith("-") and arg != "--":
                self._unknown(arg)
        positional = [arg for arg in rest if arg != "--"]
        if len(positional) > 1:
            raise ConfigError(msg("Unexpected argument {positional}: the model was already given as "
                                  "{positional_2}.", positional=f"{positional[1]!r}",
                                  positional_2=f"{positional[0]!r}"))
        if positional:
            namespace.model = positional[0]
        return namespace

    def _unknown(self, arg: str) -> NoReturn:
        name = arg.partition("=")[0]
        near = difflib.get_close_matches(name, [*self._listed, "--help"], n=1, cutoff=0.6)
        hint = msg("{prog} --help lists the flags.", prog=self.prog)
        if near:
            hint = msg("Did you mean {near}?", near=near[0])
        raise ConfigError(msg("Unknown flag {name}.", name=name), name, hint)


def _refusal(error: argparse.ArgumentError) -> ConfigError:
    """The error that argparse found: in its own words, or in those of one of our value readers (values.py)."""
    ours = error.__context__
    problem = ours.args[0] if isinstance(ours, argparse.ArgumentTypeError) else error.message
    flag = (error.argument_name or "").rpartition("/")[2]
    return ConfigError(msg("{flag}: {problem}.", flag=error.argument_name, problem=problem), flag)


def help_of(declared: Setting, default: Any) -> str:
    """The help text, with the default written as a person would write it."""
    if isinstance(default, bool):
        default = "on" if default else "off"
    return declared.help.replace("{default}", f"{default:g}" if isinstance(default, float) else str(default))


def _add(group: Any, name: str, annotation: Any, declared: Setting, default: Any, flag: str = "") -> argparse.Action:
    """`flag`: a hidden name in place of the setting's own."""
    kind, words = value_type(annotation)
    flags = (flag,) if flag else declared.flags or ("--" + name.replace("_", "-"), *declared.aliases)
    shown = argparse.SUPPRESS if flag or declared.hidden else help_text(help_of(declared, default))
    options: dict[str, Any] = {"dest": name, "help": shown}
    if declared.const is not None:
        options |= {"action": "store_const", "const": declared.const}
    elif kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        if declared.choices is not None or (words and not declared.size):
            options["choices"] = tuple(declared.choices or words)
        if declared.many == "append":
            options["action"] = "append"
        elif declared.many:
            options["nargs"] = "+"
        options |= {"type": reader_of(annotation, declared), "metavar": declared.metavar}
        if kind is str and not declared.many:
            del options["type"]
    return group.add_argument(*flags, **options)


def _dashes(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value
