"""Progress of copying and hashing on stderr: a bar on a terminal, plain lines elsewhere, nothing with --json."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from appliance.cli.common import spoken
from appliance.service.words import human_bytes
from installer.base.i18n import joined, t
from offline_bundle.progress import Progress, silent

_LINE_EVERY = 5.0  # seconds between plain lines


@contextmanager
def byte_progress(labels: Mapping[str, str], *, quiet: bool = False) -> Iterator[Progress]:
    """A Progress callback for the duration of the block; `labels` gives each stage its words."""
    labels = {stage: spoken(words) for stage, words in labels.items()}
    if quiet:
        yield silent
    elif sys.stderr.isatty():
        with _bar(labels) as report:
            yield report
    else:
        yield _Lines(labels)


@contextmanager
def _bar(labels: dict[str, str]) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(labels.get(stage, stage), total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield report


class _Lines:
    """One line at the start, every few seconds, and at the end of a stage: suitable for a log."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        self.began: dict[str, tuple[float, int]] = {}
        self.last = (0.0, -1)  # when a line was printed, and for how many bytes

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        first = stage not in self.began
        began, offset = self.began.setdefault(stage, (now, done))
        due = done == total or now - self.last[0] >= _LINE_EVERY
        if not first and (not due or done == self.last[1]):
            return
        self.last = (now, done)
        rate = (done - offset) / max(now - began, 1e-3)
        text: str = t("{stage}: {done} of {total}", stage=self.labels.get(stage, stage), done=human_bytes(done),
                      total=human_bytes(total))
        if not first and rate:
            text = joined([text, f"{human_bytes(int(rate))}/s"])
            if done < total:
                text = joined([text, t("{seconds:.0f} s left", seconds=(total - done) / rate)])
        print(spoken(text), file=sys.stderr, flush=True)
