"""`atoll preflight|install|status|start|stop|logs|uninstall`: flags in, words out; `installer` does the work."""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli.install_view import Terminal, human_bytes, print_checks, print_error, print_status
from installer.errors import ExitCode, InstallError, io_error
from installer.layout import Layout
from installer.lifecycle import start as start_service
from installer.lifecycle import stop as stop_service
from installer.machine import Installer, InstallResult, key_was_shown
from installer.options import Answers, InstallOptions, read_answers
from installer.preflight import judge, run_checks
from installer.preflight.record import PreflightContext
from installer.service import PrefixService, follow, tail
from installer.status import status as read_status
from installer.uninstall import plan_uninstall
from installer.uninstall import uninstall as remove


def default_prefix() -> Path:
    """ATOLL_PREFIX, else `atoll` in the user's data directory: a place that needs no privilege."""
    if given := os.environ.get("ATOLL_PREFIX"):
        return Path(given)
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "atoll"


Prefix = Annotated[
    Path | None,
    typer.Option("--prefix", metavar="DIR", help="Where Atoll lives ($ATOLL_PREFIX, else ~/.local/share/atoll)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; progress goes to stderr.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the endpoint (as installed, else 8000).")]
Host = Annotated[str | None, typer.Option(help="Address to listen on (as installed, else 127.0.0.1).")]
Waive = Annotated[
    list[str] | None,
    typer.Option("--waive", metavar="CHECK=REASON", help="Go on although CHECK fails; the reason is recorded."),
]


@contextlib.contextmanager
def told(as_json: bool) -> Iterator[None]:
    """Show errors as they are meant to be read, and leave with their exit code."""
    try:
        yield
    except InstallError as error:
        if as_json:
            _print_json(error.to_json())
        else:
            print_error(error)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        print_error(io_error("finish this command", error))
        raise typer.Exit(ExitCode.IO) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the `atoll` command tree."""
    app.command(help=_PREFLIGHT, epilog=_examples("atoll preflight", "atoll preflight --port 9000 --json"))(preflight)
    app.command(
        help=_INSTALL,
        epilog=_examples(
            "atoll install --bundle /media/usb/model --trust-key vendor.pub",
            "atoll install --bundle DIR --dry-run",
            "atoll install --answers answers.json --json",
        ),
    )(install)
    app.command(help=_STATUS, epilog=_examples("atoll status", "atoll status --json"))(status)
    app.command(help="Start the installed service and wait until it answers.", epilog=_examples("atoll start"))(start)
    app.command(help="Stop the service. Everything stays installed.", epilog=_examples("atoll stop"))(stop)
    app.command(help="Show the service's log.", epilog=_examples("atoll logs", "atoll logs -f -n 20"))(logs)
    purge = f"atoll uninstall --purge --confirm {socket.gethostname()}"
    app.command(help=_UNINSTALL, epilog=_examples("atoll uninstall", purge))(uninstall)


_PREFLIGHT = "Check whether this machine can be installed on. Changes nothing; exit code 3 if it cannot."
_INSTALL = """Verify a bundle, install it under a prefix, start the service and ask it a first question.

Nothing is written before the plan is confirmed, nothing that runs is touched before all is staged, and a service that
does not answer is rolled back. Killed at any moment, the same command goes on. The API key is shown once, at the end.
"""
_STATUS = "One screen: what is installed, whether it serves, since when, with whose permission. Exit code 0: it serves."
_UNINSTALL = """Stop the service and remove releases, caches and run-time files.

Models, settings, keys, logs and the journal stay, unless --purge is given; that asks for this machine's name.
"""


def _examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(lines)


def preflight(
    prefix: Prefix = None,
    port: Port = None,
    host: Host = None,
    waive: Waive = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 4 on warnings.")] = False,
    as_json: Json = False,
) -> None:
    with told(as_json):
        from installer.config import endpoint, read_text

        layout = Layout.at(prefix or default_prefix())
        standing = endpoint(read_text(layout.config), layout.config)
        context = PreflightContext(
            layout,
            type(standing)(host or standing.host, port or standing.port),
            own_pids=PrefixService(layout).pids(),
        )
        records = run_checks(context, _waivers(waive))
        if as_json:
            _print_json({"checks": [record.to_json() for record in records]})
        else:
            print_checks(records, everything=True)
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            _judge_quietly(records, strict, as_json)


def _judge_quietly(records: list[Any], strict: bool, as_json: bool) -> None:
    try:
        judge(records, strict=strict)
    except InstallError as error:
        if not as_json:
            raise
        raise typer.Exit(error.exit_code) from None


def install(
    bundle: Annotated[
        Path | None, typer.Option("--bundle", metavar="DIR", help="The bundle's directory, on the medium or copied.")
    ] = None,
    prefix: Prefix = None,
    trust_key: Annotated[
        list[Path] | None,
        typer.Option("--trust-key", metavar="PUB", help="The vendor's public key, got by another way than the bundle."),
    ] = None,
    accept_license: Annotated[
        list[str] | None,
        typer.Option(
            "--accept-license", "--accept-licence", metavar="SPDX@SHA256",
            help="Accept this licence and this text of it (at least 8 hex digits). Without it you are asked.",
        ),
    ] = None,
    port: Port = None,
    host: Host = None,
    answers: Annotated[
        Path | None, typer.Option("--answers", metavar="FILE", help="Answers for an unattended install (JSON).")
    ] = None,
    waive: Waive = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop with 4 if the preflight has warnings.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after the plan; write nothing.")] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes-nothing-else", help="Yes to the plan. It accepts no licence and waives no check."),
    ] = False,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that the service may take to become ready.")
    ] = 900.0,
    as_json: Json = False,
) -> None:
    with told(as_json):
        given = read_answers(answers) if answers else Answers(schema_version=1)
        source = bundle or given.bundle
        if source is None:
            raise InstallError(
                "Which bundle?", exit_code=ExitCode.USAGE, changed="Nothing was changed.", hint="Give it: --bundle DIR"
            )
        options = InstallOptions(
            bundle=source,
            prefix=prefix or given.prefix or default_prefix(),
            trust_keys=trust_key or given.trust_keys,
            accept_licenses=[*(accept_license or []), *given.accept_licenses],
            host=host or given.host,
            port=port or given.port,
            waivers={**given.waivers, **_waivers(waive)},
            strict=strict or given.strict,
            dry_run=dry_run,
            confirmed=yes or given.confirm_plan,
            start_timeout=start_timeout,
        )
        with Terminal(Layout.at(options.prefix).prefix, to_stderr=as_json) as terminal:
            terminal.interactive = answers is None and sys.stdin.isatty()
            result = Installer(options, terminal).run()
    with contextlib.suppress(OSError):  # nobody reads any more: the key stays unshown, and the next run makes another
        _print_result(result, as_json)
        sys.stdout.flush()
        if result.api_key:
            key_was_shown(Layout.at(options.prefix), result.key_ids)


def _print_result(result: InstallResult, as_json: bool) -> None:
    if as_json:
        _print_json(result.to_json())
        return
    if result.outcome == "dry-run":
        typer.echo("\nDry run: nothing was changed. The same command without --dry-run does what is listed above.")
        return
    done = "Already installed and healthy" if result.outcome == "already-installed" else "Installed"
    typer.echo(f"\n{done} in {result.seconds:.1f} s.\n")
    typer.echo(f"  endpoint  {result.url}")
    typer.echo(f"  model     {result.model}")
    if result.api_key:
        typer.echo(f"  key       {result.api_key}")
        typer.echo("            Keep it: it is shown this once, and only its hash is stored.")
    else:
        typer.echo(f"  key       the one shown when it was made (id {', '.join(result.key_ids)})")
    where = "" if Path(result.prefix) == Layout.at(default_prefix()).prefix else f" --prefix {result.prefix}"
    typer.echo(f"\nNext: atoll status{where} · atoll logs{where} · atoll stop{where}")


def status(prefix: Prefix = None, as_json: Json = False) -> None:
    with told(as_json):
        facts = read_status(Layout.at(prefix or default_prefix()))
        if as_json:
            _print_json(facts)
        else:
            print_status(facts)
    if facts["state"] != "serving":
        raise typer.Exit(ExitCode.UNHEALTHY)


def start(
    prefix: Prefix = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that it may take to become ready.")] = 900.0,
    as_json: Json = False,
) -> None:
    layout = Layout.at(prefix or default_prefix())
    with told(as_json), Terminal(layout.prefix, to_stderr=as_json) as terminal:
        result = start_service(layout, terminal, timeout=timeout)
    _say(result.to_json(), f"{result.detail}: {result.url}", as_json)


def stop(prefix: Prefix = None, as_json: Json = False) -> None:
    with told(as_json):
        result = stop_service(Layout.at(prefix or default_prefix()))
    _say(result.to_json(), f"The service {result.detail}." if not result.changed else "Stopped.", as_json)


def logs(
    prefix: Prefix = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of the last lines.")] = 100,
    follow_it: Annotated[bool, typer.Option("-f", "--follow", help="Go on as lines are written.")] = False,
) -> None:
    with told(False):
        layout = Layout.at(prefix or default_prefix())
        if not layout.log.exists():
            raise InstallError(
                f"There is no log at {layout.log}.", exit_code=ExitCode.USAGE, hint="Is this the right --prefix?"
            )
        try:
            for line in tail(layout.log, lines):
                typer.echo(line)
            if follow_it:
                for line in follow(layout.log):
                    typer.echo(line)
        except BrokenPipeError:
            sys.stdout = None  # type: ignore[assignment]  # a reader that left is not an error


def uninstall(
    prefix: Prefix = None,
    purge: Annotated[bool, typer.Option("--purge", help="Remove models, settings, keys and logs too.")] = False,
    confirm: Annotated[
        str | None, typer.Option("--confirm", metavar="HOSTNAME", help="This machine's name: no question is asked.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="No question without --purge.")] = False,
    as_json: Json = False,
) -> None:
    with told(as_json):
        layout = Layout.at(prefix or default_prefix())
        plan = plan_uninstall(layout, purge=purge)
        if not as_json:
            for word, entries in (("remove", plan.remove), ("keep", plan.keep)):
                for path, size in entries:
                    typer.echo(f"  {word:7} {path}  {human_bytes(size)}")
        _confirm_uninstall(purge, confirm, yes)
        plan = remove(layout, purge=purge)
    kept = "Nothing is left of it." if purge else "Models, settings, keys, logs and the journal are still there."
    _say(plan.to_json(), f"Uninstalled. {kept}", as_json)


def _confirm_uninstall(purge: bool, confirm: str | None, yes: bool) -> None:
    host = socket.gethostname()
    refused = InstallError("Not confirmed.", exit_code=ExitCode.USAGE, changed="Nothing was changed.")
    if purge:
        if confirm is None and sys.stdin.isatty():
            confirm = typer.prompt(f"This deletes the models, settings and keys. Type the machine's name ({host})")
        refused.hint = f"Give the machine's name: --purge --confirm {host}"
        if confirm != host:
            raise refused
    elif not yes and confirm != host:
        refused.hint = "Confirm with --yes."
        if not sys.stdin.isatty() or not typer.confirm("Uninstall?"):
            raise refused


def _waivers(given: list[str] | None) -> dict[str, str]:
    waivers = {}
    for text in given or []:
        check, _, reason = text.partition("=")
        if not check or len(reason.strip()) < 3:
            raise InstallError(
                f"'{text}' waives nothing.",
                exit_code=ExitCode.USAGE,
                why="A waiver names the check and says why, in words.",
                changed="Nothing was changed.",
                hint="For example: --waive exposure='isolated lab network'",
            )
        waivers[check.strip()] = reason.strip()
    return waivers


def _say(facts: dict[str, object], text: str, as_json: bool) -> None:
    if as_json:
        _print_json(facts)
    else:
        typer.echo(text)


def _print_json(facts: Any) -> None:
    typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
