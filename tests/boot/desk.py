"""What an operator does with a machine: install from a medium, ask it questions, look at what it wrote down."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import Machine, Ran, when
from questions import QUESTION
from vendor import MODEL, Medium, Vendor

CLIENT = Path(__file__).with_name("chat_client.py")
PORT = 8443
NAME = "chat"  # of the model in the API, and of its unit
URL = f"https://127.0.0.1:{PORT}"
JOURNAL = "/var/lib/atoll/state/journal.jsonl"
CA = "/etc/atoll/tls/ca.crt"

ANSWERS = """\
schema_version = 1
trust_keys = ["/root/vendor.pub"]
accept_licenses = ["{licence}"]
host = "0.0.0.0"
port = {port}
device = "cpu"
confirm_plan = true

[[models]]
bundle = "{model}"
name = "{name}"
"""


@dataclass
class Desk:
    """One operator with one machine."""

    machine: Machine
    vendor: Vendor
    python: str = ""
    """`--python DIR`, where the distribution's own Python is not one that the medium serves."""
    key: str = ""
    """The API key that the install showed."""
    said: str | None = None
    """What the last command that was watched to its end said."""
    proved: set[str] = field(default_factory=set)
    """Attempts to leave that a test made on purpose."""

    def prepare(self) -> None:
        """What the operator brings besides the medium: the vendor's key, by another way, and an answers file."""
        self.machine.path("/root/vendor.pub").write_bytes(self.vendor.public_key.read_bytes())
        text = ANSWERS.format(licence=self.vendor.licence, port=PORT, model=MODEL, name=NAME)
        self.machine.path("/root/answers.toml").write_text(text)

    def plug(self, medium: Medium) -> None:
        """Take out what is in, and put this in."""
        if (self.machine.media / "atoll").exists():
            self.vendor.unplug(self.machine.media)
        self.vendor.plug(medium, self.machine.media)

    def command(self, *more: str) -> str:
        words = ["sh /media/atoll/install.sh --answers /root/answers.toml", self.python, *more]
        return " ".join(word for word in words if word)

    def install(self, *more: str, timeout: float = 420.0) -> Ran:
        """Run install.sh; keeps the key if it shows one."""
        done = self.machine.run(self.command("--json", *more), timeout=timeout)
        if done.code == 0 and (key := facts(done).get("api_key")):
            self.key = key
        return done

    def atoll(self, arguments: str, timeout: float = 300.0) -> Ran:
        return self.machine.run(f"atoll {arguments}", timeout=timeout)

    def status(self) -> dict[str, Any]:
        return json.loads(self.atoll("status --json").out)

    def live(self) -> str:
        """The release that `current` points at."""
        return self.machine.path("/opt/atoll/current").readlink().name

    def ask(self, question: str = QUESTION, **how: Any) -> dict[str, Any]:
        """A chat from outside, over TLS, with the `openai` client."""
        asked = {"url": f"{URL}/v1", "key": self.key, "model": NAME, "prompt": question, "ca": self.ca, **how}
        done = self.machine.beside([sys.executable, str(CLIENT)], input=json.dumps(asked), timeout=180)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @property
    def ca(self) -> str:
        return self.machine.path(CA).read_text()

    def assert_serves(self, wait: float = 0.0) -> None:
        """It answers as that model answers, to this operator's key."""
        answer = when(lambda: (a := self.ask()).get("text") and a, wait, "an answer", 0.5) if wait else self.ask()
        assert "Paris" in answer.get("text", ""), (answer, self.trouble())

    def trouble(self) -> str:
        """What one looks at when it does not serve."""
        looks = (
            "systemctl list-units --all --no-pager --no-legend 'atoll*'", "atoll status",
            "journalctl --no-pager -n 60 -u 'atoll*'",
        )
        return "\n".join(str(self.machine.run(look)) for look in looks)

    def journal(self) -> list[dict[str, Any]]:
        """The install journal's records, but for a half-written last line."""
        records = []
        path = self.machine.path(JOURNAL)
        for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else []:
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
        return records

    def cut_power_after(self, step: str, command: str, timeout: float = 300.0) -> None:
        """Run an install and pull the plug as soon as its journal says that this step was done."""
        seen, end = len(self.journal()), time.monotonic() + timeout
        process = self.machine.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL)  # fmt: skip
        while not any(r["event"] == "done" and r["step"] == step for r in self.journal()[seen:]):
            assert process.poll() is None, f"it ended before {step} was done: {self.journal()[seen:]}"
            assert time.monotonic() < end, f"{step} is never done"
            time.sleep(0.005)
        self.machine.power_cut()
        process.wait(30)

    def startup(self) -> float:
        """How long the engine that is installed takes to start now, on this host as busy as it is: seconds from
        `systemctl start` until it has made a token."""
        self.machine.run(f"systemctl stop atoll-engine@{NAME}").check()
        started = self.machine.run(f"systemctl start atoll-engine@{NAME}").check()
        self.assert_serves(wait=60)
        return started.seconds - started.waited

    def outbound(self) -> list[str]:
        """Attempts to leave the machine, less the ones made on purpose."""
        return sorted({f"{a.kind} {a.address}:{a.port}" for a in self.machine.connects.outbound()} - self.proved)


