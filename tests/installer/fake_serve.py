"""Stands where `atoll serve` stands in a release: a real HTTP server with the real keys, but instant and scripted.

    python fake_serve.py MODE serve --config atoll.toml

MODE: good · mute (streams no content) · truncated (no [DONE]) · sick (/health 503) · crash (exits 3) · stubborn
(ignores SIGTERM) · family (has a child in a session of its own, as an engine has).
"""

import hashlib
import json
import signal
import ssl
import subprocess
import sys
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODE = sys.argv[1]
assert sys.argv[2:4] == ["serve", "--config"], sys.argv
SETTINGS = tomllib.loads(Path(sys.argv[4]).read_text())["serve"]


def admitted(authorization: str) -> bool:
    digest = hashlib.sha256(authorization.removeprefix("Bearer ").encode()).hexdigest()
    keys = json.loads(Path(SETTINGS["api-key-file"]).read_text())["keys"]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return any(k["sha256"] == digest and not k["revoked"] and (k["expires"] or "9") > now for k in keys)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if MODE == "sick" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"model": SETTINGS["model"], "mode": MODE}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not admitted(self.headers.get("Authorization", "")):
            self.send_response(401)
            self.end_headers()
            return
        assert body["stream"] is True
        assert body["model"] == SETTINGS["served-model-name"]
        assert (Path(SETTINGS["model"]) / "config.json").exists()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in [] if MODE == "mute" else ["Hel", "lo"]:
            self.chunk({"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
        self.chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self.chunk({"choices": [], "usage": {"completion_tokens": 2}})
        if MODE != "truncated":
            self.wfile.write(b"data: [DONE]\n\n")

    def chunk(self, data: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")


class Server(ThreadingHTTPServer):
    daemon_threads = True


if MODE == "crash":
    print("cannot load the model: shard 2 is missing", flush=True)
    sys.exit(3)
if MODE == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if MODE == "family":
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    (Path(SETTINGS["model"]).parents[2] / "child.pid").write_text(str(child.pid))
print(f"fake server ({MODE}) on port {SETTINGS['port']}", flush=True)
server = Server((SETTINGS["host"], SETTINGS["port"]), Handler)
if "ssl-certfile" in SETTINGS:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(SETTINGS["ssl-certfile"], SETTINGS["ssl-keyfile"])
    server.socket = tls.wrap_socket(server.socket, server_side=True)
server.serve_forever()
