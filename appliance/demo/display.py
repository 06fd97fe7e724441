"""How the demonstration shows its steps: live bars on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

REPORT_EVERY = 5.0  # seconds between two plain lines about the same work


class Step:
    """One numbered step while it runs. `progress` has the signature that every long job here uses."""

    def __init__(self, display: "Display", title: str) -> None:
        self.display = display
        self.result = title
        self.known = False
        self._bar: Progress | None = None
        self._last = ("", 0.0)

    def show_on(self, bar: Progress) -> None:
        """Report on the first task of `bar` instead of in lines."""
        self._bar = bar

    def pause(self) -> None:
        """Clear the bar from the screen: what follows is written piece by piece."""
        if self._bar is not None:
            self._bar.stop()

    def progress(self, what: str, done: int = 0, total: int = 0) -> None:
        """Say what is being done; `done` of `total` bytes or seconds if known."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], what=what, completed=done, total=total or None)
            return
        now = time.monotonic()
        if what != self._last[0] or now - self._last[1] >= REPORT_EVERY:
            self._last = (what, now)
            self.display.line(f"      {what}" + (f" {100 * done // total} %" if total else "") + " …")

    def note(self, text: str) -> None:
        """A line that stays."""
        self.display.line(f"      {text}")

    def already(self, result: str) -> None:
        """This step was done by an earlier run."""
        self.known, self.result = True, result

    def done(self, result: str) -> None:
        """What this step has made."""
        self.result = result


class Display:
    """Numbered steps on `stream`: live on a terminal, plain lines in a pipe or a log."""

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.console = Console(file=self.stream, highlight=False, soft_wrap=True)
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._steps, self._number = steps, 0

    def line(self, text: str = "", style: str | None = None) -> None:
        """Print one line as it is, without markup."""
        self.console.print(text, style=style, markup=False)
        self.stream.flush()

    def write(self, text: str) -> None:
        """Print a piece of the streamed answer."""
        self.stream.write(text)
        self.stream.flush()

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Run one step; on success its title, result and time stay on the screen."""
        self._number += 1
        step = Step(self, title)
        self.line(f"[{self._number}/{self._steps}] {title}", style="bold")
        began = time.monotonic()
        if self.live:
            bar = Progress(
                TextColumn("     "),
                SpinnerColumn(),
                TextColumn("{task.fields[what]}", markup=False),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            )
            bar.add_task("", what=title, total=None)
            step.show_on(bar)
            with bar:
                yield step
        else:
            yield step
        mark = "already done" if step.known else "done"
        self.line(f"      ✓ {step.result} · {mark} · {time.monotonic() - began:.1f} s", style="green")
