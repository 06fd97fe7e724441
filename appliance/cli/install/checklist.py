"""`atoll checklist`: from a bare server to a running service, step by step. It handles flags and output;
appliance/service does the work."""

import contextlib
import getpass
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, say, say_rows, told
from appliance.cli.install.preflight import read_waivers
from appliance.cli.language.commands import Commands
from appliance.cli.view.finding_view import print_state
from appliance.cli.view.install_view import Terminal
from appliance.service import answers as answers_of
from appliance.service import checklist
from appliance.service.run_request import RunRequest
from installer.base.errors import usage_error
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.decide.answers import Answers
from installer.operate.install import key_was_shown

_HELP = """Go from a bare server to a running service, step by step.

Each step records what it found and decided. A run resumes at the first step that is not done, even after a reboot.
When what a step depends on changes, it and the later ones become stale and run again.
"""
Medium = Annotated[
    list[Path] | None, typer.Argument(metavar="MEDIUM", help="The mounted disk, or a bundle's directory.")
]
AnswersFile = Annotated[
    Path | None,
    typer.Option("--answers", metavar="FILE", help="Answers for an unattended run (TOML). Decisions of the run are "
                                                   "written back to it."),
]
TrustKey = Annotated[
    list[Path] | None,
    typer.Option("--trust-key", metavar="PUB", help="The vendor's public key, obtained through a separate channel."),
]
Waive = Annotated[
    list[str] | None,
    typer.Option("--waive", metavar="CHECK=REASON", help="Continue although CHECK blocks; name and reason are "
                                                         "recorded."),
]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port of the endpoint (default: as installed, else 8443; under a "
                                                    "prefix 8000).")
]
By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who decides (default: this user).")]

app = Commands(help=_HELP, epilog=examples("atoll checklist", "atoll checklist run /media/usb"))


