"""kill -9, at a chosen moment, of a forked process that does some work."""

import os
import signal
import traceback
from collections.abc import Callable


def killed_at(nth: int, work: Callable[[], object]) -> bool:
    """Run `work` in a forked process that dies by SIGKILL right after its nth fsync; False if it ended before that."""
    pid = os.fork()
    if pid == 0:
        real, count = os.fsync, 0

        def fsync(fd: int) -> None:
            nonlocal count
            real(fd)
            count += 1
            if count == nth:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = fsync
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, code = os.waitpid(pid, 0)
    if os.WIFSIGNALED(code):
        assert os.WTERMSIG(code) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(code) == 0
    return False


def killed_at_step(step: str, event: str, work: Callable[[], object]) -> bool:
    """As `killed_at`, right after the journal has recorded `event` of `step`."""
    pid = os.fork()
    if pid == 0:
        from installer.base.journal import Journal

        real = Journal.add

        def add(self: Journal, name: str, **data: object) -> dict:
            record = real(self, name, **data)
            if self._fd >= 0 and name == event and data.get("step", step) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return record

        Journal.add = add  # type: ignore[method-assign]
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, code = os.waitpid(pid, 0)
    return os.WIFSIGNALED(code)


def fsyncs(work: Callable[[], object]) -> int:
    """How many times `work` makes something durable."""
    real, count = os.fsync, 0

    def fsync(fd: int) -> None:
        nonlocal count
        real(fd)
        count += 1

    os.fsync = fsync
    try:
        work()
    finally:
        os.fsync = real
    return count
