"""`atoll jobs`: long work that runs outside of this terminal."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, say, say_rows, told
from appliance.cli.language.commands import Commands
from appliance.cli.view.install_view import Terminal
from appliance.service import jobs
from installer.base.i18n import t
from installer.operate.install import key_was_shown

JobName = Annotated[str | None, typer.Argument(metavar="JOB", help="Its id (default: the running one, else the "
                                                                     "last).")]

app = Commands(help="List, watch and cancel long work that runs in the background.", no_args_is_help=True)

_STATES = {"starting": t("starting"), "running": t("running"), "ended": t("ended"), "killed": t("killed")}


@app.command(name="list", epilog=examples("atoll jobs list", "atoll jobs list --json"))
def show(prefix: Prefix = None, as_json: Json = False) -> None:
    """List the jobs since the last boot."""
    with told(as_json):
        known = [job.to_json() for job in jobs.jobs(layout_for(prefix))]
    if as_json:
        print_json({"jobs": known})
    elif not known:
        say(t("No job has run here since the last boot."))
    else:
        say_rows((job["id"], _state(job)) for job in known)


def _state(job: dict[str, Any]) -> str:
    if job["state"] == "ended":
        return t("ended, exit code {code}", code=job["exit_code"])
    return _STATES[str(job["state"])]


@app.command(epilog=examples("atoll jobs watch"))
def watch(job: JobName = None, prefix: Prefix = None, as_json: Json = False) -> None:
    """Follow a job to its end and exit with its exit code. Ctrl-C ends the watching, not the job."""
    with told(as_json):
        layout = layout_for(prefix)
        found = jobs.find(layout, job)
        with Terminal(layout.prefix, to_stderr=as_json) as terminal:
            result = jobs.watch(found, terminal)
    _say(found.id, result, as_json)


@app.command(epilog=examples("atoll jobs attach"))
def attach(job: JobName = None, prefix: Prefix = None, as_json: Json = False) -> None:
    """Take a job over: answer its questions. Ctrl-C cancels it."""
    with told(as_json):
        layout = layout_for(prefix)
        found = jobs.find(layout, job)
        with Terminal(layout.prefix, to_stderr=as_json) as terminal:
            terminal.interactive = sys.stdin.isatty()
            result, secrets = jobs.attach(found, terminal)
        _say(found.id, {**result, **secrets}, as_json)
        sys.stdout.flush()
        if secrets.get("api_key"):
            key_was_shown(layout, result["key_ids"])


@app.command(epilog=examples("atoll jobs cancel"))
def cancel(job: JobName = None, prefix: Prefix = None, as_json: Json = False) -> None:
    """Ask a job to stop. It finishes what must be complete and undoes what must not stay."""
    with told(as_json):
        found = jobs.find(layout_for(prefix), job)
        asked = found.cancel()
    if as_json:
        print_json({"job": found.id, "cancelled": asked})
    else:
        say(t("{job} was asked to stop.", job=found.id) if asked else t("{job} has already ended.", job=found.id))


@app.command(name="exec", hidden=True)
def execute(directory: Path) -> None:
    """Be the process of a job (its unit does)."""
    from appliance.service.jobs.kinds import run_spec

    raise typer.Exit(run_spec(directory))


@app.command(name="settle", hidden=True)
def settle(directory: Path) -> None:
    """Undo what a killed job has left open (its unit and its guard do)."""
    from appliance.service.jobs.guard import settle_after

    raise typer.Exit(settle_after(directory))


def _say(name: str, result: dict, as_json: bool) -> None:
    if as_json:
        print_json({"job": name, "exit_code": 0, "result": result})
        return
    say(t("{job} ended successfully.", job=name))
    if key := result.get("api_key"):
        Console(highlight=False).print(f"  {key}", markup=False)
