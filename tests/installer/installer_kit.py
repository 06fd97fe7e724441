"""Installs of a tiny signed bundle that run a scripted server (`fake_serve.py`) as their release."""

import http.client
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from installer.base.journal import History, replay
from installer.base.layout import Layout
from installer.decide.frontend import Unattended
from installer.decide.install_options import InstallOptions
from installer.decide.plan import Plan
from installer.operate.install import Installer, InstallResult, key_was_shown
from installer.operate.rollback import Rollback
from installer.service.prefix import PrefixService

FAKE_SERVE = Path(__file__).with_name("fake_serve.py")


@dataclass
class Witness:
    """A front end that remembers what it was told and answers as it is told to."""

    accepts: bool = True
    confirms: bool = True
    reference: str = ""
    steps: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    def step(self, name: str, status: str, detail: str = "") -> None:
        self.steps.append((name, status))

    def progress(self, label: str, done: int, total: int) -> None:
        assert done >= 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def preflight(self, records: list[Any]) -> None:
        assert records

    def plan(self, plan: Plan) -> None:
        self.plans.append(plan)

    def accept_licence(self, request: Any) -> bool:
        self.asked.append(request)
        return self.accepts

    def licence_reference(self, request: Any) -> str:
        return self.reference

    def confirm_plan(self, plan: Plan) -> bool:
        return self.confirms


@dataclass
class Site:
    """One prefix on one port, and how to install there."""

    prefix: Path
    port: int
    key: Path

    @property
    def layout(self) -> Layout:
        return Layout.at(self.prefix)

    @property
    def service(self) -> PrefixService:
        return PrefixService(self.layout, stop_timeout=3.0)

    @property
    def history(self) -> History:
        return History(replay(self.layout.journal).records)

    def installer(self, bundle: Path, mode: str = "good", *, witness: Any = None, **options: Any) -> Installer:
        given: dict[str, Any] = {
            "trust_keys": [self.key], "port": self.port, "start_timeout": 20.0, "smoke_timeout": 20.0, **options,
        }
        return Installer(
            InstallOptions(bundle, self.prefix, **given),
            witness or Witness(),
            service=self.service,
            release_command=(sys.executable, "-S", "-E", str(FAKE_SERVE), mode),
        )

    def install(self, bundle: Path, mode: str = "good", *, shown: bool = True, **options: Any) -> InstallResult:
        """Install, and see the new key as an operator would (unless not `shown`)."""
        result = self.installer(bundle, mode, **options).run()
        if result.api_key and shown:
            key_was_shown(self.layout, result.key_ids)
        return result

    def rollback(self, **options: Any) -> InstallResult:
        given = InstallOptions(start_timeout=20.0, smoke_timeout=20.0, **options)
        return Rollback(given, Unattended(), layout=self.layout, service=self.service).run()

    def serving(self) -> dict[str, Any]:
        """What the running server says it serves."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", "/health")
        response = connection.getresponse()
        assert response.status == 200
        return json.loads(response.read())

    def ask(self, key: str) -> int:
        """HTTP status of one chat completion with this key."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        body = {"model": "tiny", "stream": True, "messages": []}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        response.read()
        return response.status


SAMPLES = "var/lib/atoll/series"  # whose files come and go while the service runs


def tree(root: Path) -> set[str]:
    """Every path below a directory, relative; empty if it is not there."""
    return {str(path.relative_to(root)) for path in root.rglob("*")} if root.exists() else set()
