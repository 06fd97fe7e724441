"""Stands where engine and gateway stand in a release of the system form: real processes, TLS and keys, but instant.

    python fake_units.py MODE engine --model NAME --config atoll.toml
    python fake_units.py MODE gateway --config atoll.toml --keys api-keys.json --tls server.key

MODE: good · mute (streams no content) · crash (the engine exits 3).
"""

import hashlib
import json
import os
import signal
import ssl
import sys
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODE, WHAT = sys.argv[1:3]
FLAGS = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
RUN = Path(FLAGS["--config"]).parents[2] / "run"
SETTINGS = tomllib.loads(Path(FLAGS["--config"]).read_text())

if WHAT == "engine":
    model = SETTINGS["models"][FLAGS["--model"]]
    model = SETTINGS["models"][model.get("replica-of", FLAGS["--model"])] | model
    assert (Path(model["model"]) / "config.json").is_file(), model
    if MODE == "crash":
        print("cannot load the model: shard 2 is missing", flush=True)
        sys.exit(3)
    (RUN / FLAGS["--model"]).write_text(str(os.getpid()))
    print(f"engine {FLAGS['--model']} ({MODE})", flush=True)
    time.sleep(3600)

KEYS = Path(FLAGS["--keys"])


def admitted(authorization: str) -> bool:
    digest = hashlib.sha256(authorization.removeprefix("Bearer ").encode()).hexdigest()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    entries = json.loads(KEYS.read_text())["keys"]
    return any(k["sha256"] == digest and not k["revoked"] and (k["expires"] or "9") > now for k in entries)


def is_up(engine: str) -> bool:
    """Whether the engine has said so, and lives."""
    try:
        os.kill(int((RUN / engine).read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if all(is_up(name) for name in SETTINGS["models"]) else 503)
        self.end_headers()
        served = {name: table["model"] for name, table in SETTINGS["models"].items() if "replica-of" not in table}
        self.wfile.write(json.dumps({"models": served, "mode": MODE}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        good = admitted(self.headers.get("Authorization", ""))
        self.send_response(401 if not good else 200 if body["model"] in SETTINGS["models"] else 404)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if good:
            for word in [] if MODE == "mute" else ["Hel", "lo"]:
                self.chunk({"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
            self.chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            self.wfile.write(b"data: [DONE]\n\n")

    def chunk(self, data: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        return


class Server(ThreadingHTTPServer):
    daemon_threads = True


def reload(*_: object) -> None:
    SETTINGS.clear()
    SETTINGS.update(tomllib.loads(Path(FLAGS["--config"]).read_text()))
    (RUN / "reloaded").touch()


signal.signal(signal.SIGHUP, reload)
(RUN / "gateway").write_text(str(os.getpid()))  # ready for signals
server = Server((SETTINGS["gateway"]["host"], SETTINGS["gateway"]["port"]), Handler)
tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(FLAGS["--tls"])
# Each connection shakes hands in its own thread: the main one stays free for signals.
server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
print(f"gateway ({MODE}) on port {SETTINGS['gateway']['port']}", flush=True)
server.serve_forever()
