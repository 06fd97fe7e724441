"""The output of the install commands on a terminal. Plain lines if nobody watches; markup is never read from data."""

import contextlib
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from appliance.cli.common import agrees, layout_for, padded, print_json, say, say_rows, spoken
from appliance.cli.view.finding_view import print_findings
from appliance.cli.view.preflight_view import print_checks
from appliance.service.install_words import DEEDS, KINDS, STEPS
from appliance.service.words import human_bytes
from installer.access.licence import LicenceRequest
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.decide.frontend import StepStatus
from installer.decide.plan import Plan
from installer.operate.install import InstallResult
from installer.preflight import CheckRecord

_MARKS = {"done": t("ok"), "skipped": "--", "failed": t("FAILED")}
_STAGES = {"copy": t("copying"), "verify": t("verifying"), "code": t("comparing the code")}


class Terminal:
    """The installer's front end on a terminal. If the terminal disappears (a dropped SSH session), work continues."""

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
        said = "" if status == "failed" else escape(spoken(detail))  # the error itself comes last, with its advice
        mark = spoken(_MARKS[status])
        self._print(f"{' ' * (6 - cell_len(mark))}[{style}]{mark}[/]  {padded(STEPS.get(name, name), 10)} {said}")

    def progress(self, label: str, done: int, total: int) -> None:
        label = spoken(_STAGES.get(label, label))
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
        word = spoken(t("note"))
        self._print(f"{' ' * (6 - cell_len(word))}[yellow]{word}[/]  {escape(spoken(text))}")

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
        question = t("Do you accept the licence {spdx} of {model}?", spdx=request.spdx, model=request.model)
        return agrees(question, err=self.to_stderr)

    def licence_reference(self, request: LicenceRequest) -> str:
        question = t("{model} is gated. Which contract, approval or account covers its use here?", model=request.model)
        return typer.prompt(spoken(question), default="", show_default=False, err=self.to_stderr).strip()

    def ask(self, question: str) -> str:
        self._end_progress()
        return typer.prompt(spoken(question), default="", show_default=False, err=self.to_stderr).strip()

    def checklist_step(self, name: str, title: str, status: str) -> None:
        self._end_progress()
        if status == "begin":
            self._print(f"\n[bold]{escape(spoken(title))}[/]")

    def findings(self, findings: list[dict[str, Any]]) -> None:
        self._end_progress()
        print_findings(findings, self.console)

    def confirm_plan(self, plan: Plan) -> bool:
        return self.interactive and agrees(t("Continue?"), err=self.to_stderr)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.console.print(text)

    def _begin_progress(self, *, bytes_known: bool) -> None:
        self._end_progress()
        columns: list[Any] = [TextColumn("        {task.description}")]
        if bytes_known:
            columns += [BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()]
        else:
            columns += [TextColumn(spoken(t("({seconds} s)", seconds="{task.completed}")))]
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
            text = t("{stage}: {seconds} s", stage=label, seconds=done)
            if total:
                text = t("{stage}: {done} of {total}", stage=label, done=human_bytes(done), total=human_bytes(total))
            self._print(f"        {escape(spoken(text))}")
        self._last_line = now

    def _end_progress(self) -> None:
        if self._progress is not None:
            with contextlib.suppress(OSError):
                self._progress.stop()
        self._progress = self._task = None


def print_plan(plan: Plan, console: Console, prefix: Path) -> None:
    """Everything that is new or changes, in full, with paths below the prefix; what stays is only counted."""
    kept = 0
    with contextlib.suppress(OSError):
        where = t("On this server") if prefix == Path("/") else t("Under {prefix}", prefix=prefix)
        head = t("Plan: release {release}. {where}:", release=plan.release, where=where)
        if plan.previous and plan.previous != plan.release:
            head = t("Plan: release {release}, in place of {previous}. {where}:", release=plan.release,
                     previous=plan.previous, where=where)
        console.print(f"\n{spoken(head)}", markup=False)
        for item in plan.items:
            if item.deed == "keep" and item.kind != "user":
                kept += 1
                continue
            path = Path(item.what)
            below = prefix != Path("/") and path.is_relative_to(prefix)
            what = str(path.relative_to(prefix)) if below else item.what
            size = human_bytes(item.bytes) if item.bytes else ""
            note = f"  {spoken(item.note)}" if item.note else ""
            words = padded(DEEDS[item.deed], 8) + padded(KINDS[item.kind], 10)
            console.print(f"  {words} {size:>9}  {what}{note}", markup=False)
        rest = t("{size} to write.", size=human_bytes(plan.bytes))
        if kept:
            rest = t("{size} to write; unchanged: {kept}.", size=human_bytes(plan.bytes), kept=kept)
        console.print(f"  {spoken(rest)}\n", markup=False)


def print_result(result: InstallResult, layout: Layout, as_json: bool) -> None:
    """The result of an install or a rollback, with the key, which is shown only here."""
    if as_json:
        print_json(result.to_json())
        return
    typer.echo()
    if result.outcome == "dry-run":
        say(t("Dry run: nothing was changed. The same command without --dry-run does what is listed above."))
        return
    say(_done(result.outcome, f"{result.seconds:.1f}"))
    typer.echo()
    say_rows(_facts(result, layout), indent=2, width=8)
    where = "" if layout == layout_for(None) else f" --prefix {result.prefix}"
    typer.echo()
    say(t("Next: {command}", command=f"atoll status{where} · atoll logs{where} · atoll stop{where}"))


def _done(outcome: str, seconds: str) -> str:
    if outcome == "already-installed":
        return t("Already installed and healthy in {seconds} s.", seconds=seconds)
    if outcome == "rolled-back":
        return t("Gone back in {seconds} s.", seconds=seconds)
    return t("Installed in {seconds} s.", seconds=seconds)


def _facts(result: InstallResult, layout: Layout) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = [(t("endpoint"), result.url)]
    if result.certificate:
        trusted = layout.ca_cert if layout.ca_cert.exists() else result.certificate
        rows.append(("", t("clients must trust {path}", path=trusted)))
    release: str = result.release
    if result.previous:
        release = t("{release}, before it {previous}", release=result.release, previous=result.previous)
    rows.append((t("release"), release))
    named = [f"{model['instance']}  ({model['name']} {model['version']})" for model in result.models]
    rows += [(t("model"), name) for name in named]
    if result.api_key:
        rows.append((t("key"), result.api_key))
        rows.append(("", t("Keep it: it is shown only once, and only its hash is stored.")))
    else:
        rows.append((t("key"), t("the one shown when it was made (id {names})", names=", ".join(result.key_ids))))
    if result.downtime_s is not None:
        switch = t("{seconds} s without service", seconds=f"{result.downtime_s:.1f}")
        if result.startup_s is not None:
            switch = t("{seconds} s without service, its start took {startup} s", seconds=f"{result.downtime_s:.1f}",
                       startup=f"{result.startup_s:.1f}")
        rows.append((t("switch"), switch))
    return rows
