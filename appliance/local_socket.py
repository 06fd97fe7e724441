"""Asks the gateway over one of its Unix sockets (engine/server/http/local_socket.py)."""

import socket
from http.client import HTTPConnection, HTTPException
from pathlib import Path


def get(path: Path, target: str, *, seconds: float, most: int) -> bytes | None:
    """The answer to `GET target`; None where nobody answers, or with more than `most` bytes."""
    connection = _UnixConnection("localhost", timeout=seconds)
    connection.path = path
    try:
        connection.request("GET", target)
        answer = connection.getresponse()
        body = answer.read(most + 1)
        return body if answer.status == 200 and len(body) <= most else None
    except (HTTPException, OSError):
        return None
    finally:
        connection.close()


class _UnixConnection(HTTPConnection):
    path = Path()

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))
