"""`atoll doctor`: can this machine's GPU serve? Shows the engine's self-test, which runs in its own processes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape

from appliance.cli.common import examples, padded, print_json, spoken
from engine.message import without_ids
from installer.base.i18n import t

SELF_TEST = (sys.executable, "-s", "-P", "-m", "engine.selftest", "--json")
FAILED = 1

_HELP = """Check whether this machine's GPU can serve: driver, memory, speed, and each kernel against plain arithmetic.

Changes nothing and needs no model. It uses about 1 GiB of GPU memory, or less if less is free, for about ten seconds.
It may run while a service runs, but slows it down.

Exit codes: 0 all is well, 1 a check failed, 2 there is no usable GPU.
"""
_EXAMPLES = examples("atoll doctor", "atoll doctor --json", "atoll doctor --time-limit 600")


def register(app: typer.Typer) -> None:
    """Add the command to the `atoll` command tree."""
    app.command(help=_HELP, epilog=_EXAMPLES)(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    time_limit: Annotated[
        int, typer.Option("--time-limit", metavar="SECONDS", min=1, help="Give up on a GPU that does not answer.")
    ] = 120,
) -> None:
    report = Report(None if as_json else View())
    for line in _self_test([*SELF_TEST, "--time-limit", str(time_limit)]):
        report.see(line)
    if as_json:
        print_json(report.as_json())
    else:
        report.show_end()
    raise typer.Exit(report.end["exit_code"])


def _self_test(command: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of the self-test as they come. If it could not even start, its last line says so."""
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    assert child.stderr is not None
    ended = False
    try:
        for text in child.stdout:
            line = without_ids(json.loads(text))
            ended = ended or line["kind"] == "end"
            yield line
        said = child.stderr.read().strip().splitlines()
    finally:
        child.terminate()
        child.wait()
    if not ended:
        message = t("The self-test could not start.")
        if said:
            message = t("The self-test could not start: {why}", why=said[-1])
        yield {
            "kind": "end", "exit_code": FAILED, "passed": 0, "failed": [], "skipped": 0, "seconds": 0.0,
            "message": message,
            "next": t("Atoll's installation is damaged: install it again."),
        }  # fmt: skip


class View:
    """The lines of a self-test on a terminal, as they come."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._status = self.console.status(spoken(t("starting …"))) if self.console.is_terminal else None
        if self._status:
            self._status.start()

    def see(self, line: dict[str, Any]) -> None:
        if line["kind"] == "begin" and self._status:
            self._status.update(escape(f"{line['name']} …"))
        elif line["kind"] == "fact":
            self.console.print(f"      {padded(spoken(line['name']), 28)} {spoken(line['value'])}", markup=False)
        elif line["kind"] == "check":
            self._check(line)

    def _check(self, line: dict[str, Any]) -> None:
        name = f"{line['name']:28}"
        if line.get("skipped"):
            self.console.print(f"[dim]  --  {escape(name)} {escape(spoken(line['reason']))}[/]")
            return
        word, style = (t("ok"), "green") if line["passed"] else (t("FAIL"), "bold red")
        said = spoken(word)
        mark = f"{' ' * (4 - cell_len(said))}[{style}]{said}[/]"
        numbers = ""
        if line["error"] is not None:
            numbers = t("error {error}, allowed {bound}", error=f"{line['error']:.1e}", bound=f"{line['bound']:.0e}")
        self.console.print(f"{mark}  {escape(name)} {padded(numbers, 32)} {line['ms']:8.2f} ms")
        if line.get("reason"):
            self.console.print(f"      {spoken(line['reason'])}", markup=False)

    def end(self, line: dict[str, Any]) -> None:
        if self._status:
            self._status.stop()
        self.console.print()
        style = "green" if line["exit_code"] == 0 else "bold red"
        self.console.print(spoken(line["message"]), style=style, markup=False)
        if line["next"]:
            self.console.print(spoken(t("Next: {command}", command=line["next"])), markup=False)


class Report:
    """Collects the lines of a self-test, and shows them as they come if there is a view."""

    def __init__(self, view: View | None) -> None:
        self.view = view
        self.facts: dict[str, Any] = {}
        self.checks: list[dict[str, Any]] = []
        self.end: dict[str, Any] = {}

    def see(self, line: dict[str, Any]) -> None:
        if line["kind"] == "fact":
            self.facts[line["name"]] = line.get("parts", line.get("number", line["value"]))
        elif line["kind"] == "check":
            self.checks.append({key: value for key, value in line.items() if key != "kind"})
        elif line["kind"] == "end":
            self.end = line
        if self.view:
            self.view.see(line)

    def show_end(self) -> None:
        assert self.view is not None
        self.view.end(self.end)

    def as_json(self) -> dict[str, Any]:
        end = {key: value for key, value in self.end.items() if key not in ("kind", "passed", "failed", "skipped")}
        return {"ok": end["exit_code"] == 0, **end, "facts": self.facts, "checks": self.checks}
