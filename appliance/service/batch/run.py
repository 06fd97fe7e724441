"""Answers a file of requests: a limited number at a time, and waiting for an endpoint that is busy or restarts.

An answer counts when it is on the disk. A run that ends early, for whatever reason, loses at most the requests in
progress; the next one sends them again and skips what is done.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from appliance.load.generator import allow_connections, run_in_loop
from appliance.load.http_client import HttpClient, HttpError
from appliance.load.target import Target
from appliance.service.batch.answer_file import AnswerFile, line_of
from appliance.service.batch.request_file import BatchRequest, RequestFile, check
from installer.base.errors import ExitCode, InstallError, io_error
from installer.base.i18n import t

CONCURRENCY = 128
TIMEOUT_SECONDS = 3600.0
PATIENCE_SECONDS = 300.0       # without any answer, until the endpoint counts as gone
_TRY_AGAIN = (408, 429, 503)   # it may come later
_REFUSED = (401, 403)          # the key: every other request would be refused, too
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


@dataclass(slots=True)
class Summary:
    """`skipped`: answered by an earlier run. `left`: not answered, after an interruption."""

    total: int
    skipped: int = 0
    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def done(self) -> int:
        return self.skipped + self.succeeded + self.failed

    @property
    def left(self) -> int:
        return self.total - self.done

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "done": self.done, "left": self.left}


OnProgress = Callable[[Summary], None]


@dataclass(frozen=True, slots=True)
class Settings:
    concurrency: int = CONCURRENCY
    timeout: float = TIMEOUT_SECONDS
    patience: float = PATIENCE_SECONDS
    again: bool = False   # send requests that failed once more


def run_batch(
    requests: Path, answers: Path, target: Target, settings: Settings | None = None, *,
    on_progress: OnProgress = lambda _: None,
) -> Summary:
    """Answer all requests of a file. Ctrl-C and SIGTERM end it early (`interrupted`).

    Raises InstallError: usage (bad lines, files that do not belong together, a refused key), busy, io, or unhealthy
    when the endpoint stays away; then answers that had come are kept.
    """
    settings = settings or Settings()
    allow_connections(settings.concurrency)
    given = check(requests)
    if answers.exists() and answers.samefile(requests):
        raise InstallError(t("Requests and answers cannot be one file."), exit_code=ExitCode.USAGE,
                           changed=t("Nothing was sent."), hint=t("Give another file for the answers."))
    with AnswerFile(answers, given.places, again=settings.again) as file:
        return run_in_loop(_Run(given, file, target, settings, on_progress).to_end())


@dataclass(slots=True)
class _Answer:
    """`line`: of the file of answers. `status` 0: there was no response."""

    line: bytes
    status: int
    body: Any
    written: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Run:
    def __init__(
        self, given: RequestFile, answers: AnswerFile, target: Target, settings: Settings, on_progress: OnProgress
    ) -> None:
        self._given, self._answers, self._target, self._settings = given, answers, target, settings
        self._on_progress = on_progress
        self.summary = Summary(len(given.places), skipped=len(answers.done))
        self._heard = time.monotonic()
        self._written: asyncio.Queue[_Answer] = asyncio.Queue()

    async def to_end(self) -> Summary:
        began = time.monotonic()
        self._on_progress(self.summary)
        todo = (custom_id for custom_id in self._given.places if custom_id not in self._answers.done)
        workers = min(self._settings.concurrency, self.summary.left)
        writer = asyncio.create_task(self._write())
        with self._given.path.open("rb") as file:
            async with HttpClient(self._target) as client:
                tasks = [asyncio.create_task(self._work(client, todo, file)) for _ in range(workers)]
                try:
                    with _stopping(tasks) as stopped:
                        await _first_failure([*tasks, writer], tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    with contextlib.suppress(asyncio.CancelledError):
                        await self._finish_writing(writer)
        self.summary.interrupted = bool(stopped) and self.summary.left > 0
        self.summary.seconds = round(time.monotonic() - began, 3)
        return self.summary

    async def _work(self, client: HttpClient, todo: Iterator[str], file: Any) -> None:
        for custom_id in todo:
            request = self._given.read(custom_id, file)
            answer = await self._answer(client, request)
            self._written.put_nowait(answer)
            await answer.written

    async def _answer(self, client: HttpClient, request: BatchRequest) -> "_Answer":
        pause, since = _FIRST_PAUSE, 0.0  # of trouble
        while True:
            pieces: list[bytes] = []
            why = ""
            status, headers = 0, {}
            try:
                async with asyncio.timeout(self._settings.timeout):
                    status, headers = await client.request(
                        "POST", self._target.root + request.url, request.body,
                        lambda data, _, into=pieces: into.append(data))
            except TimeoutError:
                return self._failed(request, "timeout", f"No answer within {self._settings.timeout:g} seconds.")
            except HttpError as error:
                if error.began:
                    return self._failed(request, "bad_answer", str(error))
                why = str(error)
            except OSError as error:
                why = str(error)
            if status in _REFUSED:
                raise _refused(status, b"".join(pieces))
            if status and status not in _TRY_AGAIN:
                self._heard = time.monotonic()
                return self._responded(request, status, headers, b"".join(pieces))
            since = since or time.monotonic()
            if time.monotonic() - max(since, self._heard) >= self._settings.patience:
                raise _gone(self._target, why or f"HTTP {status}")
            await asyncio.sleep(_retry_after(headers) or pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _responded(
        self, request: BatchRequest, status: int, headers: dict[bytes, bytes], content: bytes
    ) -> "_Answer":
        try:
            body = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._failed(request, "bad_answer", f"HTTP {status} with a body that is not JSON.")
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        return _Answer(line_of(request.custom_id, status=status, request_id=request_id, body=body), status, body)

    def _failed(self, request: BatchRequest, code: str, message: str) -> "_Answer":
        return _Answer(line_of(request.custom_id, error={"code": code, "message": message}), 0, None)

    def _count(self, status: int, body: Any) -> None:
        if status == 200:
            self.summary.succeeded += 1
            usage = body.get("usage") if isinstance(body, dict) else None
            if isinstance(usage, dict):
                self.summary.prompt_tokens += _tokens(usage, "prompt_tokens", "input_tokens")
                self.summary.completion_tokens += _tokens(usage, "completion_tokens", "output_tokens")
        else:
            self.summary.failed += 1
        self._on_progress(self.summary)

    async def _write(self) -> None:
        """All answers that have come go to the disk together: one fsync serves many."""
        while True:
            batch = [await self._written.get()]
            while not self._written.empty():
                batch.append(self._written.get_nowait())
            try:
                await asyncio.to_thread(self._answers.write, [answer.line for answer in batch])
            except OSError as error:
                raise io_error(t("write the answers"), error) from None
            for answer in batch:
                self._count(answer.status, answer.body)
                if not answer.written.done():
                    answer.written.set_result(None)
                self._written.task_done()

    async def _finish_writing(self, writer: asyncio.Task[None]) -> None:
        """Answers whose workers were cancelled are kept, too."""
        all_written = asyncio.create_task(self._written.join())
        await asyncio.wait([all_written, writer], return_when=asyncio.FIRST_COMPLETED)
        for task in (all_written, writer):
            task.cancel()
        await asyncio.gather(all_written, writer, return_exceptions=True)


async def _first_failure(tasks: list[asyncio.Task[None]], workers: list[asyncio.Task[None]]) -> None:
    """Wait for all workers, or raise what the first task raised that failed."""
    while not all(task.done() for task in workers):
        ended, _ = await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            if not task.cancelled() and (error := task.exception()):
                raise error
    for task in workers:
        if not task.cancelled() and (error := task.exception()):
            raise error


@contextlib.contextmanager
def _stopping(tasks: list[asyncio.Task[None]]) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM cancel the workers; yields the signals that came."""
    came: list[int] = []
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        came.append(number)
        for task in tasks:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        yield came
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _retry_after(headers: dict[bytes, bytes]) -> float:
    text = headers.get(b"retry-after", b"").strip()
    return min(float(text), _LONGEST_PAUSE) if text.isdigit() and len(text) < 9 else 0.0


def _tokens(usage: dict[str, Any], *names: str) -> int:
    return next((usage[name] for name in names if type(usage.get(name)) is int), 0)


def _refused(status: int, content: bytes) -> InstallError:
    message = ""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        message = str(msgspec.json.decode(content)["error"]["message"])[:300]
    return InstallError(
        t("The endpoint does not accept this API key (HTTP {status}).", status=status), exit_code=ExitCode.USAGE,
        why=message, changed=t("Answers that had come are kept."),
        hint=t("Give the file of a key that may ask: --api-key-file FILE"))


def _gone(target: Target, why: str) -> InstallError:
    return InstallError(
        t("{url} does not answer.", url=target.base_url), exit_code=ExitCode.UNHEALTHY, why=why,
        changed=t("Answers that had come are kept."),
        hint=t("When it serves again, run the same command again: it continues where it stopped."))