@app.callback(invoke_without_command=True)
def _default(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        show()


@app.command(epilog=examples("atoll checklist show", "atoll checklist show --json"))
def show(prefix: Prefix = None, as_json: Json = False) -> None:
    """Show the steps, which are done, and what comes next. Changes nothing."""
    with told(as_json):
        layout = layout_for(prefix)
        state = checklist.show(layout)
        if as_json:
            print_json(state.to_json())
        else:
            print_state(state, layout, Console(highlight=False, soft_wrap=True))


@app.command(
    epilog=examples(
        "sudo atoll checklist run /media/usb --trust-key vendor.pub",
        "sudo atoll checklist run --answers answers.toml --json",
        "atoll checklist run --waive egress='the firewall closes it on Monday' --by 'Kim, network team'",
    ),
)
def run(
    medium: Medium = None,
    prefix: Prefix = None,
    answers: AnswersFile = None,
    trust_key: TrustKey = None,
    port: Port = None,
    waive: Waive = None,
    by: By = None,
    only: Annotated[
        list[str] | None, typer.Option("--step", metavar="NAME", help="Only this step, even if it is done; may be "
                                                                      "repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the steps from the first that is not done to the last.

    The work is a separate job: if this terminal is lost, it continues. Ctrl-C cancels it. With --answers nothing is
    asked. Exit code 0: all done; 3: blocked by a check; 20: a licence is not accepted; otherwise that of the step.
    """
    _run(tuple(only or ()), medium, prefix, answers, trust_key, port, waive, by, as_json)


@app.command(epilog=examples("atoll checklist step gpu", "atoll checklist step model --answers answers.toml"))
def step(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The step, by its name in `atoll checklist show "
                                                             "--json`.")],
    medium: Medium = None,
    prefix: Prefix = None,
    answers: AnswersFile = None,
    trust_key: TrustKey = None,
    port: Port = None,
    waive: Waive = None,
    by: By = None,
    as_json: Json = False,
) -> None:
    """Run one step, even if it is done. The steps before it must be done."""
    _run((name,), medium, prefix, answers, trust_key, port, waive, by, as_json)


@app.command(epilog=examples("atoll checklist reset", "atoll checklist reset model"))
def reset(
    name: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Only these steps (default: all, and every waiver).")
    ] = None,
    prefix: Prefix = None,
    by: By = None,
    as_json: Json = False,
) -> None:
    """Open steps again. What they have installed or changed stays, and so does the record of the reset."""
    with told(as_json):
        names = checklist.reset(layout_for(prefix), tuple(name or ()), by=by)
    if as_json:
        print_json({"reset": names})
    else:
        say(t("Open again: {names}.", names=joined(names)) if names else t("No checklist has been started here."))


@app.command(epilog=examples("atoll checklist export > answers.toml", "atoll checklist export --json"))
def export(prefix: Prefix = None, as_json: Json = False) -> None:
    """Print the current answers, for the next server; with --json the state too."""
    with told(as_json):
        layout = layout_for(prefix)
        answers = checklist.last_answers(layout)
        if as_json:
            facts = answers_of.to_json(answers)
            print_json({"answers": facts, "checklist": checklist.show(layout, answers).to_json()})
        else:
            typer.echo(answers_of.text_of(answers), nl=False)


def _run(
    steps: tuple[str, ...], media: list[Path] | None, prefix: Path | None, file: Path | None,
    keys: list[Path] | None, port: int | None, waive: list[str] | None, by: str | None, as_json: bool,
) -> None:  # fmt: skip
    with told(as_json):
        given = answers_of.read(file) if file else None
        layout = layout_for(prefix or (given.prefix if given else None))
        answers = _whole_paths(given or checklist.last_answers(layout))
        waived = read_waivers(waive)
        answers = answers.model_copy(update={
            "medium": [path.expanduser().absolute() for path in media] if media else answers.medium,
            "trust_keys": [path.expanduser().absolute() for path in keys] if keys else answers.trust_keys,
            "port": port or answers.port,
            "waivers": {**answers.waivers, **waived},
        })  # fmt: skip
        request = RunRequest(
            answers=answers_of.to_json(answers), steps=steps, by=_name(by), waived=tuple(waived),
            answers_file=str(file.expanduser().absolute()) if file else None,
            interactive=file is None and sys.stdin.isatty(),
        )  # fmt: skip
        with Terminal(layout.prefix, to_stderr=as_json) as terminal:
            terminal.interactive = request.interactive
            result, secrets = checklist.run(layout, request, terminal)
        with contextlib.suppress(OSError):  # stdout is closed: the key was not shown
            _say_result(layout, result, secrets, as_json)


def _say_result(layout: Layout, result: dict[str, Any], secrets: dict[str, str], as_json: bool) -> None:
    key = secrets.get("api_key")
    state = checklist.show(layout)
    if as_json:
        print_json({**result, "api_key": key, "checklist": state.to_json()})
    else:
        typer.echo()
        print_state(state, layout, Console(highlight=False, soft_wrap=True))
        if key:
            typer.echo()
            say_rows([(t("key"), key), ("", t("Keep it: it is shown only once, and only its hash is stored."))],
                     indent=2, width=8)  # fmt: skip
    sys.stdout.flush()
    if key:
        key_was_shown(layout, result["key_ids"])


def _whole_paths(answers: Answers) -> Answers:
    """The job has its own working directory, and the answers outlive this one."""

    def whole(path: Path | None) -> Path | None:
        return path.expanduser().absolute() if path is not None else None

    update: dict[str, Any] = {
        "medium": [whole(path) for path in answers.medium], "bundle": whole(answers.bundle),
        "prefix": whole(answers.prefix), "trust_keys": [whole(path) for path in answers.trust_keys],
    }  # fmt: skip
    if answers.tls is not None:
        files = {"certificate": whole(answers.tls.certificate), "private_key": whole(answers.tls.private_key)}
        update["tls"] = answers.tls.model_copy(update=files)
    return answers.model_copy(update=update)


def _name(by: str | None) -> str | None:
    if by is None:
        return None
    if not 2 <= len(by.strip()) <= 120 or not by.isprintable():
        raise usage_error(t("--by needs a name."), t("Say who decides: --by 'Kim, network team'"))
    return f"{by.strip()} ({getpass.getuser()})"
