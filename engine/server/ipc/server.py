"""The engine's end of the socket: many clients, one thread, no locks.

`poll` is called by the scheduler loop: with timeout 0 between two steps, and blocking when there is nothing to do, so
an idle engine uses no CPU. Reads, writes and decoding take microseconds beside a step of milliseconds; a second thread
would only fight the loop for the interpreter lock.
"""

import logging
import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass, field

from engine import __version__
from engine.server.ipc import messages as m
from engine.server.ipc.framing import FrameError, FrameReader, PeerCredentials, PeerPolicy, frame

log = logging.getLogger("atoll.engine")

MAX_CONNECTIONS = 64
MAX_BACKLOG_BYTES = 256 << 20   # a client with more unread events than this is dropped
HELLO_SECONDS = 10.0            # a connection that has not sent Hello by then is dropped
READ_BYTES = 256 << 10


@dataclass(slots=True, eq=False)
class Connection:
    sock: socket.socket
    peer: PeerCredentials
    number: int
    name: str = ""              # from Hello; empty until then
    follows: bool = False       # from Hello: the client wants `Moved`
    since: float = field(default_factory=time.monotonic)
    reader: FrameReader = field(default_factory=lambda: FrameReader(m.MAX_COMMAND_BYTES))
    backlog: deque[memoryview] = field(default_factory=deque)
    backlog_bytes: int = 0
    closed: bool = False

    def __str__(self) -> str:
        return f"{self.name or 'connection'}#{self.number} (pid {self.peer.pid}, uid {self.peer.uid})"


@dataclass(frozen=True, slots=True)
class Connected:
    """A client has said Hello."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is closed, for whatever reason. No further message comes from it."""


Incoming = tuple[Connection, Connected | Disconnected | m.Submit | m.Abort | m.Ping]


class IpcServer:
    """Accepts, authenticates and decodes. An error of a peer closes only that peer's connection."""

    def __init__(self, listener: socket.socket, policy: PeerPolicy, *, pid: int) -> None:
        self._listener = listener
        self._policy = policy
        self._pid = pid
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._connections: set[Connection] = set()
        self._incoming: list[Incoming] = []
        self._numbers = 0

    @property
    def wake_fd(self) -> int:
        """Writing a byte to this descriptor ends a blocking `poll`; meant for `signal.set_wakeup_fd`."""
        return self._wake_write.fileno()

    @property
    def clients(self) -> list[Connection]:
        """Connections that have said Hello."""
        return [c for c in self._connections if c.name]

    def poll(self, timeout: float | None) -> list[Incoming]:
        """Read and write; returns what clients sent. Blocks for up to `timeout` seconds (None: no limit) until
        something arrives."""
        ready = self._selector.select(0 if self._incoming else timeout)
        for key, mask in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_read:
                self._drain_wakeups()
            else:
                connection: Connection = key.data
                if mask & selectors.EVENT_WRITE and not connection.closed:
                    self._flush(connection)
                if mask & selectors.EVENT_READ and not connection.closed:
                    self._read(connection)
        if len(self._connections) > len(self.clients):
            self._drop_silent()
        incoming, self._incoming = self._incoming, []
        return incoming

    def send(self, connection: Connection, event: m.Event) -> None:
        """Send an event. Never blocks: what the socket does not accept now is kept for the next `poll`."""
        self._send_frame(connection, frame(m.encode(event)))

    def broadcast(self, event: m.Event) -> None:
        """Send to everyone who has said Hello."""
        data = frame(m.encode(event))
        for connection in self.clients:
            self._send_frame(connection, data)

    def close(self, grace_seconds: float = 1.0) -> None:
        """Write pending events for at most `grace_seconds`, then close everything."""
        deadline = time.monotonic() + grace_seconds
        for connection in list(self._connections):
            if connection.backlog:
                connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    for data in connection.backlog:
                        connection.sock.sendall(data)
                except OSError:
                    pass
            connection.sock.close()
        self._selector.close()
        for sock in (self._listener, self._wake_read, self._wake_write):
            sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the peer has left, or we are out of descriptors: both are temporary
            return
        sock.setblocking(False)
        peer = PeerCredentials.of(sock)
        if not self._policy.allows(peer) or len(self._connections) >= MAX_CONNECTIONS:
            why = "too many connections" if self._policy.allows(peer) else "not an allowed user or group"
            log.warning("refused a connection of pid %d, uid %d: %s", peer.pid, peer.uid, why)
            sock.close()
            return
        self._numbers += 1
        connection = Connection(sock, peer, self._numbers)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(connection, str(error))
            return
        if not data:
            self._drop(connection, "")
            return
        try:
            for payload in connection.reader.feed(data):
                self._handle(connection, m.decode_command(payload))
                if connection.closed:
                    return
        except (FrameError, m.MessageError) as error:
            self._drop(connection, f"not our protocol: {error}")

    def _handle(self, connection: Connection, command: m.AnyCommand) -> None:
        if isinstance(command, m.Hello):
            if connection.name:
                raise m.MessageError("a second Hello")
            self.send(connection, m.Welcome(m.PROTOCOL, __version__, self._pid))
            if command.protocol != m.PROTOCOL:
                raise m.MessageError(f"it speaks protocol {command.protocol}, we speak {m.PROTOCOL}")
            connection.name = "".join(c for c in command.client[:32] if c.isalnum() or c in "-_") or "client"
            connection.follows = command.follows
            self._incoming.append((connection, Connected()))
        elif not connection.name:
            raise m.MessageError(f"{type(command).__name__} before Hello")
        else:
            self._incoming.append((connection, command))

    def _send_frame(self, connection: Connection, data: bytes) -> None:
        if connection.closed:
            return
        view = memoryview(data)
        if not connection.backlog:
            try:
                view = view[connection.sock.send(view) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self._drop(connection, str(error))
                return
            if not view:
                return
            self._selector.modify(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        connection.backlog.append(view)
        connection.backlog_bytes += len(view)
        if connection.backlog_bytes > MAX_BACKLOG_BYTES:
            self._drop(connection, "it does not read its events")

    def _flush(self, connection: Connection) -> None:
        try:
            while connection.backlog:
                view = connection.backlog[0]
                sent = connection.sock.send(view)
                connection.backlog_bytes -= sent
                if sent < len(view):
                    connection.backlog[0] = view[sent:]
                    return
                connection.backlog.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(connection, str(error))
            return
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _drop(self, connection: Connection, why: str) -> None:
        if connection.closed:
            return
        connection.closed = True
        if why:
            log.warning("closed %s: %s", connection, why)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        connection.backlog.clear()
        self._connections.discard(connection)
        if connection.name:
            self._incoming.append((connection, Disconnected()))

    def _drop_silent(self) -> None:
        limit = time.monotonic() - HELLO_SECONDS
        for connection in [c for c in self._connections if not c.name and c.since < limit]:
            self._drop(connection, "it did not introduce itself")

    def _drain_wakeups(self) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass
