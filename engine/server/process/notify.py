"""systemd's readiness and watchdog protocol (sd_notify(3)): datagrams to the socket named by NOTIFY_SOCKET."""

import contextlib
import os
import select
import socket
import sys
import time

BARRIER_SECONDS = 5.0


class Notifier:
    """Does nothing if the process was not started by a `Type=notify` unit."""

    def __init__(self) -> None:
        # Removed from the environment, so that no child can report on our behalf.
        address = os.environ.pop("NOTIFY_SOCKET", "")
        microseconds = os.environ.pop("WATCHDOG_USEC", "")
        pid = os.environ.pop("WATCHDOG_PID", "")
        self.watchdog_seconds = 0.0  # the longest silence that systemd accepts; 0: no watchdog
        self._last_ping = 0.0
        self._socket: socket.socket | None = None
        if address[:1] in ("/", "@"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            self._address = "\0" + address[1:] if address[0] == "@" else address
            if microseconds.isdigit() and pid in ("", str(os.getpid())):
                self.watchdog_seconds = int(microseconds) / 1e6

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def loading(self, status: str, patience_seconds: float = 60) -> None:
        """Report what start-up is doing, and that the next report may take up to `patience_seconds`."""
        self._send(f"STATUS={status}\nEXTEND_TIMEOUT_USEC={int(patience_seconds * 1e6)}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={status}")

    def hand_over(self, pid: int) -> None:
        """Declare `pid` the service's main process, which will itself report when it is ready.

        Returns when systemd has read that: then the previous main process may end.
        """
        self._send(f"RELOADING=1\nMAINPID={pid}\nSTATUS=taking over")
        self._await_read()

    def set_watchdog(self, seconds: float) -> None:
        """Set the longest allowed silence, for a main process that did not get it from systemd."""
        self.watchdog_seconds = seconds
        if seconds:
            self._send(f"WATCHDOG=1\nWATCHDOG_USEC={int(seconds * 1e6)}")

    def watchdog(self) -> None:
        """Call from the scheduler loop, between steps: when the loop hangs, the messages must stop."""
        now = time.monotonic()
        if self.watchdog_seconds and now - self._last_ping > self.watchdog_seconds / 4:
            self._last_ping = now
            self._send("WATCHDOG=1")

    def _await_read(self) -> None:
        """Wait until systemd has read all messages so far: then it closes its copy of the descriptor
        (sd_notify_barrier(3))."""
        if self._socket is None:
            return
        here, there = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, there.to_bytes(4, sys.byteorder))]
            self._socket.sendmsg([b"BARRIER=1"], rights, 0, self._address)
        os.close(there)
        select.select([here], [], [], BARRIER_SECONDS)  # readable when every copy of the other end is closed
        os.close(here)

    def _send(self, text: str) -> None:
        if self._socket is not None:
            try:
                self._socket.sendto(text.encode(), self._address)
            except OSError:  # a full or vanished socket must never stop the engine
                pass
