"""The last step of the demonstration: the checklist over what it has installed, and its summary."""

from pathlib import Path
from typing import Any

from appliance.demo import model
from appliance.demo.display import Step
from appliance.demo.front import DemoFrontend
from appliance.service import answers as answers_of
from appliance.service import checklist
from appliance.service.facts import engine_facts
from appliance.service.run_request import RunRequest
from appliance.service.state import State
from appliance.service.steps import STEPS
from installer.base.layout import Layout
from offline_bundle import inspect_bundle

LEFT_OUT = ("pilot",)  # it needs users
_REVIEW = {
    "reviewer": "the demonstration", "expires": "2999-01-01", "lineage": "trained by its maker; no other model in it",
    "modifications": "converted to safetensors, bf16", "drafter": "there is none", "export": "none known",
}  # fmt: skip
_PROFILE = """\
endpoint = "completions"
input = [16, 32]
output = [4, 8]
requests = 4
warmup = 0
[arrival]
clients = 2
"""
# The model has 135 million parameters: the quality of its answers is not what the demonstration shows.
_WAIVED = ("golden", "repetition", "quality-answers")


class _Front(DemoFrontend):
    """Shows which step of the checklist is running; its findings are in the summary."""

    def step(self, name: str, status: str, detail: str = "") -> None:
        return

    def preflight(self, records: list[Any]) -> None:
        return

    def plan(self, plan: Any) -> None:
        return

    def checklist_step(self, name: str, title: str, status: str) -> None:
        if status == "begin":
            self._step.progress(str(title))

    def findings(self, findings: list[dict[str, Any]]) -> None:
        return

    def ask(self, question: str) -> str:
        return ""


def run(layout: Layout, bundle: Path, key: Path, port: int, device: str | None, step: Step) -> State:
    """Run the steps that are not done yet; the state of all. Raises InstallError."""
    manifest = inspect_bundle(bundle).manifest
    terms, engine = manifest.license, engine_facts()
    profile = layout.prefix / "load.toml"
    profile.write_text(_PROFILE)
    answers = answers_of.from_json({
        "schema_version": 1, "bundle": str(bundle.absolute()), "trust_keys": [str(key.absolute())], "port": port,
        **({"device": device} if device else {}), "host": "127.0.0.1", "confirm_plan": True,
        "accept_licenses": [f"{engine.spdx}@{engine.licence_sha256}", f"{terms.spdx}@{terms.sha256}"],
        "review": {model.NAME: _REVIEW}, "waivers": dict.fromkeys(_WAIVED, "a small model, for a demonstration"),
        "tune": {"skip": "the demonstration keeps the engine's own settings"},
        "verify": {"groups": ["health", "conformance", "security", "performance"], "profile": str(profile),
                   "requests": 4},
    })  # fmt: skip
    names = [each.id for each in STEPS if each.id not in LEFT_OUT]
    state = checklist.show(layout, answers)
    if all(state.step(name).status == "green" for name in names):
        step.already(_said(state, names))
        return state
    request = RunRequest(answers=answers_of.to_json(answers), steps=tuple(names), by="the demonstration")
    checklist.run(layout, request, _Front(step))
    state = checklist.show(layout, answers)
    step.done(_said(state, names))
    return state


def _said(state: State, names: list[str]) -> str:
    done = [name for name in names if state.step(name).status == "green"]
    return f"{len(done)} of {len(names)} steps done: {', '.join(done)}"
