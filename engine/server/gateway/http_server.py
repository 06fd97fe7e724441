"""The gateway of `atoll serve`: uvicorn on the bound socket, the supervised engine, and what a person sees of both."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from engine import __version__
from engine.errors import AtollError, ModelError, complain
from engine.server.gateway.app import create_app
from engine.server.http.access_log import AccessLog
from engine.server.http.auth import KeyFile
from engine.server.http.connections import Acceptor
from engine.server.http.limits import Limits
from engine.server.http.metrics import Metrics
from engine.server.http.protocol import BoundedHttpProtocol
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel
from engine.server.process.notify import Notifier
from engine.server.process.supervisor import EngineChild, EngineFailedError
from engine.server.settings.options import ServeOptions

log = logging.getLogger("atoll.serve")

EXIT_MODEL = 11
EXIT_INTERRUPTED = 130
ARRIVAL_SECONDS = 2.0  # that a peer which connected just before the end gets to say what it wants
ARRIVAL_POLL_SECONDS = 0.1
PROGRESS_SECONDS = 0.2
PROGRESS_LOG_SECONDS = 5.0


def run_http(options: ServeOptions, listener: socket.socket, engine: EngineChild, url: str,
             started: float) -> int:
    """Serve until stopped; returns the exit status."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(options, listener, engine, url, started))


class HttpServer(uvicorn.Server):
    """uvicorn on listening sockets, with accepting and the signals left to us: it bounds its connections, we also have
    an engine to stop, and it ends without dropping a request."""

    def __init__(self, config: uvicorn.Config, protocol: type[BoundedHttpProtocol]) -> None:
        super().__init__(config)
        self._protocol = protocol
        self.connections = protocol.connections_open

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, for sockets that listen already."""
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
        """Leave the port, hear out whom it was open to, then answer what they asked and close."""
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


async def _serve(options: ServeOptions, listener: socket.socket, engine: EngineChild, url: str,
                 started: float) -> int:
    limits = options.limits
    client = EngineClient(engine.uds)
    try:
        server = _server(options, client, limits)
    except AtollError as error:
        log.error("%s", error)
        complain("atoll serve", error, logged=True)
        return EXIT_MODEL if isinstance(error, ModelError) else 2

    loop, interrupts = asyncio.get_running_loop(), 0

    def on_signal(name: str) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts == 1:
            log.info("%s: finishing running requests, at most %.0f s; once more stops now", name,
                     options.shutdown_timeout)
            server.should_exit = True
        else:
            server.force_exit = True
            engine.kill()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN and number == signal.SIGHUP:
            continue  # nohup: the closed terminal is no reason to stop
        loop.add_signal_handler(number, on_signal, number.name)

    await client.start()
    notifier = Notifier()
    http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    supervisor = asyncio.create_task(engine.supervise(client), name="supervisor")
    narrator = asyncio.create_task(_narrate(server, client, notifier, options, url, started), name="narrator")
    try:
        await asyncio.wait({http, supervisor}, return_when=asyncio.FIRST_COMPLETED)
        narrator.cancel()
        notifier.stopping("draining")
        server.should_exit = True  # also when it was the engine that gave up
        await http
        if interrupts > 1:
            return EXIT_INTERRUPTED
        if not server.started and not interrupts and not supervisor.done():
            log.error("the gateway did not start")
            return 1
        await client.close()
        await engine.stop()
        await supervisor
    except EngineFailedError as error:
        log.error("%s", error)
        complain("atoll serve", error, logged=True)
        return error.status
    finally:
        narrator.cancel()
        await client.close()
    log.info("stopped")
    return 0


def _server(options: ServeOptions, client: EngineClient, limits: Limits) -> HttpServer:
    """Raises ModelError (tokenizer) and ConfigError (key file)."""
    config = options.engine
    keys = KeyFile(options.api_key_file) if options.api_key_file else None
    model = ServedModel.load(config.model_name, config.model, client,
                             vendor_defaults=options.generation_config == "auto")
    models = dict.fromkeys(config.served_model_name, model)
    app = create_app(models, auth=keys, limits=limits, metrics=Metrics(dict.fromkeys(models, client)),
                     allowed_origins=options.allowed_origins)
    return make_server(app, limits, access_log=options.access_log, shutdown_timeout=options.shutdown_timeout,
                       ssl_certfile=options.ssl_certfile, ssl_keyfile=options.ssl_keyfile)


def make_server(app: ASGIApp, limits: Limits, *, access_log: bool, shutdown_timeout: float,
                ssl_certfile: Path | None, ssl_keyfile: Path | None) -> HttpServer:
    """uvicorn with our bounds, and none of its own logs."""
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


async def _narrate(server: HttpServer, client: EngineClient, notifier: Notifier, options: ServeOptions, url: str,
                   started: float) -> None:
    """Loading progress, the banner once a token came out, and a word whenever the engine comes back."""
    terminal = sys.stderr.isatty() and options.log_format != "json"
    shown, last = "", 0.0
    first = True
    while True:
        while client.state != "ready" or not server.started:
            now = time.monotonic()
            notifier.loading(client.progress or client.state)
            if client.progress and client.progress != shown:
                shown = client.progress
                if terminal:
                    print(f"\r\x1b[K  {shown}", end="", file=sys.stderr, flush=True)
                elif now - last > PROGRESS_LOG_SECONDS:
                    last = now
                    log.info("%s", shown)
            await asyncio.sleep(PROGRESS_SECONDS)
        if terminal and shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        info = client.info
        assert info is not None
        notifier.ready(f"serving {info.model_names[0]}")
        if not first:
            log.info("the engine is back", extra={"fields": {"restarts": client.restarts}})
        elif terminal:
            seconds = time.monotonic() - started
            print(f"\n  Atoll {__version__}  {', '.join(options.engine.served_model_name)}  on {info.device}, "
                  f"{info.dtype}, {info.max_model_len:,} tokens of context  (ready in {seconds:.1f} s)\n"
                  f"  OpenAI endpoint: {url}/v1   Ctrl-C stops it\n", file=sys.stderr, flush=True)
        else:
            log.info("ready", extra={"fields": {"url": f"{url}/v1", "models": options.engine.served_model_name,
                                                "seconds": round(time.monotonic() - started, 2)}})
        first, shown = False, ""
        while client.state == "ready":
            if client.healthy():
                notifier.watchdog()
            await asyncio.sleep(PROGRESS_SECONDS * 5)
