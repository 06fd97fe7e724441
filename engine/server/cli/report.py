"""What `atoll serve` tells the person who started it: loading progress, a banner, and that a restarted engine serves
again."""

import asyncio
import logging
import sys
import time

from engine import __version__
from engine.server.gateway.http_server import HttpServer
from engine.server.ipc.client import EngineClient
from engine.server.ipc.messages import EngineInfo
from engine.server.process.notify import Notifier
from engine.server.settings.options import ServeOptions

log = logging.getLogger("atoll.serve")

PROGRESS_SECONDS = 0.2
PROGRESS_LOG_SECONDS = 5.0
HEALTH_SECONDS = 1.0


class Report:
    """On a terminal: a progress line that is rewritten in place, and a banner. Elsewhere: log lines."""

    def __init__(self, options: ServeOptions, client: EngineClient, url: str, started: float) -> None:
        self._options, self._client = options, client
        self._url, self._started = url, started
        self._terminal = sys.stderr.isatty() and options.log_format != "json"

    async def run(self, server: HttpServer, notifier: Notifier) -> None:
        first = True
        while True:
            info = await self._loading(server, notifier)
            notifier.ready(f"serving {info.model_names[0]}")
            if first:
                self._ready(info)
            else:
                log.info("the engine is back", extra={"fields": {"restarts": self._client.restarts}})
            first = False
            while self._client.state == "ready":
                if self._client.healthy():
                    notifier.watchdog()
                await asyncio.sleep(HEALTH_SECONDS)

    async def _loading(self, server: HttpServer, notifier: Notifier) -> EngineInfo:
        """Show progress until the engine has produced a token."""
        client, shown, logged = self._client, "", 0.0
        while client.state != "ready" or client.info is None or not server.started:
            notifier.loading(client.progress or client.state)
            if client.progress and client.progress != shown:
                shown, now = client.progress, time.monotonic()
                if self._terminal:
                    print(f"\r\x1b[K  {shown}", end="", file=sys.stderr, flush=True)
                elif now - logged > PROGRESS_LOG_SECONDS:
                    logged = now
                    log.info("%s", shown)
            await asyncio.sleep(PROGRESS_SECONDS)
        if self._terminal and shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return client.info

    def _ready(self, info: EngineInfo) -> None:
        names, seconds = self._options.engine.served_model_name, time.monotonic() - self._started
        if self._terminal:
            print(f"\n  Atoll {__version__}  {', '.join(names)}  on {info.device}, "
                  f"{info.dtype}, {info.max_model_len:,} tokens of context  (ready in {seconds:.1f} s)\n"
                  f"  OpenAI endpoint: {self._url}/v1   Ctrl-C stops it\n", file=sys.stderr, flush=True)
        else:
            log.info("ready", extra={"fields": {"url": f"{self._url}/v1", "models": names,
                                                "seconds": round(seconds, 2)}})
