"""The command tree of `atoll`. A command's module is imported when it is called, not to list it in `--help`."""

import io
import json
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from typer.main import get_command, get_group

from appliance.cli import PROGRAMS
from appliance.cli.common import say
from appliance.cli.language.commands import Commands, Group
from appliance.cli.language.engine_programs import engine_speaks
from appliance.cli.language.help_texts import translate
from appliance.cli.language.usage_errors import usage_errors_told
from installer.base.errors import ExitCode
from installer.base.i18n import LANGUAGES, joined, language_of, libraries_in, looked_up, speaking, t

EPILOG = """Examples:

atoll preflight                            # check this machine, change nothing
sudo atoll install /media/usb/chat-1.0.0   # verify, install, start
atoll status                               # what it does, and what is next

Each command explains itself, with examples: atoll install --help"""

# Group of the list → name → (module, attribute, one line). `app` is a typer group, `register` adds commands to a typer
# app, and `main` is a program with its own parser. Commands that only units start are in a group without a title: they
# are not listed.
_GROUPS: dict[str, dict[str, tuple[str, str, str]]] = {
    "Publish, on a connected PC": {
        "bundle": ("appliance.cli.publish.bundle", "app", "Build, inspect and verify signed model bundles and media."),
        "keys": ("appliance.cli.publish.keys", "app", "Make and look at the keys that sign bundles."),
    },
    "Install": {
        "setup": ("tui.command", "register", "Open the checklist as screens; so does `atoll` alone."),
        "checklist": (
            "appliance.cli.install.checklist", "app",
            "Go from a bare server to a service, step by step; resumable.",
        ),
        "models": (
            "appliance.cli.install.models", "app",
            "Add and remove models and replicas of a server while the others serve.",
        ),
        "presets": (
            "appliance.cli.install.presets", "app",
            "List starting points for a model, a GPU and a use, with reasons.",
        ),
        "plan": (
            "appliance.cli.install.plan", "register",
            "Compute what fits on a GPU; needs neither GPU nor weights.",
        ),
        "preflight": (
            "appliance.cli.install.preflight", "register",
            "Check this machine before installing. Changes nothing.",
        ),
        "answers": (
            "appliance.cli.install.answers", "app",
            "Check or create an answers file for an unattended install.",
        ),
        "install": ("appliance.cli.install.install", "register", "Verify a bundle, install it and start the service."),
        "upgrade": (
            "appliance.cli.install.install", "register",
            "Install a newer release beside the one that runs, and switch.",
        ),
        "rollback": (
            "appliance.cli.operate.lifecycle", "register",
            "Go back to the previous release; no medium is needed.",
        ),
        "uninstall": ("appliance.cli.operate.lifecycle", "register", "Stop the service and remove what was installed."),
    },
    "Operate": {
        "status": (
            "appliance.cli.operate.status", "register",
            "Show what is installed, whether it serves, and its endpoint.",
        ),
        "trouble": (
            "appliance.cli.operate.trouble", "register",
            "Show what is wrong, why, what was not changed and what to do.",
        ),
        "top": ("tui.top", "register", "Watch the running service: speed, queue, memory, GPUs, alerts."),
        "start": ("appliance.cli.operate.lifecycle", "register", "Start the installed service."),
        "stop": ("appliance.cli.operate.lifecycle", "register", "Stop the service; everything stays installed."),
        "drain": (
            "appliance.cli.operate.lifecycle", "register",
            "Refuse new requests and let running ones finish; accept them again.",
        ),
        "restart": ("appliance.cli.operate.lifecycle", "register", "Restart the service to apply changed settings."),
        "tune": ("appliance.cli.operate.tune", "app", "Find the engine settings that serve your traffic best."),
        "jobs": (
            "appliance.cli.operate.jobs", "app",
            "List, watch and cancel long work that runs in the background.",
        ),
        "pilot": ("appliance.cli.operate.pilot", "app", "Let users in by stages, with a way back; sign the result."),
        "cost": ("appliance.cli.operate.cost", "register", "Compute what requests and tokens cost here."),
        "verify-service": (
            "appliance.cli.operate.verify_service", "register",
            "Verify the running service from outside, and write a report.",
        ),
        "batch": ("appliance.cli.operate.batch", "app", "Answer a file of requests with the running service."),
        "bench": ("appliance.cli.bench.app", "app", "Measure an OpenAI endpoint under load; compare results."),
        "logs": ("appliance.cli.operate.logs", "register", "Show the service's log."),
        "doctor": (
            "appliance.cli.operate.doctor", "register",
            "Check this machine's GPU: each kernel against plain arithmetic.",
        ),
        "support-bundle": (
            "appliance.cli.operate.support", "register",
            "Collect what helps to find a fault: no keys, no prompts.",
        ),
        "journal": ("appliance.cli.operate.lifecycle", "register", "Check or repair the installer's journal."),
    },
    "Secure": {
        "verify": ("appliance.cli.secure.verify", "register", "Compare every installed byte with what was signed."),
        "trust": (
            "appliance.cli.secure.trust", "app",
            "List, add, remove and revoke the vendor keys that are trusted here.",
        ),
        "apikey": ("appliance.cli.secure.apikey", "app", "Make, list and revoke the API keys that open the endpoint."),
        "tls": (
            "appliance.cli.secure.tls", "app",
            "Show, renew or replace the endpoint's certificate; export the local CA.",
        ),
        "audit": ("appliance.cli.secure.audit", "app", "Show the audit log, and check that it is intact."),
    },
    "Develop": {
        "serve": (
            PROGRAMS["serve"], "main",
            "Serve a model directory as an OpenAI endpoint (flags as in 'vllm serve').",
        ),
    },
    "": {
        "engine": (
            PROGRAMS["engine"], "main",
            "Run the engine of one model behind a Unix socket (units do).",
        ),
        "gateway": (
            PROGRAMS["gateway"], "main",
            "Serve HTTP in front of the engines of this server (units do).",
        ),
        "gpu-ready": (
            PROGRAMS["gpu-ready"], "main",
            "Wait until the GPU can be used; exit 0 when it can (units do).",
        ),
        "sampler": (
            PROGRAMS["sampler"], "main",
            "Keep the history of /metrics (a unit does).",
        ),
        "settle": (
            "appliance.cli.operate.settle", "register",
            "Undo an upgrade that a power cut interrupted (a unit does, at boot).",
        ),
    },
}
COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}
GROUP_OF = {name: title for title, group in _GROUPS.items() for name in group}


class LazyGroup(Group):
    """Lists commands from `COMMANDS`, and imports the one that is called. Speaks the operator's language."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **settings: Any) -> Any:
        """`--lang` may stand anywhere. A character that a stream cannot encode becomes '?' instead of a traceback."""
        language, rest = take_language(sys.argv[1:] if args is None else list(args))
        if args is None:
            sys.argv[1:] = rest  # an upgrade passes these on to newer code, which finds the language in $ATOLL_LANG
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        if not rest:
            rest = ["setup"]
        elif rest[0] == "tui":  # what people type who do not remember `setup`
            rest = ["setup", *rest[1:]]
        with speaking(language), libraries_in(language_of()):
            translate(self, language_of())
            return super().main(rest, *more, **settings)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """For listings and completion: a stand-in with the help line, made without an import."""
        if cmd_name in COMMANDS:
            return _stand_in(cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """For a call: the real command."""
        if args and args[0] in COMMANDS:
            return args[0], load(args[0]), args[1:]
        return super().resolve_command(ctx, args)

    def make_context(self, *given: Any, **more: Any) -> Any:
        with usage_errors_told():
            return super().make_context(*given, **more)

    def invoke(self, ctx: Any) -> Any:
        """Turn errors for operators into a message and an exit code; a traceback means a bug."""
        try:
            with usage_errors_told():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            say(t("Interrupted. Run the same command again to continue."), err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            # Each room has its own error class (they may not import one another); these attributes are what they share.
            message, hint = getattr(error, "message", None), getattr(error, "hint", None)
            if message is None or hint is None:
                raise
            say(t("error: {message}", message=message), err=True)
            for line in (getattr(error, "why", ""), getattr(error, "changed", ""), hint):
                if line:
                    say(joined(["  ", line], ""), err=True)
            raise typer.Exit(int(getattr(error, "exit_code", 1))) from None


def take_language(args: list[str]) -> tuple[str | None, list[str]]:
    """The language of `--lang`, and the arguments without it."""
    found, rest, words = None, [], iter(args)
    for word in words:
        if word == "--":
            return found, [*rest, word, *words]
        name, equals, value = word.partition("=")
        if name != "--lang":
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if value not in LANGUAGES:
            say(t("error: --lang takes {names}, not '{value}'.", names=joined(LANGUAGES), value=value), err=True)
            raise SystemExit(ExitCode.USAGE)
        found = value
    return found, rest


def load(name: str) -> Any:
    """Import and return the real command called `name`."""
    found = _load(name)
    return found if COMMANDS[name][1] == "main" else translate(found, language_of())


def _load(name: str) -> Any:
    module, attribute, help_line = COMMANDS[name]
    found = getattr(import_module(module), attribute)
    if attribute == "app":
        return get_group(found)
    if attribute == "register":
        holder = Commands()
        holder.command(name="register", hidden=True)(lambda: None)  # or typer makes no group of one command
        found(holder)
        return get_group(holder).commands[name]
    return _pass_through(name, help_line, found)


def _pass_through(name: str, help_line: str, run: Callable[[list[str]], int | None]) -> Any:
    """A command with its own argument parser. It gets every argument, including `--help`."""
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    holder = Commands(add_completion=False)

    @holder.command(name=name, help=help_line, context_settings=settings)
    def call(ctx: typer.Context) -> None:
        with engine_speaks():
            raise typer.Exit(run(ctx.args) or 0)

    return get_command(holder)


def _stand_in(name: str) -> Any:
    language, title = language_of(), GROUP_OF[name]
    holder = Commands(add_completion=False)
    holder.command(
        name=name, help=looked_up(COMMANDS[name][2], language), hidden=not title,
        rich_help_panel=looked_up(title, language) if title else None,
    )(lambda: None)  # fmt: skip
    return get_command(holder)


app = Commands(
    name="atoll",
    cls=LazyGroup,
    help="Atoll turns a server without Internet into an LLM service: a signed bundle, one command, an OpenAI endpoint.",
    epilog=EPILOG,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,  # locals may hold keys
)


def _versions() -> dict[str, str]:
    versions = {"atoll": metadata.version("atoll"), "python": platform.python_version()}
    for package in ("torch", "triton"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version("atoll"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel="Develop")
def version(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print the versions of Atoll and of what it runs on."""
    versions = _versions()
    if as_json:
        json.dump(versions, sys.stdout)
        typer.echo()
        return
    for name, number in versions.items():
        typer.echo(f"{name:8}{number}")
