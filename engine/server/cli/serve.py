"""`atoll serve`: check everything, start the engine process, and be its gateway and supervisor.

Exit status: 0 stopped, 2 a flag cannot be honoured, 11 the model's files are damaged, 40 the engine keeps crashing, 130
interrupted twice, 1 a defect.
"""

import logging
import signal
import socket
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from engine.errors import AtollError, ConfigError, ModelError, complain
from engine.server.access.auth import KeyFile
from engine.server.http.exposure import check_exposure, is_loopback
from engine.server.http.listening import BACKLOG, bind_tcp, check_tls
from engine.server.ipc import framing
from engine.server.ipc.client import EngineClient
from engine.server.process import logs
from engine.server.settings.commands import parse_serve
from engine.server.settings.options import ServeOptions

if TYPE_CHECKING:
    from engine.server.gateway.http_server import HttpServer

log = logging.getLogger("atoll.serve")

EXIT_CONFIG = 2
EXIT_MODEL = 11
EXIT_INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Entry point of `atoll serve`; returns the exit status."""
    started = time.monotonic()
    try:
        options = parse_serve(argv)
        logs.setup(options.log_format, options.log_level)
        for note in options.notes:
            log.warning("%s", note)
        check_exposure(options.host, options.uds, options.ssl_certfile is not None, options.allow_plain_http)
        _check_model(options)
        check_tls(options.ssl_certfile, options.ssl_keyfile)
        if options.api_key_file is not None:
            KeyFile(options.api_key_file)  # raises for a file that cannot be used
        listener = _bind(options)
    except ConfigError as error:
        complain("atoll serve", error)
        return EXIT_CONFIG
    except ModelError as error:
        complain("atoll serve", error)
        return EXIT_MODEL
    _warn_if_open(options)

    from engine.server.process.engine_child import EngineChild
    from engine.server.process.runtime_directory import runtime_directory

    signal.signal(signal.SIGTERM, _exit_quietly)  # until the event loop handles signals
    with runtime_directory() as directory:
        client = EngineClient(directory / "engine.sock")
        engine = EngineChild(options, client)
        try:
            engine.spawn()  # it imports and loads while we import and bind
            from engine.server.cli.report import Report
            from engine.server.gateway.main_loop import Serving, run

            server, report = http_server(options, client), Report(options, client, base_url(options), started)
            return run(Serving(
                "atoll serve", log, server, [listener], options.shutdown_timeout,
                lambda notifier: report.run(server, notifier), engine=engine,
            ))
        except AtollError as error:
            log.error("%s", error)
            complain("atoll serve", error, logged=True)
            return EXIT_MODEL if isinstance(error, ModelError) else EXIT_CONFIG
        except KeyboardInterrupt:  # the event loop does not handle signals yet
            return EXIT_INTERRUPTED
        finally:
            engine.kill()
            listener.close()
            if options.uds is not None:
                options.uds.unlink(missing_ok=True)


def http_server(options: ServeOptions, client: EngineClient) -> "HttpServer":
    """Raises ModelError (tokenizer) and ConfigError (key file)."""
    from engine.server.gateway.app import create_app
    from engine.server.gateway.http_server import make_server
    from engine.server.openai.serving import ServedModel, output_settings

    config = options.engine
    keys = KeyFile(options.api_key_file) if options.api_key_file else None
    model = ServedModel.load(config.model_name, config.model, client,
                             vendor_defaults=options.generation_config == "auto", **output_settings(config))
    app = create_app(dict.fromkeys(config.served_model_name, model), auth=keys, limits=options.limits,
                     allowed_origins=options.allowed_origins, traces_endpoint=options.otlp_traces_endpoint)
    server = make_server(app, options.limits, access_log=options.access_log, shutdown_timeout=options.shutdown_timeout,
                         ssl_certfile=options.ssl_certfile, ssl_keyfile=options.ssl_keyfile)
    server.gateway = app.state.gateway
    return server


def _exit_quietly(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def _check_model(options: ServeOptions) -> None:
    """Check the model's files before anything starts. Raises ModelError, which names what is missing or damaged."""
    from engine.models.config.model import ModelConfig
    from engine.models.loading.checkpoint import check_checkpoint

    if options.engine.load_format == "dummy" and options.engine.model.is_dir():
        ModelConfig.load(options.engine.model)
    else:
        check_checkpoint(options.engine.model)


def _bind(options: ServeOptions) -> socket.socket:
    """The listening socket, bound before the engine starts, so that a taken port is reported at once. Raises
    ConfigError."""
    if options.uds is not None:
        return framing.listen(options.uds, shared_with_group=True, backlog=BACKLOG)
    listener = bind_tcp(options.host, options.port)
    options.port = listener.getsockname()[1]  # --port 0 takes a free one
    return listener


def _warn_if_open(options: ServeOptions) -> None:
    if options.api_key_file is None and options.uds is None and not is_loopback(options.host):
        log.warning("ANYONE WHO REACHES %s:%d CAN USE THIS SERVICE: it has no API keys (--api-key-file)",
                    options.host, options.port)


def base_url(options: ServeOptions) -> str:
    """The `base_url` for a client on this machine, without the /v1 at its end."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(options.host, options.host)  # noqa: S104
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{'https' if options.ssl_certfile else 'http'}://{host}:{options.port}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
