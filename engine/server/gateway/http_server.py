"""uvicorn with our limits: how connections are accepted, and how the server stops without dropping a request."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from engine.server.http.connections import Acceptor
from engine.server.http.limits import Limits
from engine.server.http.protocol import BoundedHttpProtocol
from engine.server.observe.access_log import AccessLog
from engine.server.openai.serving import Gateway

ARRIVAL_SECONDS = 2.0  # how long a client that connected just before the shutdown may take to send its request
ARRIVAL_POLL_SECONDS = 0.1


class HttpServer(uvicorn.Server):
    """uvicorn on sockets that are listening already. Connections are bounded, `main_loop.py` handles signals, and a
    shutdown answers every request that was sent before it."""

    def __init__(self, config: uvicorn.Config, protocol: type[BoundedHttpProtocol]) -> None:
        super().__init__(config)
        self._protocol = protocol
        self.gateway: Gateway | None = None  # for the sockets of this machine's own programs (local_socket.py)
        self.connections = protocol.connections_open

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's, for sockets that are listening already."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            self.should_exit = True
            return
        self.connections.fit_descriptors()
        self.servers = [  # type: ignore[assignment]
            Acceptor(listener, self.connections, self._protocol.limits, self._make_protocol, self.config.ssl)
            for listener in sockets or []
        ]
        self.started = True

    def _make_protocol(self) -> BoundedHttpProtocol:
        return self._protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, wait for requests that are arriving, answer all of them, and close."""
        for server in self.servers:
            server.close()
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while self._arriving() and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(ARRIVAL_POLL_SECONDS)
        self.connections.ended = True
        await super().shutdown(sockets)

    def _arriving(self) -> bool:
        """Whether a request may be on its way."""
        return bool(self.connections.arriving) or any(server.handshaking for server in self.servers)  # type: ignore[attr-defined]


def make_server(app: ASGIApp, limits: Limits, *, access_log: bool, shutdown_timeout: float,
                ssl_certfile: Path | None, ssl_keyfile: Path | None) -> HttpServer:
    """A server for `app`, with our limits and access log instead of uvicorn's."""
    protocol = BoundedHttpProtocol.with_limits(limits)
    config = uvicorn.Config(
        AccessLog(app) if access_log else app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # ours holds no query strings
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]
        timeout_graceful_shutdown=max(1, round(shutdown_timeout)),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
    )
    return HttpServer(config, protocol)
