"""`make test-clients`: clients that we did not write, each in a virtual environment of its own, against a real service.

    .venv/bin/python tests/clients/run.py [NAME ...] [--url URL --model NAME --key-file FILE]

Without --url it serves the demonstration model, with a key. The environments are kept below .cache/clients, and made
again when their packages change. A client that cannot be installed fails.
"""

import argparse
import contextlib
import hashlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "clients"
MODEL = "demo"
READY_SECONDS = 180
CLIENT_SECONDS = 900

# Name -> the packages of its environment: versions that were seen to work, so that a failure is ours.
CLIENTS = {
    "openai": ["openai==3.54.0"],
    "langchain": ["langchain==1.4.7", "langchain-openai==1.7.3"],
    "litellm": ["litellm[mcp]==1.106.2"],  # its tool calls import mcp, whatever the tools are
    "pydantic-ai": ["pydantic-ai-slim[openai]==2.68.0"],
    "lm-eval": ["lm_eval[api]==0.4.13"],
    "guidellm": ["guidellm==0.8.1"],
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1",
           "LANGCHAIN_TRACING_V2": "false", "TOKENIZERS_PARALLELISM": "false"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--url", help="an endpoint that runs already, without /v1")
    parser.add_argument("--model", default=MODEL, help="with --url: the served name")
    parser.add_argument("--key-file", type=Path, help="with --url: file with the API key")
    options = parser.parse_args()
    if unknown := set(options.names) - CLIENTS.keys():
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    names = options.names or list(CLIENTS)
    interpreters = {name: environment(name) for name in names}
    with service(options) as facts:
        facts["ATOLL_TOOLS"] = "1" if forces_tools(facts) else "0"
        failed = [name for name in names if interpreters[name] is None or not run(name, interpreters[name], facts)]
    print(f"\n{len(names) - len(failed)} passed, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def environment(name: str) -> Path | None:
    """The interpreter of a client's environment, made if need be; None if its packages cannot be installed."""
    directory = CACHE / name
    stamp = directory / "packages.sha256"
    wanted = hashlib.sha256("\n".join(CLIENTS[name]).encode()).hexdigest()
    python = directory / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"Installing {', '.join(CLIENTS[name])} …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *CLIENTS[name]]
        if subprocess.run(install, check=False).returncode:
            print(f"{name}: its packages cannot be installed")
            return None
        stamp.write_text(wanted)
    return python


def run(name: str, python: Path | None, facts: dict[str, str]) -> bool:
    print(f"\n{name}", flush=True)
    script = HERE / f"{name.replace('-', '_')}_client.py"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home:  # of nothing that this user has configured
        surroundings = {"PATH": os.environ.get("PATH", ""), "HOME": home, "PYTHONPATH": str(HERE), "LANG": "C.UTF-8"}
        try:
            done = subprocess.run([str(python), str(script)], env={**surroundings, **OFFLINE, **facts}, cwd=home,
                                  timeout=CLIENT_SECONDS, check=False)
            code = done.returncode
        except subprocess.TimeoutExpired:
            print(f"  FAILED  it took more than {CLIENT_SECONDS} s")
            code = 1
    print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    return code == 0


@contextlib.contextmanager
def service(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """What a script learns of the endpoint. Ours wants a key: each client must send it."""
    if options.url:
        key = options.key_file.read_text().strip() if options.key_file else "none"
        yield {"ATOLL_URL": options.url.rstrip("/").removesuffix("/v1"), "ATOLL_MODEL": options.model,
               "OPENAI_API_KEY": key, "ATOLL_MODEL_DIR": ""}
        return
    from appliance.demo.model import ensure_demo_model

    directory, key = ensure_demo_model(), f"sk-{secrets.token_urlsafe(24)}"
    with tempfile.TemporaryDirectory() as temporary:
        keys, log = Path(temporary, "keys.json"), Path(temporary, "log")
        entry = {"id": "clients", "sha256": hashlib.sha256(key.encode()).hexdigest(), "scopes": ["serve"]}
        keys.write_text(json.dumps({"keys": [entry]}))
        keys.chmod(0o600)
        command = [sys.executable, "-m", "appliance", "serve", directory, "--port", 0, "--served-model-name", MODEL,
                   "--max-model-len", 2048, "--device", "cpu", "--kv-cache-memory-bytes", 200_000_000,
                   "--api-key-file", keys]
        with log.open("w") as written:
            process = subprocess.Popen([str(word) for word in command], stdout=written, stderr=written, cwd=ROOT)
        try:
            url = wait_ready(process, log)
            yield {"ATOLL_URL": url, "ATOLL_MODEL": MODEL, "OPENAI_API_KEY": key,
                   "ATOLL_MODEL_DIR": str(directory)}
        finally:
            process.terminate()
            process.wait(timeout=30)


def wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL of the service, once it is ready."""
    from ports import listening_port

    try:
        url = f"http://127.0.0.1:{listening_port(process, READY_SECONDS)}"
    except AssertionError as error:
        raise SystemExit(f"The service did not start: {error}\n{log.read_text()[-3000:]}") from None
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            if reply.status == 200:
                return url
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"The service did not start:\n{log.read_text()[-3000:]}")
        time.sleep(0.3)


def forces_tools(facts: dict[str, str]) -> bool:
    """Whether the server can force a tool call: a small model makes none of its own accord."""
    body = {"model": facts["ATOLL_MODEL"], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100,
            "tool_choice": "required", "tools": [{"type": "function", "function": {
                "name": "now", "parameters": {"type": "object", "properties": {}}}}]}
    request = urllib.request.Request(
        f"{facts['ATOLL_URL']}/v1/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {facts['OPENAI_API_KEY']}"})
    try:
        with urllib.request.urlopen(request, timeout=120):
            return True
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return False


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(HERE.parent)]
    sys.exit(main())
