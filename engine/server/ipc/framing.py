"""Frames on a Unix stream socket, and who may be at the other end of it.

A frame is a 4-byte big-endian length and that many bytes of msgpack. There is no TCP and no pickle here: a port scanner
cannot reach the engine, and bytes from a peer never become code.
"""

import errno
import grp
import os
import pwd
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ConfigError
from engine.message import msg, reason

LENGTH = struct.Struct(">I")
MAX_UDS_PATH = 107  # bytes; Linux's sun_path holds 108, including the terminating zero
_SO_PEERGROUPS = 59  # Linux: the supplementary groups of the peer, as an array of gid_t
_UCRED = struct.Struct("iII")


class FrameError(ValueError):
    """A peer violated the framing; the connection cannot be resynchronised and must close."""


def frame(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into frames. Never allocates more than the peer has actually sent."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads completed by `data`. Raises FrameError for an empty or oversized frame."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= LENGTH.size:
                (length,) = LENGTH.unpack_from(self._buffer, start)
                if not 0 < length <= self.max_bytes:
                    raise FrameError(f"a frame of {length} bytes; allowed are 1 to {self.max_bytes}")
                end = start + LENGTH.size + length
                if len(self._buffer) < end:
                    return
                payload = bytes(self._buffer[start + LENGTH.size : end])
                start = end
                yield payload
        finally:
            del self._buffer[:start]


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who opened the other end, according to the kernel (SO_PEERCRED): there is no secret, and nothing to forge."""

    pid: int
    uid: int
    gids: frozenset[int]

    @classmethod
    def of(cls, sock: socket.socket) -> "PeerCredentials":
        pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        gids = {gid}
        try:
            raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * 1024)
            gids.update(struct.unpack(f"{len(raw) // 4}I", raw))
        except OSError:  # a kernel older than 4.13, or more groups than fit: the primary group decides
            pass
        return cls(pid, uid, frozenset(gids))


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """Who may talk to us: our own user and root always, others by user or group id.

    In a unit with `PrivateUsers=yes`, other users appear as the overflow id 65534, so the gateway's unit is admitted by
    the group that both units share.
    """

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    own_uid: int = field(default_factory=os.geteuid)

    def allows(self, peer: PeerCredentials) -> bool:
        return peer.uid in (self.own_uid, 0) or peer.uid in self.uids or bool(peer.gids & self.gids)

    @classmethod
    def parse(cls, users: list[str], groups: list[str]) -> "PeerPolicy":
        """From names or numbers, as given on a command line. Raises ConfigError for an unknown name."""
        try:
            uids = {int(u) if u.isdigit() else pwd.getpwnam(u).pw_uid for u in users}
            gids = {int(g) if g.isdigit() else grp.getgrnam(g).gr_gid for g in groups}
        except KeyError as error:
            name = str(error.args[0]).rpartition(": ")[2]  # the text after the name of the C function
            raise ConfigError(msg("{name}: no such user or group on this machine.", name=name),
                              "--allow-user") from None
        return cls(frozenset(uids), frozenset(gids))


def check_path(path: Path) -> None:
    """Raise ConfigError unless `path` can name a Unix socket."""
    if len(os.fsencode(path)) > MAX_UDS_PATH:
        raise ConfigError(
            msg("The socket path {path} is longer than the {max_uds_path} bytes that Linux allows.", path=path,
                max_uds_path=MAX_UDS_PATH), "--uds",
            msg("Choose a directory nearer to the root."),
        )
    if not path.parent.is_dir():
        raise ConfigError(msg("The directory {parent} of the socket does not exist.", parent=path.parent),
                          "--uds", msg("Create it first."))


def listen(path: Path, *, shared_with_group: bool = False, backlog: int = 64) -> socket.socket:
    """A listening, non-blocking Unix socket at `path`, mode 0600 (0660 if shared). Replaces only a dead socket.

    Raises ConfigError if the path is unusable, is not a socket, or a living process answers on it.
    """
    check_path(path)
    _remove_dead_socket(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    old = os.umask(0o117 if shared_with_group else 0o177)  # the mode must be right from the first moment
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise ConfigError(msg("Cannot create the socket {path}: {strerror}.", path=path, strerror=reason(error)),
                          "--uds") from None
    finally:
        os.umask(old)
    sock.listen(backlog)
    sock.setblocking(False)
    return sock


def _remove_dead_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(msg("{path} exists and is not a socket.", path=path), "--uds", msg("Remove it or choose "
                                                                                             "another path."))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:  # its process has ended
                path.unlink(missing_ok=True)
                return
            if error.errno == errno.ENOENT:
                return
            raise ConfigError(msg("Cannot connect to the socket {path}: {error}.", path=path, error=reason(error)),
                              "--uds") from None
    raise ConfigError(
        msg("Another process already serves on {path}.", path=path),
        "--uds",
        msg("Stop it, or choose another path for this one."),
    )
