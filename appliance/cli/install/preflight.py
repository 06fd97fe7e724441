"""`atoll preflight`: check this machine, report what would prevent an install, change nothing."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, told
from appliance.cli.view.preflight_view import print_checks, print_verdict
from installer.access.vendor_keys import keyring
from installer.base import fs
from installer.base.errors import ExitCode, InstallError, usage_error
from installer.base.i18n import Text, joined, language_of, t
from installer.base.i18n import told as in_words
from installer.base.layout import Layout
from installer.decide.answers import read_answers
from installer.preflight import PreflightContext, run_checks
from installer.preflight.model_needs import read_needs
from installer.preflight.report import report, verdict
from installer.release import config
from installer.service.choice import service_for

Device = Literal["auto", "cuda", "cpu"]
_HELP = """Check whether this machine can be installed on. Changes nothing.

Works before anything is installed. Exit code 0: ready; 3: it is not; 4: warnings, with --strict. With --bundle the
machine is checked against that model and its runtime; with --trust-key the bundle's signature is checked first.
"""


def register(app: typer.Typer) -> None:
    """Add the command to the `atoll` tree."""
    lines = ("atoll preflight", "atoll preflight --bundle /media/atoll --trust-key vendor.pub",
             "atoll preflight --device cpu --json --report preflight.json", "atoll preflight --lang ko",
             "atoll preflight --waive read-speed='slow disk is known'")  # fmt: skip
    app.command(help=_HELP, epilog=examples(*lines))(preflight)


def preflight(
    bundle: Annotated[
        Path | None, typer.Option("--bundle", metavar="DIR", help="The mounted medium, or one bundle of it.")
    ] = None,
    prefix: Prefix = None,
    device: Annotated[
        Device | None, typer.Option("--device", help="Device for the models (auto: the GPU if there is one).")
    ] = None,
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", metavar="GPU", help="Check only this GPU: its index or UUID.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the endpoint (as installed, else the default).")
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on (as installed, else the default).")
    ] = None,
    trust_key: Annotated[
        list[Path] | None, typer.Option("--trust-key", metavar="PUB", help="The vendor's public key.")
    ] = None,
    waive: Annotated[
        list[str] | None,
        typer.Option("--waive", metavar="CHECK=REASON", help="As in an install; strict checks cannot be waived."),
    ] = None,
    answers: Annotated[
        Path | None, typer.Option("--answers", metavar="FILE", help="Read what is not given here from an answers file.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 4 on warnings.")] = False,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the JSON object to this file too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check, show the result, and exit with its code."""
    language = language_of()
    with told(as_json):
        began = time.monotonic()
        given = read_answers(answers) if answers else None
        layout = layout_for(prefix or (given.prefix if given else None))
        context = _context(
            layout,
            bundle or (_medium(given) if given else None),
            trust_key or (given.trust_keys if given else []),
            host or (given.host if given else None),
            port or (given.port if given else None),
            device or (given.device if given else None) or "auto",
            tuple(gpu or ()),
            language,
        )
        waivers = {**(given.waivers if given else {}), **read_waivers(waive)}
        records = run_checks(context, waivers)
        seconds = time.monotonic() - began
        strict = strict or bool(given and given.strict)
        facts = report(records, context, language=language, seconds=seconds, strict=strict)
        if report_file is not None:
            _write(report_file, facts)
        if as_json:
            print_json(facts)
        else:
            console = Console(highlight=False)
            print_checks(records, everything=True, console=console, language=language)
            print_verdict(records, seconds, console, language)
            _error_line(records, strict, language)
    raise typer.Exit(int(verdict(records, strict=strict)))


def read_waivers(given: list[str] | None) -> dict[str, str]:
    """`CHECK=REASON` by check. Raises InstallError (usage) if the reason is missing: somebody must answer for a
    waiver."""
    waivers = {}
    for text in given or []:
        name, _, reason = text.partition("=")
        if not name.strip() or len(reason.strip()) < 3:
            raise InstallError(
                t("'{text}' is not a waiver.", text=text),
                exit_code=ExitCode.USAGE,
                why=t("A waiver names the check and says why, in words."),
                changed=t("Nothing was changed."),
                hint=t("For example: {example}", example="--waive egress='the firewall closes it on Monday'"),
            )
        waivers[name.strip()] = reason.strip()
    return waivers


def _context(
    layout: Layout, bundle: Path | None, keys: list[Path], host: str | None, port: int | None, device: Device,
    gpus: tuple[str, ...], language: str,
) -> PreflightContext:
    """The plans: what the medium requires, and where the endpoint is or will be."""
    values: dict[str, Any] = {}
    if bundle is not None:
        needs = read_needs(bundle.expanduser().absolute(), keyring(layout, keys), layout)
        values = needs.values
        if not needs.verified:
            _note(t("No key was given (--trust-key), so nothing on the medium was trusted: only file sizes are used."),
                  language)  # fmt: skip
    standing = config.standing(layout)
    return PreflightContext(
        layout,
        config.Endpoint(host or standing.host, port or standing.port),
        own_pids=service_for(layout).pids() if layout.journal.exists() else frozenset(),
        device=device,
        gpus=gpus,
        tls=standing.certificate is not None,
        **values,
    )


def _medium(given: Any) -> Path | None:
    return given.bundle or next(iter(given.medium), None)


def _note(text: Text, language: str) -> None:
    typer.echo(in_words(text, language), err=True)


def _error_line(records: list[Any], strict: bool, language: str) -> None:
    """One line on stderr, because stdout goes to a file or a pipe."""
    code = verdict(records, strict=strict)
    if code and not sys.stdout.isatty():
        bad = [r for r in records if (r.status == "fail" and r.waived is None) or (code == 4 and r.status == "warn")]
        found = joined((t("{id}: {seen}", id=record.id, seen=record.observed) for record in bad), "; ")
        line = t("error: {found}  (exit code {code})", found=found, code=int(code))
        typer.echo(in_words(line, language), err=True)


def _write(path: Path, facts: dict[str, Any]) -> None:
    """The only file that this command writes, and only when asked. It replaces nothing but an earlier report."""
    if path.exists() and path.stat().st_size and not _is_report(path):
        raise usage_error(t("{path} exists already, and is not a preflight report.", path=path),
                          t("Choose another file name for --report."))  # fmt: skip
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", "utf-8")
    fresh.replace(path)


def _is_report(path: Path) -> bool:
    try:
        return "checks" in json.loads(fs.read_regular(path, 4 << 20)[0])
    except (OSError, ValueError, TypeError):
        return False
