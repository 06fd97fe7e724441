"""`atoll verify-service`: does the running service keep its promises? The checklist's step `verify` on its own."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, say, spoken, told
from appliance.cli.view.finding_view import print_findings
from installer.base import fs
from installer.base.errors import ExitCode, usage_error
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.base.lock import InstallLock

if TYPE_CHECKING:
    from appliance.service.verification.plan import VerifyAnswers
    from appliance.service.verification.report import Written
    from appliance.service.verification.run import Verification
    from appliance.service.verification.subject import Subject

_LINE_EVERY = 5.0  # seconds between lines of progress

_HELP = """Verify the running service: health, conformance, quality, performance, stability, security.

Writes a report (JSON, Markdown, HTML; Korean and English), and its hash into the audit log. If it is interrupted, the
same command continues after the groups that had passed. To compare the installed files with what was signed: atoll
verify.
"""
_EXIT_CODES = (
    "Exit codes: 0 all checks passed, 2 wrong flags, 3 a check failed, 30 the report cannot be written, 75 another "
    "verification is running, 130 interrupted."
)


def register(app: typer.Typer) -> None:
    lines = (
        "sudo atoll verify-service",
        "atoll verify-service --group conformance --group security",
        "atoll verify-service --profile chat --target ttft=500ms,itl=50ms,share=95%,users=8 --soak 3600",
        "atoll verify-service --base-url https://llm:8443 --ca atoll-ca.crt --api-key-file key --report out",
    )
    app.command(name="verify-service", help=_HELP, epilog=examples(*lines, then=_EXIT_CODES))(command)


def command(
    prefix: Prefix = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="An endpoint elsewhere, such as https://llm:8443.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="With --base-url: the model (default: the first that "
                                                                 "is served).")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", metavar="FILE", help="With --base-url: file with the API key "
                                                            "($OPENAI_API_KEY)."),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="FILE", help="With --base-url: its certificate authority, PEM.")
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option("--group", metavar="NAME", help="Only this group; may be repeated (all).")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="NAME|FILE", help="Traffic: chat, documents, batch, single, or a file."),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="NAME=VALUE", help="Targets: ttft, tpot, itl, e2el (ms), share, users, "
                                                            "output_throughput, request_throughput, error_rate, "
                                                            "perplexity_rise, top1_agreement."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", metavar="N", min=1, help="Requests of each load (default: as the "
                                                                        "profile says).")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="S", min=1, help="Length of each load, instead of --requests.")
    ] = None,
    soak: Annotated[
        float | None, typer.Option("--soak", metavar="S", min=0, help="Seconds of the soak test; 0 skips it (120).")
    ] = None,
    quality_reference: Annotated[
        Path | None,
        typer.Option("--quality-reference", metavar="FILE", help="Scores of the 16-bit weights, written by atoll bench "
                                                                 "quality --save."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="DIR", help="Where the report goes (default: in the installation)."),
    ] = None,
    as_json: Json = False,
) -> None:
    with told(as_json):
        changes = {"groups": group, "profile": profile, "requests": requests, "seconds": seconds, "soak_seconds": soak,
                   "quality_reference": None if quality_reference is None else str(quality_reference.absolute())}
        given = {name: value for name, value in changes.items() if value is not None}
        if base_url is not None:
            found, written = _somewhere_else(base_url, model, api_key_file, ca, given, target or [], report, as_json)
        elif model or api_key_file or ca:
            raise usage_error(t("--model, --api-key-file and --ca belong to --base-url."), t("Give --base-url too."))
        else:
            found, written = _installed(layout_for(prefix), given, target or [], report, as_json)
        if as_json:
            print_json({"passed": found.passed, **found.model_dump(mode="json"),
                        "report": str(written.directory), "sha256": written.files})  # fmt: skip
        else:
            say(t("All checks passed.") if found.passed else t("NOT every check passed."))
            say(t("Report: {path}", path=written.html))
        if not found.passed:
            raise typer.Exit(ExitCode.PREFLIGHT_FAIL)


def _installed(
    layout: Layout, given: dict[str, Any], targets: list[str], report: Path | None, as_json: bool
) -> tuple["Verification", "Written"]:
    """The service that is installed here. Raises InstallError, OSError."""
    from appliance.service.checklist import last_answers
    from appliance.service.verification import report as reports
    from appliance.service.verification.run import forget
    from appliance.service.verification.subject import of_installation

    plan = _plan(getattr(last_answers(layout), "verify"), given, targets)  # noqa: B009 - a table that a step adds
    with of_installation(layout) as subject:
        fs.make_dir(layout.checklist, 0o700)
        with InstallLock(layout.checklist / "lock", "verify-service"):
            state = layout.checklist / "verification"
            found = _run(subject, plan, state, as_json)
            written = reports.write(found, report or layout.checklist / "reports", layout=layout)
            forget(state)
    return found, written


def _somewhere_else(
    url: str, model: str | None, key: Path | None, ca: Path | None, given: dict[str, Any], targets: list[str],
    report: Path | None, as_json: bool,
) -> tuple["Verification", "Written"]:  # fmt: skip
    """An endpoint on another machine. Raises InstallError, OSError."""
    from appliance.load import Target, read_key
    from appliance.load.generator import run_in_loop
    from appliance.load.senders import OpenAISender
    from appliance.service.verification import report as reports
    from appliance.service.verification.plan import VerifyAnswers
    from appliance.service.verification.subject import Served, Subject

    plan = _plan(VerifyAnswers(), given, targets)
    if report is None:
        raise usage_error(t("An endpoint elsewhere needs --report DIR."), t("Say where the report goes."))
    target = Target(url, model, key=read_key(key), ca=ca)

    async def served() -> str:
        asked = OpenAISender(target, "chat", {})
        try:
            await asked.open()
            return asked.model
        finally:
            await asked.close()

    name = run_in_loop(served())
    found = _run(Subject(target, [Served(name, name.rsplit("/", 1)[-1])]), plan, None, as_json)
    return found, reports.write(found, report, mode=0o644)


def _plan(standing: Any, given: dict[str, Any], targets: list[str]) -> "VerifyAnswers":
    """The answers, changed by flags. Raises InstallError (usage) before anything runs."""
    from pydantic import ValidationError

    from appliance.load.profile import find_profile
    from appliance.service.verification.plan import VerifyAnswers, with_targets
    from installer.decide.answers import problems

    try:
        plan = VerifyAnswers.model_validate({**standing.model_dump(), **given})
    except ValidationError as error:
        found = joined(problems(error, VerifyAnswers), "; ")
        raise usage_error(t("These flags do not fit together: {names}.", names=found),
                          t("See: {command}", command="atoll verify-service --help")) from None
    find_profile(plan.profile)
    return plan.model_copy(update={"targets": with_targets(plan.targets, targets)})


def _run(subject: "Subject", plan: "VerifyAnswers", state: Path | None, as_json: bool) -> "Verification":
    from appliance.service.verification.run import TITLES, verify

    last = time.monotonic()

    def told(label: str, done: int, total: int) -> None:
        nonlocal last
        if not as_json and time.monotonic() - last >= _LINE_EVERY:
            last = time.monotonic()
            say(t("{what}: {done} of {total}", what=label, done=done, total=total), err=True)

    def begin(group: Any) -> None:
        if not as_json:
            say(t("Verifying: {group}", group=TITLES[group]), err=True)

    found = verify(subject, plan, told=told, state=state, begin=begin)
    if not as_json:
        console = Console(highlight=False, soft_wrap=True)
        for group in found.groups:
            console.print(f"\n[bold]{spoken(TITLES[group.group])}[/]")
            print_findings(group.findings, console)
        say()
    return found