def facts(done: Ran) -> dict[str, Any]:
    """The JSON object at the end of a command's output."""
    start = done.out.find("{")
    assert start >= 0, str(done)
    return json.loads(done.out[start:])


class Stream:
    """A long answer that a client of the appliance is reading, from its first piece on."""

    def __init__(self, desk: Desk, tokens: int = 200) -> None:
        asked = {"url": f"{URL}/v1", "key": desk.key, "model": NAME, "prompt": "Count from one to a hundred.",
                 "ca": desk.ca, "stream": True, "max_tokens": tokens, "timeout": 300,
                 "extra": {"ignore_eos": True}}  # fmt: skip
        self.tokens = tokens
        self._client = subprocess.Popen(
            desk.machine.beside_command([sys.executable, str(CLIENT)]), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._client.stdin is not None
        assert self._client.stderr is not None
        self._client.stdin.write(json.dumps(asked))
        self._client.stdin.close()
        assert self._client.stderr.readline() == "first piece\n"

    @property
    def under_way(self) -> bool:
        return self._client.poll() is None

    def assert_whole(self) -> None:
        """It came to its end, with all that was asked for."""
        assert self._client.stdout is not None
        answer = json.loads(self._client.stdout.read())
        assert (answer.get("finish"), answer.get("pieces", 0) > self.tokens // 2) == ("length", True), answer


class Watcher:
    """Asks /health every 50 ms from beside the machine; tells for how long nobody could have been served.

    Of that the time does not count in which the whole machine waited for processors that others on the host had.
    """

    SCRIPT = """
import http.client, ssl, sys, time
context = ssl.create_default_context(cafile=sys.argv[1])
def waited():
    try:
        full = next(line for line in open(sys.argv[3]) if line.startswith("full"))
        return int(full.rsplit("=", 1)[1]) / 1e6
    except (OSError, StopIteration):
        return 0.0

while True:
    began = time.monotonic()
    try:
        connection = http.client.HTTPSConnection("127.0.0.1", int(sys.argv[2]), timeout=30, context=context)
        connection.request("GET", "/health")
        good = connection.getresponse().status == 200
    except OSError:
        good = False
    sys.stdout.write(f"{time.monotonic()} {waited()} {int(good)}\\n")  # in one piece: it is killed at any time
    sys.stdout.flush()
    time.sleep(0.05)
"""

    def __init__(self, machine: Machine) -> None:
        self._seen: list[tuple[float, float, bool]] = []
        arguments = [str(machine.path(CA)), str(PORT), str(machine.pressure)]
        command = machine.beside_command([sys.executable, "-c", self.SCRIPT, *arguments])
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at, waited, good = line.split()
            self._seen.append((float(at), float(waited), good == "1"))

    def stop(self) -> float:
        """The longest time in seconds between two good answers."""
        time.sleep(0.5)
        self._process.kill()
        self._process.wait()
        self._reader.join()
        good = [(at, waited) for at, waited, fine in self._seen if fine]
        assert len(good) > 1, f"{len(self._seen)} asked, {len(good)} good"
        return max(later[0] - sooner[0] - (later[1] - sooner[1]) for sooner, later in pairwise(good))
