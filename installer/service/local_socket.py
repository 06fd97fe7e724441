"""Asks the gateway over one of its Unix sockets (engine/server/http/local_socket.py)."""

import json
import socket
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from installer.base.layout import Layout


def ask(path: Path, target: str, *, seconds: float, most: int, method: str = "GET") -> bytes | None:
    """The answer to `METHOD target`; None where nobody answers, or with more than `most` bytes."""
    connection = _UnixConnection("localhost", timeout=seconds)
    connection.path = path
    try:
        connection.request(method, target)
        answer = connection.getresponse()
        body = answer.read(most + 1)
        return body if answer.status == 200 and len(body) <= most else None
    except (HTTPException, OSError):
        return None
    finally:
        connection.close()


def admin_socket(layout: Layout) -> Path | None:
    """Where the gateway of this installation has its admin socket; None if that is not known."""
    if layout.system:
        return layout.run / "gateway/admin.sock"
    try:
        told = json.loads(layout.service_state.read_text(encoding="utf-8")).get("admin")
    except (OSError, ValueError, AttributeError):
        return None
    return Path(told) if isinstance(told, str) and told else None


class _UnixConnection(HTTPConnection):
    path = Path()

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))
