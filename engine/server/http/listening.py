"""Listening sockets, bound by us or passed by systemd (sd_listen_fds(3)), and their certificate."""

import ipaddress
import os
import socket
import ssl
from pathlib import Path

from engine.errors import ConfigError
from engine.message import msg, reason

BACKLOG = 2048
FIRST_FD = 3


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(msg("--host {host}: {error}.", host=host, error=reason(error)), "--host") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(msg("Cannot listen on {host}:{port}: {strerror}.", host=host, port=port,
                              strerror=reason(error)), "--port",
                          msg("Choose another port with --port, or stop the program that uses this one.")) from None
    listener.setblocking(False)
    return listener


def check_tls(certificate: Path | None, key: Path | None) -> None:
    """Raises ConfigError unless both are absent, or form a pair that can serve."""
    if certificate is None or key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            certificate, key, password=lambda: "")  # never ask on the terminal
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or reason(error)
        raise ConfigError(msg("--ssl-certfile and --ssl-keyfile cannot be used together: {reason}.", reason=why),
                          "--ssl-certfile",
                          msg("Both must be PEM, belong to each other, and the key must not be encrypted.")) from None


def inherited_sockets() -> list[socket.socket]:
    """The sockets that were passed to this process, in the unit's order; none if it was not started by a socket unit.

    Raises ConfigError for a descriptor that is not a listening stream socket.
    """
    # Removed from the environment, so that no child takes them for its own.
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    sockets = []
    for fd in range(FIRST_FD, FIRST_FD + int(count)):
        os.set_inheritable(fd, False)
        try:
            sock = socket.socket(fileno=fd)
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise ConfigError(msg("Descriptor {fd}, which systemd passed, is not a socket: {strerror}.", fd=fd,
                                  strerror=reason(error))) from None
        if not listens or sock.type != socket.SOCK_STREAM:
            raise ConfigError(msg("Descriptor {fd}, which systemd passed, is not a listening stream socket.", fd=fd),
                              hint=msg("The socket unit needs ListenStream= and Accept=no."))
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


def is_local(sock: socket.socket) -> bool:
    """Whether only processes on this machine can reach it."""
    if sock.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def url_of(sock: socket.socket, *, tls: bool) -> str:
    """The URL under which a client on this machine reaches the socket."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, str(host))  # noqa: S104
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
