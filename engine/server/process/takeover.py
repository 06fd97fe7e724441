"""A new engine takes over from the serving one. It does as much of its start as possible while the old one still
answers.

    systemctl reload → ExecReload → atoll engine … --take-over OLD         OLD serves
                                      └ forks the successor, which imports its libraries and checks settings and model
                                      ┌ "prepared"
                                      names the new main process to systemd, says "go", and ends
                                        └ the successor ends OLD, waits until the kernel has freed all of it, loads

So no request waits for imports. If settings or files are unusable, the successor fails and the service goes on. systemd
starts both in the unit's sandbox, and remains the parent of the main process.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable

from engine.server.process.notify import Notifier

log = logging.getLogger("atoll.engine")

DRAIN_SECONDS = 40.0   # after this the old engine is killed; its own drain is shorter
EXIT_FAILED = 1


def take_over(predecessor: int, preload: Callable[[], int], notifier: Notifier) -> None:
    """Returns in the successor when `predecessor` (a process id) is gone. The process that called it never returns.

    `preload` runs in the successor while the predecessor still serves. It returns 0, or the exit status with which the
    reload fails; then the predecessor goes on serving.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child:
        theirs.close()
        os.waitpid(child, 0)
        os._exit(_hand_over(ours, predecessor, notifier))
    if os.fork():
        os._exit(0)  # so that the successor's parent is process 1, which reaps it
    ours.close()
    try:
        old = os.pidfd_open(predecessor)
        status = preload()
    except ProcessLookupError:
        log.error("the engine to take over from, process %d, is not there", predecessor)
        status = EXIT_FAILED
    except BaseException:
        log.exception("the new engine cannot be prepared")
        status = EXIT_FAILED
    told = b""
    with contextlib.suppress(OSError):  # if the process that systemd started was killed, do not take over
        theirs.sendall(f"{status} {os.getpid()}\n".encode())
        told = theirs.recv(1)
    if status or told != b"g":
        os._exit(status or EXIT_FAILED)
    theirs.close()
    _end(old)


def _hand_over(successor: socket.socket, predecessor: int, notifier: Notifier) -> int:
    """Runs in the process that systemd started: waits for the successor and hands over to it. Returns the exit
    status."""
    with successor, successor.makefile() as lines:
        said = lines.readline().split()
        status, pid = map(int, said) if len(said) == 2 else (EXIT_FAILED, 0)
        if status:
            log.error("the new engine was not prepared; process %d serves on", predecessor)
            return status
        notifier.hand_over(pid)
        successor.sendall(b"g")
    return 0


def _end(process: int) -> None:
    """Send SIGINT, wait, send SIGKILL. The descriptor is readable when all of the process is gone, its device memory
    included."""
    began = time.monotonic()
    for number, patience in ((signal.SIGINT, DRAIN_SECONDS), (signal.SIGKILL, DRAIN_SECONDS)):
        try:
            signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            break
        if select.select([process], [], [], patience)[0]:
            break
    os.close(process)
    log.info("took over", extra={"fields": {"waited": round(time.monotonic() - began, 3)}})
