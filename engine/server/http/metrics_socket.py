"""`/metrics` on a Unix socket, for the sampler on this machine.

The sampler needs no API key and no network for it, and this socket answers nothing else. The rights of its directory
decide who may connect. Its path comes in the environment, which an older release ignores where it would refuse a flag.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

VARIABLE = "ATOLL_METRICS_SOCKET"
MOST_REQUEST = 4096   # bytes up to the empty line
MOST_AT_ONCE = 4
SECONDS = 5.0         # for a whole exchange

log = logging.getLogger("atoll.metrics")


async def listen(render: Callable[[], bytes]) -> asyncio.Server | None:
    """Answer with what `render` returns; None where no socket is wanted, or none can be made: requests come first."""
    if not (wanted := os.environ.get(VARIABLE)):
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
                request = await reader.readuntil(b"\r\n\r\n")
                good = request.startswith(b"GET /metrics ")
                body = render() if good else b""
                status = "200 OK" if good else "404 Not Found"
                writer.write(f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                             f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            busy -= 1
            writer.close()

    try:
        with contextlib.suppress(FileNotFoundError):  # left by a process that was killed
            path.unlink()
        server = await asyncio.start_unix_server(answer, path, limit=MOST_REQUEST)
        path.chmod(0o660)
    except OSError as error:
        log.warning("%s: no history is kept, /metrics cannot be offered there: %s", path, error)
        return None
    return server
