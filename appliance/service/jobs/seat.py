"""The seat at the screens of one installation: one operator is in control, and any number watch.

    <jobs of the installation>/seat/lock      flock of the program whose operator works; the kernel drops it with it
                                    holder    who that is, and since when
                                    request   who asks to take over
                                    answer    what the holder said to that

A request is granted when the holder consents, when nobody answers it for GRACE_SECONDS, or when the holder's program is
gone. Only users who may write to the jobs of this installation can ask: the directory belongs to one user alone.
"""

import contextlib
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance.service.jobs.spool import make_root, parsed
from installer.audit import log
from installer.base import fs
from installer.base.layout import Layout

GRACE_SECONDS = 60.0     # a request that nobody answers is granted then
_POLL_SECONDS = 0.25
_TAKING_SECONDS = 10.0   # after a grant, in which nobody but the person it was given to may take the seat
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Person:
    """Who sits at a terminal. `origin`: the address an SSH session comes from, or the name of the terminal."""

    id: str
    user: str
    origin: str
    pid: int
    since: float

    @classmethod
    def here(cls) -> "Person":
        origin = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
        if not origin:
            with contextlib.suppress(OSError):
                origin = os.ttyname(0).removeprefix("/dev/")
        return cls(secrets.token_hex(8), str(log.operator()["user"])[:80], origin[:80] or "-", os.getpid(), time.time())


class Seat:
    """One program's side of the seat. Its own thread calls `asked` with the person who asks to take over, and with None
    when the request has been settled. It calls `changed` when the seat was won, lost or refused."""

    def __init__(
        self, layout: Layout, asked: Callable[[Person | None], None], changed: Callable[[], None],
        *, grace: float = GRACE_SECONDS,
    ) -> None:
        self.layout, self.grace = layout, grace
        self.me = Person.here()
        self.held = False
        self.refused = False                 # my last request was
        self._asked, self._changed = asked, changed
        self._lock = -1
        self._path: Path | None = None
        self._request: tuple[Person, float] | None = None   # that I must answer, and since when
        self._mine = ""                      # the id of my open request
        self._answers: list[bool] = []
        self._stop = threading.Event()
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="seat", daemon=True)

    def open(self) -> "Seat":
        """Sit down if the seat is free. Raises OSError, InstallError where there can be no seat."""
        self._path = make_root(self.layout) / "seat"
        self._path.mkdir(mode=0o700, exist_ok=True)
        self._take("")
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
        with self._mutex:
            self._drop()
            if self._mine:
                self._remove("request")

    def holder(self) -> Person | None:
        """The operator in control, if that is somebody else."""
        if self.held or self._path is None:
            return None
        return _person(self._path / "holder")

    def ask(self) -> None:
        """Ask the holder to let me work."""
        with self._mutex:
            self.refused, self._mine = False, secrets.token_hex(8)
            self._write("request", asdict(self.me) | {"id": self._mine, "since": time.time()})

    def answer(self, yes: bool) -> None:
        """What the operator here says to the request."""
        self._answers.append(yes)

    # -- in the thread

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            with contextlib.suppress(OSError), self._mutex:
                self._hold() if self.held else self._wait()

    def _hold(self) -> None:
        assert self._path is not None
        request = _person(self._path / "request")
        if request is None:
            if self._request is not None:
                self._request = None
                self._asked(None)
            return
        if self._request is None or self._request[0].id != request.id:
            self._request = (request, time.monotonic())
            self._answers.clear()
            self._asked(request)
        yes = self._answers.pop() if self._answers else None
        if yes is None and time.monotonic() - self._request[1] >= self.grace:
            yes = True
        if yes is None:
            return
        self._request = None
        self._write("answer", {"id": request.id, "granted": yes})  # the other side always finds this or its request
        self._remove("request")
        self._asked(None)
        if yes:
            self._drop()
            self._changed()

    def _wait(self) -> None:
        assert self._path is not None
        request, said = _read(self._path / "request"), _read(self._path / "answer")
        granted = said.get("granted") is True
        if self._mine and said.get("id") == self._mine:
            if not granted:
                self._remove("answer")
                self._refuse()
                return
            # The answer stays until the seat is taken: the holder has not left it yet, and nobody else may take it.
        elif self._mine and request.get("id") != self._mine:
            self._refuse()  # somebody else asked after me, or was quicker
            return
        elif said and granted and self._fresh("answer"):
            return  # the seat was given to somebody else, who is about to take it
        if self._take(self._mine):
            self._mine = ""
            self._changed()

    def _refuse(self) -> None:
        self.refused, self._mine = True, ""
        self._changed()

    def _take(self, by_request: str) -> bool:
        assert self._path is not None
        fd = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        before = _person(self._path / "holder")
        self._lock = fd
        self._write("holder", asdict(self.me) | {"since": time.time()})
        for name in ("request", "answer"):
            self._remove(name)
        if by_request:
            self._record(before)
        self.held = True
        return True

    def _record(self, before: Person | None) -> None:
        """Who took over from whom, in the audit log of the installation, once it has one."""
        with contextlib.suppress(OSError):
            if self.layout.state.is_dir():
                log.append(self.layout.audit, "seat-taken-over", origin=self.me.origin,
                           before={"user": before.user, "origin": before.origin} if before else None)  # fmt: skip

    def _drop(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock, self.held = -1, False

    def _fresh(self, name: str) -> bool:
        assert self._path is not None
        with contextlib.suppress(OSError):
            return time.time() - (self._path / name).stat().st_mtime < _TAKING_SECONDS
        return False

    def _write(self, name: str, facts: dict[str, Any]) -> None:
        assert self._path is not None
        fs.write_atomic(self._path / name, json.dumps(facts) + "\n", 0o600)

    def _remove(self, name: str) -> None:
        assert self._path is not None
        (self._path / name).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return parsed(file.read(_MAX_BYTES)) or {}
    except OSError:
        return {}


def _person(path: Path) -> Person | None:
    facts = _read(path)
    try:
        return Person(str(facts["id"]), str(facts["user"]), str(facts["origin"]), int(facts["pid"]),
                      float(facts["since"]))  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None
