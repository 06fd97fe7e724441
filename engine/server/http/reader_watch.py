"""Watches whether a client reads what we write: a slow reader gets everything, one that does not read is dropped."""

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios

CLOSE_SECONDS = 2.0     # between checks of a closing connection; also granted to a client that has everything
_FIRST_LOOK_SECONDS = 0.1  # by then the end of the answer has been sent
LEAST_PROGRESS = 8 << 10  # bytes that a client must read in each period of patience; less counts as not reading
_BYTES_ACKED = 120        # offset of tcpi_bytes_acked in struct tcp_info, 8 bytes


class ReaderWatch:
    """Watches one transport while its client is behind. Aborts it when the client has read nothing for `patience`
    seconds."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, patience: float) -> None:
        self._transport, self._loop, self._patience = transport, loop, patience
        self._closing = False
        self._taken = 0        # bytes that the client had read when it last made progress
        self._since = 0.0      # when that was
        self._seen = 0         # bytes that it had read at our last check
        self._timer: asyncio.TimerHandle | None = None

    def behind(self) -> None:
        """Call when the write buffer is full."""
        if self._timer is None:
            self._begin(self._patience)

    def caught_up(self) -> None:
        """Call when the write buffer has room again."""
        if not self._closing:
            self.stop()

    def closing(self) -> None:
        """Call when the transport is closing. It first sends its remaining bytes, and with TLS it waits for the
        client's close_notify, possibly for ever: so it must be watched."""
        if not self._closing:
            self.stop()
            self._closing = True
            self._begin(_FIRST_LOOK_SECONDS)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, seconds: float) -> None:
        self._taken = self._seen = self._taken_now()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        taken, now = self._taken_now(), self._loop.time()
        nothing_left = taken == self._seen and not self._left()  # and no bytes moved that a TLS transport may not count
        self._seen = taken
        if taken - self._taken >= LEAST_PROGRESS:
            self._taken, self._since = taken, now
        waited = now - self._since
        if waited >= (CLOSE_SECONDS if self._closing and nothing_left else self._patience):
            self._timer = None
            self._transport.abort()
        else:
            pause = min(CLOSE_SECONDS, self._patience - waited) if self._closing else self._patience - waited
            self._timer = self._loop.call_later(pause, self._look)

    def _taken_now(self) -> int:
        """Bytes that the client's machine has acknowledged. The transport's own buffer would not be enough: the kernel
        buffers more after it, and with TLS it does not count what is already encrypted."""
        with contextlib.suppress(OSError, ValueError, struct.error):
            info = self._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            return struct.unpack_from("Q", info, _BYTES_ACKED)[0]
        return -self._left()  # a Unix socket

    def _left(self) -> int:
        """Unsent bytes, including those in the kernel."""
        queued = 0
        with contextlib.suppress(OSError, ValueError):
            descriptor = self._transport.get_extra_info("socket").fileno()
            (queued,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        return self._transport.get_write_buffer_size() + queued
