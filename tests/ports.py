"""Ports for servers of tests."""

import random
import socket
from functools import cache

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


@cache
def _in_any_order() -> list[int]:
    """Test processes run side by side: each has an order of its own."""
    return random.SystemRandom().sample(_PORTS, len(_PORTS))
