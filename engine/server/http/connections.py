"""Accepts connections and keeps count of them, in all and per address; decides which one is closed to make room.

    accept ──► room? ──► TLS handshake ──► headers ──► request ──► idle ──► headers …
               │         └───────── may be closed ──┘  protected   └ may be closed

At its limit the server closes the connection that has been idle longest (connections that have shown a valid key come
last) and accepts the new one. So a crowd of silent connections displaces itself, and a client that sends a request is
served. A connection whose client does not read its answer counts as idle. A new connection is refused only if all
others are busy: with a 503, or with a 429 if only those of its address are. If many are being refused at once, further
ones are closed without a reply.

We accept connections ourselves, because asyncio's servers tell a protocol nothing before the TLS handshake is complete:
neither who connected, nor that somebody connected and left.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

from engine.server.http.errors import ApiError, overloaded
from engine.server.http.limits import Limits

log = logging.getLogger("atoll.server")

RESERVED_DESCRIPTORS = 256  # for everything but clients: engines' sockets, files, connections being refused
MAX_REFUSALS = 64           # connections that are being told the reason of their refusal at one time
REFUSAL_SECONDS = 2.0       # for the TLS handshake of such a connection
_ACCEPTS_A_TURN = 64        # after so many, other work of the event loop gets its turn
_NO_DESCRIPTORS_SECONDS = 0.5
_TLS_END_SECONDS = 86400.0  # reader_watch.py ends it far sooner, except for a client that still reads
_KERNEL_BUFFER_BYTES = 64 << 10  # unsent bytes per connection: an answer that nobody reads must not take megabytes
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection:
    """One accepted connection. `close` ends it at once, whatever it is doing."""

    __slots__ = ("address", "close", "refused")

    def __init__(self, address: str | None, refused: ApiError | None = None) -> None:
        self.address = address  # None: a Unix socket
        self.refused = refused  # why it is refused, or None
        self.close: Callable[[], object] = lambda: None


class Connections:
    """The open connections of one server."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._most = limits.max_connections
        self._open: set[Connection] = set()
        self._per_address: Counter[str] = Counter()
        self._strangers: dict[Connection, None] = {}  # idle ones, longest first, that have shown no valid key
        self._idle: dict[Connection, None] = {}       # idle ones whose last request had a valid key
        self._refusals = 0
        # Connections whose request may be arriving: just accepted, or in the headers. If a server that stops dropped
        # one of these, a request would be lost without anybody knowing.
        self.arriving: set[Any] = set()
        self.ended = False  # the shutdown no longer waits for arriving requests

    def __len__(self) -> int:
        return len(self._open)

    def fit_descriptors(self) -> None:
        """Raise this process's limit of open files as far as allowed, and accept only as many connections as leave a
        reserve."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                soft = hard
            except (OSError, ValueError) as error:
                log.warning("the limit of open files stays at %d: %s", soft, error)
        if soft == resource.RLIM_INFINITY:
            return
        room = max(1, soft - RESERVED_DESCRIPTORS)
        if room < self._most:
            log.warning("at most %d connections instead of %d: this process may open %d files", room, self._most, soft)
            self._most = room

    def admit(self, address: str | None) -> Connection | None:
        """Accept a new connection, if need be in place of an idle one. If the result is `refused`, tell the client why
        and close it; if it is None, close it without a reply."""
        limits, most = self._limits, self._limits.max_connections_per_address
        # Check the address first: a client that exceeds its own share must not displace others.
        if address is not None and most and self._per_address[address] >= most and not self._displace(address):
            return self._refuse(address, overloaded(
                f"Your address may have {most} connections; close one, or wait for an answer to end.",
                limits.retry_after_seconds, status=429, code="too_many_connections"))
        if len(self._open) >= self._most and not self._displace(None):
            return self._refuse(address, overloaded(
                f"The server is at its limit of connections. Retry in {limits.retry_after_seconds} seconds.",
                limits.retry_after_seconds, code="too_many_connections"))
        connection = Connection(address)
        self._open.add(connection)
        self._strangers[connection] = None
        if address is not None:
            self._per_address[address] += 1
        return connection

    def _refuse(self, address: str | None, why: ApiError) -> Connection | None:
        if self._refusals >= MAX_REFUSALS:
            return None
        self._refusals += 1
        return Connection(address, why)

    def working(self, connection: Connection) -> None:
        """Call when a request has arrived, or its answer is read again: the connection is not closed to make room."""
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)

    def waits(self, connection: Connection, *, known: bool) -> None:
        """Call when the connection waits for its client, to send a request or to read. `known`: the last request had a
        valid key."""
        if connection in self._open:
            (self._idle if known else self._strangers)[connection] = None

    def gone(self, connection: Connection) -> None:
        """Call when the connection is closed. Calling it twice does no harm."""
        if connection.refused is not None:
            connection.refused = None
            self._refusals -= 1
        if connection not in self._open:
            return
        self._open.discard(connection)
        self.working(connection)
        if connection.address is not None:
            self._per_address[connection.address] -= 1
            if not self._per_address[connection.address]:
                del self._per_address[connection.address]

    def _displace(self, address: str | None) -> bool:
        """Close the connection (of that address, if given) that has been idle longest. Returns whether there was
        one."""
        waiting = chain(self._strangers, self._idle)
        longest = next((c for c in waiting if address is None or c.address == address), None)
        if longest is None:
            return False
        self.gone(longest)
        longest.close()
        return True


class Acceptor:
    """Accepts from one listening socket. Has the methods of `asyncio.Server` that uvicorn calls."""

    def __init__(self, listener: socket.socket, connections: Connections, limits: Limits,
                 make_protocol: Callable[[], Any], context: ssl.SSLContext | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener, self._connections, self._limits = listener, connections, limits
        self._make_protocol, self._context = make_protocol, context
        self._handshakes: set[asyncio.Task[None]] = set()
        self._resume: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    @property
    def handshaking(self) -> bool:
        """Whether a TLS handshake is in progress."""
        return bool(self._handshakes)

    def close(self) -> None:
        """Stop listening. Accepted connections stay open."""
        if self._resume is not None:
            self._resume.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    async def wait_closed(self) -> None:
        """Drop connections that are still in the handshake."""
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                peer, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
                continue  # the client left before it was accepted
            peer.setblocking(False)
            if peer.family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(OSError):
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _KERNEL_BUFFER_BYTES)
            connection = self._connections.admit(address_group(peer.family, address))
            if connection is None:
                peer.close()
                continue
            task = self._loop.create_task(self._begin(peer, connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _begin(self, peer: socket.socket, connection: Connection) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection.close = task.cancel

        def protocol() -> Any:
            made = self._make_protocol()
            made.connection = connection
            return made

        seconds = self._limits.handshake_seconds if connection.refused is None else REFUSAL_SECONDS
        tls = self._context is not None
        try:
            await self._loop.connect_accepted_socket(
                protocol, peer, ssl=self._context, ssl_handshake_timeout=seconds if tls else None,
                ssl_shutdown_timeout=_TLS_END_SECONDS if tls else None,
            )
        except BaseException as error:
            self._connections.gone(connection)
            peer.close()
            if not isinstance(error, OSError | asyncio.CancelledError):  # ssl.SSLError and timeouts are OSErrors
                raise

    def _pause(self, error: OSError) -> None:
        """Pause accepting because the machine has no descriptors left: new clients wait in the kernel's queue."""
        log.error("cannot accept connections for a moment: %s", error.strerror)
        self._loop.remove_reader(self._listener.fileno())
        self._resume = self._loop.call_later(
            _NO_DESCRIPTORS_SECONDS, lambda: self._loop.add_reader(self._listener.fileno(), self._accept)
        )


def address_group(family: int, address: Any) -> str | None:
    """What counts as one address: an IPv4 address, or a /64, which one IPv6 host controls. None for a Unix socket."""
    if family == socket.AF_INET:
        return address[0]
    if family != socket.AF_INET6:
        return None
    parsed = ipaddress.IPv6Address(address[0].partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))
