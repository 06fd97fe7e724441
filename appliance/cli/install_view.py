"""How the install commands look on a terminal. Plain lines when nobody watches; markup is never read from data."""

import contextlib
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from appliance.cli.common import layout_for, print_json
from appliance.cli.preflight_view import print_checks
from installer.errors import InstallError
from installer.frontend import StepStatus
from installer.i18n import language_of, told
from installer.layout import Layout
from installer.licence import LicenceRequest
from installer.machine import InstallResult
from installer.plan import Plan
from installer.preflight import CheckRecord

_MARKS = {"done": "ok", "skipped": "--", "failed": "FAILED"}


def human_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return ""


class Terminal:
    """The installer's front end on a terminal. A terminal that is gone (a dropped SSH session) is no reason to stop."""

    def __init__(self, prefix: Path, *, to_stderr: bool) -> None:
        self.console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self.prefix = prefix
        self.interactive = False
        self.to_stderr = to_stderr
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._label = ""
        self._last_line = 0.0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_progress()

    def step(self, name: str, status: StepStatus, detail: str = "") -> None:
        if status == "begin":
            return
        self._end_progress()
        style = "red" if status == "failed" else "green"
        said = "" if status == "failed" else escape(detail)  # the error itself comes last, with its advice
        self._print(f"[{style}]{_MARKS[status]:>6}[/]  {name:10} {said}")

    def progress(self, label: str, done: int, total: int) -> None:
        if not self.console.is_terminal:
            self._progress_line(label, done, total)
            return
        with contextlib.suppress(OSError):
            if self._progress is None or (total > 0) != (self._label == "bytes"):
                self._begin_progress(bytes_known=total > 0)
            assert self._progress is not None
            assert self._task is not None
            self._progress.update(self._task, description=escape(label), completed=done, total=total or None)

    def note(self, text: str) -> None:
        self._end_progress()
        self._print(f"[yellow]  note[/]  {escape(text)}")

    def preflight(self, records: list[CheckRecord]) -> None:
        self._end_progress()
        print_checks(records, everything=False, console=self.console)

    def plan(self, plan: Plan) -> None:
        self._end_progress()
        print_plan(plan, self.console, self.prefix)

    def accept_licence(self, request: LicenceRequest) -> bool:
        if not self.interactive:
            return False
        self._end_progress()
        with self.console.pager() if request.text.count("\n") > 40 else contextlib.nullcontext():
            self.console.print(request.text, markup=False)
        return typer.confirm(f"Do you accept the licence {request.spdx} of {request.model}?", err=self.to_stderr)

    def confirm_plan(self, plan: Plan) -> bool:
        return self.interactive and typer.confirm("Go on?", err=self.to_stderr)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.console.print(text)

    def _begin_progress(self, *, bytes_known: bool) -> None:
        self._end_progress()
        columns: list[Any] = [TextColumn("        {task.description}")]
        if bytes_known:
            columns += [BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()]
        else:
            columns += [TextColumn("({task.completed} s)")]
        self._label = "bytes" if bytes_known else "seconds"
        self._progress = Progress(*columns, console=self.console, transient=True)
        self._progress.start()
        self._task = self._progress.add_task("", total=None)

    def _progress_line(self, label: str, done: int, total: int) -> None:
        """A line every ten seconds is enough for a log file."""
        now = time.monotonic()
        if now - self._last_line < 10:
            return
        if self._last_line:
            amount = f"{human_bytes(done)} of {human_bytes(total)}" if total else f"{done} s"
            self._print(f"        {escape(label)}: {amount}")
        self._last_line = now

    def _end_progress(self) -> None:
        if self._progress is not None:
            with contextlib.suppress(OSError):
                self._progress.stop()
        self._progress = self._task = None


def print_plan(plan: Plan, console: Console, prefix: Path) -> None:
    """Everything that is new or changes, in full, paths below the prefix; what stays is counted."""
    kept = 0
    with contextlib.suppress(OSError):
        replaced = f", in place of {plan.previous}" if plan.previous and plan.previous != plan.release else ""
        where = "On this server" if prefix == Path("/") else f"Under {prefix}"
        console.print(f"\nPlan: release {plan.release}{replaced}. {where}:", markup=False)
        for item in plan.items:
            if item.deed == "keep" and item.kind != "user":
                kept += 1
                continue
            path = Path(item.what)
            below = prefix != Path("/") and path.is_relative_to(prefix)
            what = str(path.relative_to(prefix)) if below else item.what
            size = human_bytes(item.bytes) if item.bytes else ""
            note = f"  {item.note}" if item.note else ""
            console.print(f"  {item.deed:8}{item.kind:10} {size:>9}  {what}{note}", markup=False)
        rest = f"; {kept} more stay as they are" if kept else ""
        console.print(f"  {human_bytes(plan.bytes)} to write{rest}.\n", markup=False)


_DONE = {
    "installed": "Installed",
    "already-installed": "Already installed and healthy",
    "rolled-back": "Gone back",
}


def print_result(result: InstallResult, layout: Layout, as_json: bool) -> None:
    """What came of an install or a rollback; the key once."""
    if as_json:
        print_json(result.to_json())
        return
    if result.outcome == "dry-run":
        typer.echo("\nDry run: nothing was changed. The same command without --dry-run does what is listed above.")
        return
    typer.echo(f"\n{_DONE[result.outcome]} in {result.seconds:.1f} s.\n")
    typer.echo(f"  endpoint  {result.url}")
    if result.certificate:
        trusted = layout.ca_cert if layout.ca_cert.exists() else result.certificate
        typer.echo(f"            clients must trust {trusted}")
    typer.echo(f"  release   {result.release}" + (f", before it {result.previous}" if result.previous else ""))
    for model in result.models:
        typer.echo(f"  model     {model['instance']}  ({model['name']} {model['version']})")
    if result.api_key:
        typer.echo(f"  key       {result.api_key}")
        typer.echo("            Keep it: it is shown this once, and only its hash is stored.")
    else:
        typer.echo(f"  key       the one shown when it was made (id {', '.join(result.key_ids)})")
    if result.downtime_s is not None:
        started = f", its start took {result.startup_s:.1f} s" if result.startup_s is not None else ""
        typer.echo(f"  switch    {result.downtime_s:.1f} s without service{started}")
    where = "" if layout == layout_for(None) else f" --prefix {result.prefix}"
    typer.echo(f"\nNext: atoll status{where} · atoll logs{where} · atoll stop{where}")


def print_error(error: InstallError) -> None:
    """What happened, the end of the log, why, what was changed, what next: to stderr."""
    console, language = Console(stderr=True, highlight=False, soft_wrap=True), language_of()
    console.print(f"[bold red]error:[/] {escape(told(error.message, language))}")
    if error.log_tail:
        console.print("  The last lines of the log:")
        for line in error.log_tail:
            console.print(f"    {line}", markup=False)
    for text in (error.why, error.changed):
        if text:
            console.print(f"  {told(text, language)}", markup=False)
    if error.hint:
        console.print(f"  Next: {told(error.hint, language)}", markup=False)
    console.print(f"  (exit code {error.exit_code})", markup=False)
