"""Whether a peer reads what we write: who reads slowly gets everything, who does not read is dropped."""

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios

CLOSE_SECONDS = 2.0     # between two looks at a connection that closes; also what a peer with nothing left to read gets
_FIRST_LOOK_SECONDS = 0.1  # by then the end of the answer is on its way
LEAST_PROGRESS = 8 << 10  # bytes that a reader takes in each period of patience; less counts as not reading
_BYTES_ACKED = 120        # offset of tcpi_bytes_acked in struct tcp_info, 8 bytes


class ReaderWatch:
    """Looks at one transport while its peer is behind. Aborts it when the peer has taken nothing for `patience`
    seconds."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, patience: float) -> None:
        self._transport, self._loop, self._patience = transport, loop, patience
        self._closing = False
        self._taken = 0        # bytes that the peer had taken when it last made progress
        self._since = 0.0      # when that was
        self._seen = 0         # bytes that it had taken when we last looked
        self._timer: asyncio.TimerHandle | None = None

    def behind(self) -> None:
        """The write buffer is full."""
        if self._timer is None:
            self._begin(self._patience)

    def caught_up(self) -> None:
        """The write buffer has room again."""
        if not self._closing:
            self.stop()

    def closing(self) -> None:
        """The transport closes. First it sends what it still has, and over TLS it awaits the peer's farewell: it would
        wait for ever."""
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
        nothing_left = taken == self._seen and not self._left()  # and nothing moves that a TLS transport may not count
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
        """Bytes that the peer's machine has acknowledged: the transport's own buffer would tell too little. The kernel
        holds more behind it, and of TLS what is encrypted already is not counted."""
        with contextlib.suppress(OSError, ValueError, struct.error):
            info = self._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            return struct.unpack_from("Q", info, _BYTES_ACKED)[0]
        return -self._left()  # a Unix socket

    def _left(self) -> int:
        """Bytes on their way to the peer, the kernel's too."""
        queued = 0
        with contextlib.suppress(OSError, ValueError):
            descriptor = self._transport.get_extra_info("socket").fileno()
            (queued,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        return self._transport.get_write_buffer_size() + queued
