"""The file of answers, one JSON object a line, in the order in which they came:

    {"id": "batch_req_…", "custom_id": "a-1", "error": null,
     "response": {"status_code": 200, "request_id": "…", "body": {…}}}

It is the only record of what is done. A line counts once it is on the disk; half a line, which a kill or a power cut
left at the end, is removed when the batch continues.
"""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Container, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t


def line_of(custom_id: str, *, status: int = 0, request_id: str = "", body: Any = None, error: Any = None) -> bytes:
    """`status` 0: there was no response, and `error` says why."""
    response = {"status_code": status, "request_id": request_id, "body": body} if status else None
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


class _Response(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


_decoder = msgspec.json.Decoder(_Line)


class AnswerFile:
    """Open it as a context manager. `done`: custom_id → whether it succeeded."""

    def __init__(self, path: Path, known: Container[str], *, again: bool = False) -> None:
        """`known`: the custom_ids of the requests. `again`: requests that failed count as not done, and their lines are
        removed."""
        self.path = path
        self.done: dict[str, bool] = {}
        self._known, self._again = known, again
        self._fd = -1

    def __enter__(self) -> "AnswerFile":
        """Raises InstallError (usage: not the answers of this batch; busy: another run writes to it) and OSError."""
        self._open()
        try:
            end, failed = self._read()
            if self._again and failed:
                self._without(failed)
            else:
                if end < os.fstat(self._fd).st_size:
                    os.ftruncate(self._fd, end)
                os.fsync(self._fd)
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def write(self, lines: Iterable[bytes]) -> None:
        """Append whole lines, and wait until they are on the disk. If that fails, the whole lines among what was
        written stay: they are answers."""
        end = os.fstat(self._fd).st_size
        data = b"".join(lines)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, end + data.rfind(b"\n", 0, written) + 1)
            raise

    def _open(self) -> None:
        is_new = not self.path.exists()
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise InstallError(
                t("Another run writes to {path}.", path=self.path), exit_code=ExitCode.BUSY,
                changed=t("Nothing was sent."), hint=t("Wait for it, or end it.")) from None
        if is_new:
            fs.fsync_dir(self.path.parent)

    def _read(self) -> tuple[int, list[tuple[int, int]]]:
        """The end of the last whole line, and the lines (offset, length) of requests that failed."""
        end, failed = 0, []
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                if line.strip():
                    custom_id, succeeded = self._answer(number, line)
                    self.done[custom_id] = succeeded
                    if not succeeded:
                        failed.append((end, len(line)))
                end += len(line)
        return end, failed

    def _answer(self, number: int, line: bytes) -> tuple[str, bool]:
        try:
            found = _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise self._foreign(t("Line {line} is no answer.", line=number)) from None
        if found.custom_id not in self._known:
            raise self._foreign(t("Line {line} answers {id!r}, which is not among the requests.", line=number,
                                  id=found.custom_id[:80]))
        return found.custom_id, found.response is not None and found.response.status_code == 200

    def _foreign(self, why: str) -> InstallError:
        return InstallError(
            t("{path} does not hold the answers to these requests.", path=self.path), exit_code=ExitCode.USAGE, why=why,
            changed=t("Nothing was sent."), hint=t("Give a file that does not exist yet."))

    def _without(self, failed: list[tuple[int, int]]) -> None:
        """Replace the file by one without these lines; a power cut leaves the old one or the new one."""
        other = self.path.with_name(f"{self.path.name}.partial")
        fd = os.open(other, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = dict(failed)
            with open(self._fd, "rb", closefd=False) as old, open(fd, "wb", closefd=False) as new:
                old.seek(0)
                at = 0
                for line in old:
                    if at not in gone and line.endswith(b"\n"):
                        new.write(line)
                    at += len(line)
            os.fchmod(fd, os.fstat(self._fd).st_mode & 0o777)
            os.fsync(fd)
            other.replace(self.path)
        except BaseException:
            os.close(fd)
            other.unlink(missing_ok=True)
            raise
        fs.fsync_dir(self.path.parent)
        os.close(self._fd)
        self._fd = fd
        self.done = {custom_id: True for custom_id, succeeded in self.done.items() if succeeded}
