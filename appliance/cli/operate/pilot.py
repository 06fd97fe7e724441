"""`atoll pilot`: let users in by stages, watched, with a way back; then decide."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, say, say_rows, spoken, told
from appliance.cli.language.commands import Commands
from installer.audit import log
from installer.base.errors import ExitCode, usage_error
from installer.base.i18n import joined, t
from installer.base.layout import Layout

if TYPE_CHECKING:
    from appliance.service.pilot.records import PilotState

By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who decides (recorded in the audit log).")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where the report goes (default: in the "
                                                                       "installation).")]
app = Commands(
    help="Let users in stage by stage, with stop conditions and a way back; report and sign the result.",
    no_args_is_help=True,
)
_EXIT_CODES = (
    "Exit codes: 0 ok, 2 wrong plan or nothing to do, 3 a stage was stopped or missed its goal, 30 the disk, 40 the "
    "service does not answer, 75 another command is running, 130 interrupted."
)


@app.command(epilog=examples("atoll pilot plan --example > pilot.toml", "atoll pilot plan pilot.toml"))
def plan(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The plan, TOML.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a plan as a start for your own.")] = False,
    as_json: Json = False,
) -> None:
    """Check a plan, or print one as a start for your own. Changes nothing."""
    from appliance.service.pilot.plan import EXAMPLE, read_plan
    from appliance.service.planning import cost

    with told(as_json):
        if example:
            typer.echo(EXAMPLE, nl=False)
            return
        if file is None:
            raise usage_error(t("No plan was given."), t("Begin with an example: atoll pilot plan --example"))
        found = read_plan(file)
        cost.assumed(found.cost)
        if as_json:
            print_json(found.model_dump(mode="json"))
            return
        say_rows((stage.name, t("{seconds:,.0f} s, users {users}", seconds=stage.duration, users=joined(stage.users)))
                 for stage in found.stages)  # fmt: skip


@app.command(epilog=examples("sudo atoll pilot start --plan pilot.toml", "sudo atoll pilot start      # go on",
                             then=_EXIT_CODES))  # fmt: skip
def start(
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="The plan; without it, the open pilot continues.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Do not follow the pilot; `atoll jobs watch` follows "
                                                                "it later.")] = False,
    by: By = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Start a pilot, or continue one that was interrupted. It is a job: it outlives this terminal.

    Ctrl-C interrupts the pilot; until it continues, only the users that `way_back` names are admitted.
    """
    from appliance.cli.view.install_view import Terminal
    from appliance.service import jobs
    from appliance.service.jobs.launch import launch, new_job
    from appliance.service.pilot import records
    from appliance.service.pilot.plan import read_plan
    from appliance.service.pilot.run import PilotRequest, nothing_installed, pilot_work
    from installer.base.lock import refuse_if_busy

    with told(as_json):
        layout = layout_for(prefix)
        if not layout.state.is_dir():
            raise nothing_installed()
        refuse_if_busy(records.lock_of(layout))
        request = PilotRequest(plan=read_plan(plan) if plan else None, by=_who(by))
        given, work = request.model_dump(mode="json"), pilot_work(request, layout)
        if detach:
            job = new_job(layout, "pilot", kind="pilot", given=given, interactive=False)
            launch(job, work)
            if as_json:
                print_json({"job": job.id})
            else:
                say(t("It runs as job {job}. Follow it: atoll jobs watch", job=job.id))
            return
        with Terminal(layout.prefix, to_stderr=as_json) as terminal:
            jobs.run(layout, "pilot", work, terminal, kind="pilot", given=given, interactive=False)
        state = records.read(layout)
        _show(layout, state, as_json)
    if state.outcome == "stopped":
        raise typer.Exit(ExitCode.PREFLIGHT_FAIL)


@app.command(epilog=examples("atoll pilot status", "atoll pilot status --json"))
def status(prefix: Prefix = None, as_json: Json = False) -> None:
    """Show the stages, and the figures of those that have ended or are running."""
    from appliance.service.pilot import records

    with told(as_json):
        layout = layout_for(prefix)
        _show(layout, records.read(layout), as_json)


@app.command(epilog=examples("sudo atoll pilot advance"))
def advance(by: By = None, prefix: Prefix = None, as_json: Json = False) -> None:
    """Start the next stage, if the plan leaves that to a person."""
    from appliance.service.pilot.run import advance as begin_next

    with told(as_json):
        _done(begin_next(layout_for(prefix), _who(by)), as_json)


