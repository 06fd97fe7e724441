"""`atoll batch`: a file of requests, answered by the running service into a file of answers."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, say, spoken, told
from appliance.cli.language.commands import Commands
from appliance.service.batch.limits import MOST_CONCURRENCY
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t

if TYPE_CHECKING:
    from appliance.load.target import Target
    from appliance.service.batch.run import Summary

_LINE_EVERY = 5.0  # seconds between plain lines
_FORMAT = """Each line of IN is one request: {"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions",
"body": {"messages": [{"role": "user", "content": "Hello"}]}}. Urls: /v1/chat/completions, /v1/completions,
/v1/embeddings, /v1/responses."""
_EXIT_CODES = (
    "Exit codes: 0 all requests succeeded, 2 wrong flags or lines, 3 some failed (their lines in OUT say why), "
    "30 OUT cannot be written, 40 the endpoint does not answer, 75 another run writes to OUT, 130 interrupted."
)

app = Commands(
    help="Answer a file of requests (OpenAI's and vLLM's batch format) with the running service.",
    no_args_is_help=True,
    epilog=examples("atoll batch run requests.jsonl answers.jsonl", "atoll batch check requests.jsonl"),
)
Requests = Annotated[Path, typer.Argument(metavar="IN", help="File of requests, JSON lines.")]


@app.command(epilog=f"{_FORMAT}\n\n" + examples(
    "atoll batch run requests.jsonl answers.jsonl",
    "atoll batch run requests.jsonl answers.jsonl --api-key-file key --concurrency 256",
    "atoll batch run in.jsonl out.jsonl --url https://llm:8443 --ca atoll-ca.crt --api-key-file key",
    "atoll batch run in.jsonl out.jsonl --retry-failed --json",
    then=_EXIT_CODES,
))
def run(
    requests: Requests,
    answers: Annotated[Path, typer.Argument(metavar="OUT", help="File of answers. Requests that it already answers "
                                                                "are not sent again.")],
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="An endpoint elsewhere, such as https://llm:8443.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="File with the API key ($OPENAI_API_KEY).")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="FILE", help="With --url: its certificate authority, PEM.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, max=MOST_CONCURRENCY, help="Requests at a time.")
    ] = 128,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1, help="Seconds that one answer may take.")
    ] = 3600.0,
    patience: Annotated[
        float, typer.Option("--patience", metavar="S", min=0, help="Seconds without any answer until the run ends.")
    ] = 300.0,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Send again the requests that failed in an earlier run.")
    ] = False,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Answer all requests of IN into OUT. If it is interrupted or killed, the same command continues where it stopped.

    Every line of IN is checked before the first request is sent. OUT has one line for each request, in the order in
    which the answers came, each on the disk before it counts.
    """
    from appliance.service.batch.run import Settings, run_batch

    with told(as_json):
        target = _target(url, api_key_file, ca, prefix)
        settings = Settings(concurrency, timeout, patience, retry_failed)
        with _progress() as on_progress:
            summary = run_batch(requests, answers, target, settings, on_progress=on_progress)
        if as_json:
            print_json({"requests": str(requests), "answers": str(answers), **summary.to_json()})
        else:
            _print(summary, answers)
        if summary.interrupted:
            raise typer.Exit(ExitCode.INTERRUPTED)
        if summary.failed:
            raise typer.Exit(ExitCode.PREFLIGHT_FAIL)


@app.command(epilog=examples("atoll batch check requests.jsonl", "atoll batch check requests.jsonl --json"))
def check(requests: Requests, as_json: Json = False) -> None:
    """Check every line of a file of requests, and send nothing."""
    from appliance.service.batch.request_file import check as checked

    with told(as_json):
        found = checked(requests)
        if as_json:
            print_json({"requests": str(requests), "total": len(found.places)})
        else:
            say(t("All {count} requests of {path} are well formed.", count=len(found.places), path=requests))


def _target(url: str | None, key: Path | None, ca: Path | None, prefix: Path | None) -> "Target":
    """The endpoint named, or that of the installation. Raises InstallError."""
    from appliance.load.target import Target, read_key
    from installer.release import config

    if url is not None:
        return Target(url, key=read_key(key), ca=ca)
    if ca is not None:
        raise _usage(t("--ca belongs to --url."), t("Give --url too."))
    layout = layout_for(prefix)
    if not layout.config.exists():
        raise _usage(t("No service is installed here."), t("Name one: --url https://llm:8443"))
    endpoint = config.standing(layout)
    return Target(endpoint.url, key=read_key(key), pinned=endpoint.certificate)


@contextmanager
def _progress() -> Iterator[Callable[["Summary"], None]]:
    """A bar on a terminal, a line now and then elsewhere; on stderr."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn(),
               TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, said="")

        def report(seen: "Summary") -> None:
            progress.update(task, total=seen.total, completed=seen.done, said=spoken(_said(seen)))

        yield report


def _lines() -> Callable[["Summary"], None]:
    began = last = time.monotonic()

    def report(seen: "Summary") -> None:
        nonlocal last
        now = time.monotonic()
        answered = seen.succeeded + seen.failed
        if now - last >= _LINE_EVERY and answered:
            last = now
            left = round((now - began) / answered * seen.left)
            say(t("{done} of {total}, about {left} s left; {said}", done=seen.done, total=seen.total, left=left,
                  said=_said(seen)), err=True)

    return report


def _said(seen: "Summary") -> str:
    return t("{failed} failed", failed=seen.failed) if seen.failed else t("none failed")


def _print(summary: "Summary", answers: Path) -> None:
    say(t("{done} of {total} requests are answered: {succeeded} now, {failed} failed, {skipped} by an earlier run.",
          done=summary.done, total=summary.total, succeeded=summary.succeeded, failed=summary.failed,
          skipped=summary.skipped))
    say(t("Tokens: {prompt} in, {completion} out, in {seconds} s.", prompt=summary.prompt_tokens,
          completion=summary.completion_tokens, seconds=f"{summary.seconds:.1f}"))
    say(t("Answers: {path}", path=answers))
    if summary.interrupted:
        say(t("Interrupted. Run the same command again to continue."))
    elif summary.failed:
        say(t("To send failed requests again, run the same command with --retry-failed."))


def _usage(message: str, hint: str) -> InstallError:
    return InstallError(message, exit_code=ExitCode.USAGE, changed=t("Nothing was sent."), hint=hint)
