"""Unix sockets for programs on this machine that need neither an API key nor a network.

    ATOLL_METRICS_SOCKET   GET /metrics    for the sampler: mode 0660, the group may connect
    ATOLL_ADMIN_SOCKET     mode 0600, the owner and root
                           GET /requests   the active requests, for the dashboard
                           GET /drain      whether new requests are refused, and how many still run
                           POST /drain     refuse new ones; DELETE /drain takes them again

The path is passed in the environment, because an older release ignores a variable but would refuse a flag. The sockets
answer only the requests listed here.
"""

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

MOST_REQUEST = 4096   # bytes up to the empty line
MOST_AT_ONCE = 4
SECONDS = 5.0         # for a whole exchange

log = logging.getLogger("atoll.gateway")


@dataclass(frozen=True, slots=True)
class LocalSocket:
    variable: str   # environment variable that holds the path
    mode: int
    loss: str       # what does not work without it, for the log


METRICS = LocalSocket("ATOLL_METRICS_SOCKET", 0o660, "no history is kept")
ADMIN = LocalSocket("ATOLL_ADMIN_SOCKET", 0o600,
                    "the dashboard shows no active requests, and atoll drain does not work")


async def listen(which: LocalSocket, answers: Mapping[str, Callable[..., tuple[bytes, str]]]) -> asyncio.Server | None:
    """Answer a request without a body with (body, content type) of `answers["METHOD /path"]`, or of
    `answers["METHOD /path?"]`, which gets the query as it was sent.

    Returns None if no socket is wanted, or none can be created: the API must work without it.
    """
    if not (wanted := os.environ.get(which.variable)):
        return None
    path, busy = Path(wanted), 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal busy
        if busy >= MOST_AT_ONCE:
            writer.close()
            return
        busy += 1
        try:
            async with asyncio.timeout(SECONDS):
                method, target, *_ = (*(await reader.readuntil(b"\r\n\r\n")).split(b" ", 2), b"", b"")
                asked = b" ".join((method, target)).decode("ascii", "replace")
                path, _, query = asked.partition("?")
                render = answers.get(asked)
                if render is None and (with_query := answers.get(f"{path}?")) is not None:
                    render = partial(with_query, query)
                body, kind = render() if render is not None else (b"", "text/plain")
                status = "200 OK" if render is not None else "404 Not Found"
                writer.write(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n"
                             f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            busy -= 1
            writer.close()

    try:
        _make_way(path)
        return await asyncio.start_unix_server(answer, sock=_bound(path, which.mode), limit=MOST_REQUEST)
    except OSError as error:
        log.warning("%s: %s, this socket cannot be offered: %s", path, which.loss, error)
        return None


def _bound(path: Path, mode: int) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    old = os.umask(0o777 & ~mode)  # the mode must be right from the first moment
    try:
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    finally:
        os.umask(old)
    return bound


def _make_way(path: Path) -> None:
    """Remove the socket of a process that was killed. Raises OSError if other users could replace it."""
    directory = path.parent.stat()
    if directory.st_mode & stat.S_IWOTH and not directory.st_mode & stat.S_ISVTX:
        raise PermissionError(f"everybody may write to {path.parent}")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} exists and is not a socket")
    path.unlink()
