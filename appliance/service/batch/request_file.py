"""The file of requests, one JSON object a line:

    {"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": […]}}

It is read twice: once as a whole before any work begins, to name every bad line, then a request at a time. So a file
of any size needs little memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from appliance.service.batch.limits import (
    MOST_ID_CHARACTERS,
    MOST_LINE_BYTES,
    MOST_REQUESTS,
    SHOWN_PROBLEMS,
    URLS,
)
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t

_BOM = b"\xef\xbb\xbf"
_FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """`body`: its JSON, as written in the file."""

    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True)
class RequestFile:
    """A file whose lines are all in order. `places`: custom_id → offset and length of its line, in the file's order."""

    path: Path
    places: dict[str, tuple[int, int]]

    def read(self, custom_id: str, file: BinaryIO) -> BatchRequest:
        """Raises InstallError if the line has changed since it was checked."""
        offset, length = self.places[custom_id]
        file.seek(offset)
        problem, request = _request(file.read(length))
        if request is None or request.custom_id != custom_id:
            raise InstallError(
                t("{path} has changed while it was worked on.", path=self.path), exit_code=ExitCode.USAGE,
                why=problem, changed=t("Answers that had come are kept."), hint=t("Run the same command again."))
        return request


def check(path: Path) -> RequestFile:
    """Read and check every line. Raises InstallError (usage) that names the bad ones, and OSError."""
    places: dict[str, tuple[int, int]] = {}
    lines_of: dict[str, int] = {}
    problems: list[str] = []
    count = 0
    with path.open("rb") as file:
        for number, offset, line in _lines(file):
            problem, request = (t("longer than {limit} MiB", limit=MOST_LINE_BYTES >> 20), None) \
                if len(line) > MOST_LINE_BYTES else _request(line)
            if request is not None and (first := lines_of.get(request.custom_id)):
                problem, request = t("custom_id {id!r} is that of line {line} too", id=request.custom_id[:80],
                                     line=first), None
            if request is None:
                count += 1
                if count <= SHOWN_PROBLEMS:
                    problems.append(t("line {line}: {problem}", line=number, problem=problem))
            else:
                places[request.custom_id] = offset, len(line)
                lines_of[request.custom_id] = number
            if len(places) > MOST_REQUESTS:
                raise _usage(t("{path} holds more than {limit} requests.", path=path, limit=MOST_REQUESTS),
                             hint=t("Split it."))
    if count:
        if count > len(problems):
            problems.append(t("and {count} more", count=count - len(problems)))
        raise _usage(t("{path} has bad lines.", path=path), why=joined(problems, "; "),
                     hint=t("Correct them and run the same command again."))
    if not places:
        raise _usage(t("{path} holds no request.", path=path),
                     hint=t("Write one a line; see: {command}", command="atoll batch run --help"))
    return RequestFile(path, places)


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """(number, offset, line) of each line that is not blank. A line that is too long is cut."""
    number = offset = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        number, start = number + 1, offset
        offset += len(line)
        piece = line
        while len(piece) > MOST_LINE_BYTES and not piece.endswith(b"\n"):
            piece = file.readline(MOST_LINE_BYTES + 1)
            offset += len(piece)
        if number == 1 and line.startswith(_BOM):
            start, line = start + len(_BOM), line[len(_BOM) :]
        if line.strip():
            yield number, start, line


def _request(line: bytes) -> tuple[str, BatchRequest | None]:
    """What is wrong with a line, or its request."""
    try:
        raw: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return t("it is not JSON"), None
    if not isinstance(raw, dict):
        return t("it is not a JSON object"), None
    if unknown := raw.keys() - _FIELDS:
        return t("{name!r} is not a field of a request", name=min(unknown)[:80]), None
    name, body = raw.get("custom_id"), raw.get("body")
    if not isinstance(name, str) or not 0 < len(name) <= MOST_ID_CHARACTERS:
        return t("custom_id must be a text of 1 to {limit} characters", limit=MOST_ID_CHARACTERS), None
    if raw.get("method") != "POST":
        return t('method must be "POST"'), None
    if raw.get("url") not in URLS:
        return t("url must be one of {urls}", urls=joined(URLS)), None
    if not isinstance(body, dict):
        return t("body must be a JSON object"), None
    if body.get("stream"):
        return t("body.stream: a batch takes whole answers; leave it out"), None
    return "", BatchRequest(name, raw["url"], msgspec.json.encode(body))


def _usage(message: str, *, why: str = "", hint: str) -> InstallError:
    return InstallError(message, exit_code=ExitCode.USAGE, why=why, changed=t("Nothing was sent."), hint=hint)