@app.command(epilog=examples("sudo atoll pilot stop"))
def stop(by: By = None, prefix: Prefix = None, as_json: Json = False) -> None:
    """End the pilot. Every API key may use the service again, as before it."""
    from appliance.service.pilot.run import abort, nothing_installed

    with told(as_json):
        layout = layout_for(prefix)
        if not layout.state.is_dir():
            raise nothing_installed()
        _done(abort(layout, _who(by)), as_json)


@app.command(epilog=examples("sudo atoll pilot report", "sudo atoll pilot report --out /root/pilot"))
def report(out: Out = None, prefix: Prefix = None, as_json: Json = False) -> None:
    """Write the report: JSON, Markdown and HTML, in Korean and English."""
    from appliance.service.pilot import records
    from appliance.service.pilot import report as reports

    with told(as_json):
        layout = layout_for(prefix)
        state = records.read(layout)
        directory = out or layout.checklist / "reports"
        _written(reports.write(layout, directory, state, state.signed), as_json)


@app.command(epilog=examples("sudo atoll pilot sign --go --by 'Kim Minsu'",
                             "sudo atoll pilot sign --no-go --by 'Kim Minsu' --reason 'too slow'"))  # fmt: skip
def sign(
    by: Annotated[str, typer.Option("--by", metavar="NAME", help="The person who decides.", show_default=False)],
    go: Annotated[bool, typer.Option("--go/--no-go", help="The decision.", show_default=False)],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why.", show_default=False)] = "",
    out: Out = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Sign the finished pilot. The report's SHA-256 goes into the audit log. With --go every key is admitted."""
    from appliance.service.pilot import report as reports

    with told(as_json):
        layout = layout_for(prefix)
        directory = out or layout.checklist / "reports"
        _written(reports.sign(layout, directory, "go" if go else "no-go", by, reason), as_json)


def _who(by: str | None) -> str:
    return (by or str(log.operator()["user"]))[:100]


def _done(what: str, as_json: bool) -> None:
    if as_json:
        print_json({"done": str(what)})
    else:
        say(what)


def _written(written: Any, as_json: bool) -> None:
    if as_json:
        print_json({"go": written.go, "directory": str(written.directory), "sha256": written.files})
        return
    say(t("go is recommended") if written.go else t("go is NOT recommended"))
    for name, digest in written.files.items():
        typer.echo(f"{digest}  {written.directory / name}")


def _show(layout: Layout, state: "PilotState", as_json: bool) -> None:
    from appliance.service.pilot import records
    from appliance.service.pilot.kpi import Kpi
    from appliance.service.pilot.report import FIGURES, STATUS
    from installer.base.lock import holder
    from installer.base.messages import decode

    watched = holder(records.lock_of(layout)) is not None
    figures = [_live(layout, state, number) if each.status == "running" else each.kpi
               for number, each in enumerate(state.stages)]  # fmt: skip
    if as_json:
        stages = [
            {"name": each.name, "status": each.status, "began": each.at or None, "kpi": kpi,
             "why": [str(decode(why)) for why in each.why]} for each, kpi in zip(state.stages, figures, strict=True)
        ]  # fmt: skip
        print_json({"outcome": state.outcome, "open": state.open, "watched": watched, "signed": state.signed,
                    "stages": stages})  # fmt: skip
        return
    if state.plan is None:
        say(t("There is no pilot. Plan one: atoll pilot plan --example"))
        return
    for each, stage, kpi in zip(state.stages, state.plan.stages, figures, strict=True):
        say(t("{stage}: {status}, {users}", stage=each.name, status=STATUS[each.status], users=joined(stage.users)))
        for why in each.why:
            say(joined(["  ", decode(why)], ""))
        if kpi:
            shown = ((title, form.format(value)) for name, title, form in FIGURES
                     if (value := getattr(Kpi(**kpi), name)) is not None)  # fmt: skip
            say_rows(shown, indent=2)
    if state.open and not watched:
        say(t("It is not being watched right now. To continue: atoll pilot start"), err=True)
    elif state.signed:
        say(t("signed by {by} at {at}", by=state.signed["by"], at=state.signed["at"]))
    elif state.outcome == "done":
        say(t("Next: {command}", command=spoken("atoll pilot sign --go --by NAME")))


def _live(layout: Layout, state: "PilotState", number: int) -> dict[str, Any]:
    """The current figures of a running stage."""
    from appliance.series import Series, SeriesError
    from appliance.service.pilot import records
    from appliance.service.pilot.kpi import measure

    stage = state.stages[number]
    try:
        with Series(records.series_of(layout)) as series:
            window = series.window(stage.start or 0.0, series.last_at or time.time())
            return measure(window, state.plan.stages[number].goal).model_dump() if state.plan else {}
    except SeriesError:
        return {}
