"""The main loop of every process that answers HTTP: `atoll gateway`, and `atoll serve` with its engine as a child."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop

from engine.errors import complain
from engine.server.gateway.fleet import Fleet
from engine.server.gateway.http_server import HttpServer
from engine.server.http import local_socket
from engine.server.openai.reply.replies import to_json
from engine.server.openai.serving import Gateway
from engine.server.process.engine_child import EngineChild, EngineFailedError
from engine.server.process.notify import Notifier

EXIT_INTERRUPTED = 130
MOST_LISTED = 2000  # active requests that the admin socket names

log = logging.getLogger("atoll.gateway")


class DrainReply(msgspec.Struct):
    """`in_flight`: generating requests whose answers are not complete."""

    draining: bool
    in_flight: int


@dataclass(slots=True)
class Serving:
    """An HTTP server and the tasks that run with it."""

    command: str                                                  # "atoll serve", for messages
    log: logging.Logger
    server: HttpServer
    sockets: list[socket.socket]
    shutdown_timeout: float                                       # seconds that running requests get at shutdown
    report: Callable[[Notifier], Coroutine[Any, Any, None]]       # tells systemd and the operator about the state
    engine: EngineChild | None = None                             # if given, we restart and stop it
    fleet: Fleet | None = None                                    # its models, where these can change
    reload: Callable[[], None] | None = None                      # on SIGHUP; without it SIGHUP stops, as SIGTERM does


def run(serving: Serving) -> int:
    """Serve until a signal comes or the engine's supervisor gives up; returns the exit status.

    After the first SIGTERM or SIGINT running requests may finish; the second stops at once.
    """
    gc.collect()
    gc.freeze()  # everything loaded so far lives until the end: keep collections from traversing it
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(serving))


async def _run(serving: Serving) -> int:
    server, engine, log = serving.server, serving.engine, serving.log
    notifier, interrupts = Notifier(), 0

    def stop(name: str) -> None:
        nonlocal interrupts
        interrupts += 1
        server.should_exit = True
        if interrupts == 1:
            notifier.stopping("finishing running requests")
            log.info("%s: finishing running requests, at most %.0f s; a second signal stops at once", name,
                     serving.shutdown_timeout)
            return
        server.force_exit = True
        if engine is not None:
            engine.kill()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number.name)
    if serving.reload is not None:
        loop.add_signal_handler(signal.SIGHUP, serving.reload)
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup a closed terminal does not stop us
        loop.add_signal_handler(signal.SIGHUP, stop, signal.SIGHUP.name)

    local = await listen_locally(server.gateway, serving.fleet) if server.gateway is not None else []
    http = asyncio.create_task(server.serve(sockets=serving.sockets), name="http")
    supervisor = asyncio.create_task(engine.supervise(), name="supervisor") if engine is not None else None
    reporter = asyncio.create_task(serving.report(notifier), name="reporter")
    try:
        await asyncio.wait({http, supervisor} - {None}, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[arg-type]
        reporter.cancel()
        if not server.should_exit:  # the engine gave up
            notifier.stopping("the engine failed")
            server.should_exit = True
        await http
        if interrupts > 1:
            return EXIT_INTERRUPTED
        if not server.started and not interrupts and (supervisor is None or not supervisor.done()):
            log.error("the gateway did not start")
            return 1
        if engine is not None and supervisor is not None:
            await engine.stop()
            await supervisor
    except EngineFailedError as error:
        log.error("%s", error)
        complain(serving.command, error, logged=True)
        return error.status
    finally:
        reporter.cancel()
        for each in local:
            each.close()
    log.info("stopped")
    return 0


async def listen_locally(gateway: Gateway, fleet: Fleet | None = None) -> list[asyncio.Server]:
    """Open the sockets for programs on this machine."""
    def drain(on: bool | None = None) -> tuple[bytes, str]:
        if on is not None and on != gateway.draining:
            gateway.draining = on
            log.info("draining: new requests are refused" if on else "no longer draining: new requests are taken",
                     extra={"fields": {"in_flight": gateway.in_flight}})
        return to_json(DrainReply(gateway.draining, gateway.in_flight)), "application/json"

    admin = {"GET /requests": lambda: (to_json(gateway.active.listing(MOST_LISTED)), "application/json"),
             "GET /drain": drain, "POST /drain": lambda: drain(True), "DELETE /drain": lambda: drain(False)}
    if fleet is not None:
        admin |= fleet.admin_answers()
    offered = [await local_socket.listen(local_socket.METRICS, {"GET /metrics": gateway.metrics.render}),
               await local_socket.listen(local_socket.ADMIN, admin)]
    return [each for each in offered if each is not None]
