"""What the load generator shows: progress on stderr, tables on stdout."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.cells import cell_len

from appliance.cli.common import padded, say, say_rows, spoken
from appliance.load.compare import Row
from appliance.load.generator import OnProgress, Progress
from appliance.load.result import METRICS, LoadResult
from installer.base.i18n import joined, t

_LINE_EVERY = 5.0  # seconds between plain lines
_TITLES = {"ttft": t("time to first token"), "tpot": t("time per token"), "itl": t("wait between tokens"),
           "e2el": t("whole request")}  # fmt: skip
_KINDS = {
    "connect": t("no connection"), "timeout": t("too slow"), "truncated": t("stream cut off"),
    "malformed": t("not an answer"), "stream_error": t("error in the stream"), "empty": t("no token"),
}  # fmt: skip


@contextmanager
def load_progress(*, quiet: bool, label: str = "") -> Iterator[OnProgress | None]:
    """A bar on a terminal, a line now and then elsewhere, nothing with --quiet."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar(label) as report:
            yield report
    else:
        yield _lines(label)


@contextmanager
def _bar(label: str) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None, said="")

        def report(seen: Progress) -> None:
            total, done = (seen.total_seconds, seen.seconds) if seen.total is None else (seen.total, seen.done)
            progress.update(task, total=total, completed=done, said=spoken(_said(seen)))

        yield report


def _lines(label: str) -> OnProgress:
    last = time.monotonic()

    def report(seen: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY:
            last = time.monotonic()
            say(joined([*([label] if label else []), _said(seen)], ": "), err=True)

    return report


def _said(seen: Progress) -> str:
    if seen.phase == "warmup":
        return t("warming up, {done} of {total}", done=seen.done, total=seen.total)
    rate = f"{seen.tokens_out / seen.seconds:,.0f}" if seen.seconds else "0"
    parts = [t("{done} requests", done=seen.done) if seen.total is None else
             t("{done} of {total} requests", done=seen.done, total=seen.total), t("{rate} tokens/s", rate=rate)]
    if seen.failed:
        parts.append(t("{failed} failed", failed=seen.failed))
    return joined(parts)


def print_result(result: LoadResult) -> None:
    """One run: what was sent, throughputs, a table of latencies, what went wrong."""
    arrival = t("{rate} requests/s", rate=f"{result.request_rate:g}") if result.request_rate is not None else t(
        "{clients} clients, each waits for its answer", clients=result.max_concurrency or 1)
    rows: list[tuple[str, str]] = [
        (t("endpoint"), f"{result.base_url} {result.model_id}".strip()),
        (t("load"), f"{result.profile}: {spoken(arrival)}"),
        (t("requests"), t("{good} answered, {failed} failed, in {seconds} s", good=result.completed,
                          failed=result.failed, seconds=f"{result.duration:.1f}")),
        (t("tokens"), t("{inward} in, {out} out", inward=f"{result.total_input_tokens:,}",
                        out=f"{result.total_output_tokens:,}")),
        (t("throughput"), t("{requests} requests/s, {out} tokens out/s, {total} tokens in and out/s",
                            requests=f"{result.request_throughput:.2f}", out=f"{result.output_throughput:,.1f}",
                            total=f"{result.total_token_throughput:,.1f}")),
        (t("peak"), t("{out} tokens out/s, {count} requests at once", out=f"{result.max_output_tokens_per_s:,.0f}",
                      count=result.max_concurrent_requests)),
    ]  # fmt: skip
    if result.slo_share is not None and result.request_goodput is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in result.slo.items())
        rows.append((t("within targets"), t("{share} of the requests, {rate} requests/s ({limits})",
                                            share=f"{result.slo_share:.1%}", rate=f"{result.request_goodput:.2f}",
                                            limits=limits)))  # fmt: skip
    say_rows(rows)
    _print_latencies(result)
    _print_errors(result)
    if result.interrupted:
        say(t("Interrupted: these are the results until then."), err=True)


def _print_latencies(result: LoadResult) -> None:
    names = sorted({name for metric in METRICS for name in getattr(result, metric).percentiles} - {"50"}, key=float)
    head = ["ms", t("mean"), t("median"), *(f"p{name}" for name in names), t("longest")]
    table = [[
        f"{spoken(_TITLES[metric])} ({metric.upper()})", *(f"{value:,.1f}" for value in (
            latency.mean, latency.median, *(latency.percentiles.get(name, 0.0) for name in names), latency.max))]
        for metric in METRICS if (latency := getattr(result, metric)).mean
    ]  # fmt: skip
    if table:
        say()
        print_table([[spoken(cell) for cell in head], *table])


def _print_errors(result: LoadResult) -> None:
    if result.error_kinds:
        say()
        say(t("What failed:"))
        kinds = sorted(result.error_kinds.items(), key=lambda pair: -pair[1])
        say_rows([(error_title(kind), _with_example(count, result.error_examples.get(kind, [])))
                  for kind, count in kinds], indent=2)  # fmt: skip
    if result.without_usage:
        say(t("{count} answers did not report their number of tokens; pieces of text were counted instead.",
              count=result.without_usage))
    if result.unfinished:
        say(t("{count} requests were still running when the time was up.", count=result.unfinished))


def error_title(kind: str) -> str:
    return t("HTTP {status}", status=kind[5:]) if kind.startswith("http_") else _KINDS.get(kind, kind)


def _with_example(count: int, examples: list[str]) -> str:
    return f"{count}  {' '.join(spoken(examples[0]).split())[:160]}" if examples else str(count)


def print_table(rows: list[list[str]]) -> None:
    """The first column to the left, numbers to the right."""
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [padded(row[0], widths[0])]
        cells += [" " * (width - cell_len(cell)) + cell for cell, width in zip(row[1:], widths[1:], strict=True)]
        typer.echo("  ".join(cells).rstrip())


def print_comparison(rows: list[Row], notes: list[str], names: tuple[str, str]) -> None:
    words: dict[bool | None, Callable[[], str]] = {
        True: lambda: spoken(t("better")), False: lambda: spoken(t("worse")), None: lambda: "",
    }  # fmt: skip
    table = [["", *names, "", ""]]
    for row in rows:
        unit = f" {row.unit}" if row.unit else ""
        change = "" if row.change is None else f"{row.change:+.1%}"
        table.append([spoken(row.title), f"{row.before:,.2f}{unit}", f"{row.after:,.2f}{unit}", change,
                      words[row.better]()])  # fmt: skip
    print_table(table)
    if notes:
        say()
        say(t("Compare with care:"))
        for note in notes:
            say(joined(["  ", note], ""))
