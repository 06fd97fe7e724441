"""Ports for servers of tests."""

import random
import socket
import subprocess
import time
from functools import cache
from typing import Any

# Below the ports that systems give to connections: one of those could be taken while a server is about to listen.
_PORTS = range(16_000, 32_000)


def free_port() -> int:
    """A TCP port that nothing listens on now, and that this process has not been given before."""
    while True:
        port = _in_any_order().pop()
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port


def listening_port(process: subprocess.Popen[Any], seconds: float = 60.0) -> int:
    """The port of a program that was given port 0: nothing else can take it before the program does."""
    import psutil  # a GPU machine's Python may lack it

    deadline = time.monotonic() + seconds
    while process.poll() is None:
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return connection.laddr.port
        assert time.monotonic() < deadline, f"{process.args} listens on no port"
        time.sleep(0.05)
    raise AssertionError(f"{process.args} ended with {process.returncode} before it listened")


@cache
def _in_any_order() -> list[int]:
    """Test processes run side by side: each has an order of its own."""
    return random.SystemRandom().sample(_PORTS, len(_PORTS))
