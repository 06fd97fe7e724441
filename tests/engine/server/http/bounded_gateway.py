"""A gateway as a process of its own, with bounds of the test's choice: `bounded_gateway.py JSON` prints its port.

The application, the keys and the HTTP server are the real ones; only the bounds are short, so that a test sees them
end.
"""

import asyncio
import json
import socket
import sys
from pathlib import Path

import uvloop

from engine.server.access.auth import KeyFile
from engine.server.gateway.app import create_app
from engine.server.gateway.http_server import make_server
from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel


def main() -> None:
    options = json.loads(sys.argv[1])
    limits = Limits(**options["limits"])
    model = ServedModel.load("tiny", options["model"], EngineClient(Path(options["engine"])))
    app = create_app({"tiny": model}, auth=KeyFile(options["keys"]), limits=limits)
    certificate, key = (Path(path) for path in options["tls"]) if options["tls"] else (None, None)
    server = make_server(app, limits, access_log=False, shutdown_timeout=5, ssl_certfile=certificate, ssl_keyfile=key)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(listener.getsockname()[1], flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[listener]))


if __name__ == "__main__":
    main()
