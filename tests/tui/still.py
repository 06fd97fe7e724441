"""A program whose screens never change: state, machine and service are given, and everything above them is real."""

from pathlib import Path
from typing import Any

import pytest
from test_trouble_screens import FAILED
from test_tune_board import board

from appliance.service.dashboard.snapshot import Alert, GpuRow, KeyRow, ModelRow, Snapshot
from appliance.service.desk import Desk
from appliance.service.facts import GpuFact, MachineFacts
from appliance.service.findings import Finding, Waiver, made
from appliance.service.gpu_details import GpuDetail, GpuDetails
from appliance.service.planning.offers import Offer
from appliance.service.state import State, StepState
from appliance.service.steps import STEPS
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.preflight.network import ANOTHER_PORT
from tui.app import Wizard

GB = 1 << 30
GPU = GpuDetail(0, "NVIDIA H100 80GB HBM3", 80 * GB, 79 * GB, "9.0", True, 0, False, 5, 16, 700.0, 41,
                ((4711, "python3", GB),))  # fmt: skip
PORT = made(
    "port", "block", False, t("Port"), observed="8443",
    required=t("port {number} free on {host}", number=8443, host="0.0.0.0"), why=t("The endpoint listens on it."),
    fix=t("Stop it, or choose another port: {how}.", how=ANOTHER_PORT), command="kill 4711",
    evidence="ss -ltnp 'sport = :8443'",
)  # fmt: skip
CHECKS = [
    made("cpu", "info", True, t("Processor"), observed="AMD EPYC 9654"),
    made("vram", "info", True, t("GPU memory"), observed="80.0 GiB"),
    made("memory", "warn", False, t("Main memory"), observed="23.5 GiB"),
    made("disk", "info", True, t("Disk space"), observed="65.2 GiB"), PORT,
]  # fmt: skip
SEEN = Snapshot(
    at=1_800_000_000.0, state="serving", uptime=93_600.0, release="0.1.0-f46999d9bcf4", endpoint="https://0.0.0.0:8443/v1",
    models=(
        ModelRow("chat", True, running=12, waiting=3, slots=64, tokens_out=1843.0, tokens_in=9120.0, ttft_p50=180.0,
                 ttft_p95=640.0, itl_p50=18.0, itl_p95=31.0, kv=0.62, pages_in_use=6200, pages=10_000, prefix=0.41),
        ModelRow("code", False, progress="weights 12.10/60.30 GB"),
    ),
    gpus=(GpuRow(0, "NVIDIA H100 80GB HBM3", 74 * GB, 80 * GB, 66, 700.0, 700.0, 0, 0),),
    alerts=(Alert("certificate", "warning",
                  t("The certificate ends in {days} days, at {at}.", days=13, at="2026-12-06"), "atoll tls renew"),),
    keys=(KeyRow("a0761fbb", "hr-portal", "active"),), requests={"2xx": 120.0, "5xx": 0.0}, age=1.0,
    history={name: tuple((1_800_000_000.0 - 885 + 15 * n, least + step * (n % 9)) for n in range(60))
             for name, least, step in (("tokens_out", 1500.0, 40.0), ("ttft_p95", 320.0, 40.0), ("waiting", 0.0, 0.375),
                                       ("itl_p95", 23.0, 1.0), ("kv", 0.3, 0.04))},
)  # fmt: skip
LOG = [f'{{"time": "2026-11-23T17:2{n}:00Z", "level": "info", "message": "POST /v1/chat/completions"}}'
       for n in range(9)]  # fmt: skip


class Looks:
    """In the place of `Watcher`: always the same look."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> "Looks":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def look(self) -> Snapshot:
        return SEEN


def standing() -> State:
    """In the middle of things: done, failed, stale, interrupted and open steps side by side."""
    says = {"gpu": "failed", "model": "green", "install": "stale", "tune": "interrupted", "verify": "failed"}
    steps = [StepState(step.id, step.title, says.get(step.id, "open")) for step in STEPS]  # type: ignore[arg-type]
    by_name = {step.id: step for step in steps}
    by_name["gpu"].findings = CHECKS
    licence = made("licence", "block", False, t("Engine licence"), observed="Apache-2.0")
    waiver = Waiver(finding="licence", reason="ticket 4711", by="Kim", at="2026-11-23T17:00:00Z")
    by_name["model"].findings = [Finding.model_construct(**{**dict(licence), "waiver": waiver})]
    by_name["install"].why = t("what it depends on has changed")
    by_name["tune"].why = t("its run was cut off")
    by_name["verify"].findings = [
        made("ttft", "block", False, t("first token"), observed="1240 ms", required="1000 ms")]
    return State(steps, {}, [])


def still(folder: Path, language: str, plain: bool, patch: pytest.MonkeyPatch) -> Wizard:
    from tui.dashboard import dashboard
    from tui.steps import gpu

    machine = MachineFacts(form="prefix", prefix="/srv/atoll", memory_bytes=256 * GB, driver="580.95.05", cuda="13.0",
                           gpus=(GpuFact(index=0, uuid="GPU-1", name=GPU.name, memory_bytes=80 * GB,
                                         compute_capability="9.0"),))  # fmt: skip
    patch.setattr(gpu, "gpu_details", lambda: GpuDetails((GPU,), "580.95.05", "13.0"))
    patch.setattr(dashboard, "Watcher", Looks)
    patch.setattr(dashboard.control, "log_lines", lambda *_: LOG)
    patch.setattr(Layout, "name", property(lambda self: "/srv/atoll"))
    patch.setattr(Desk, "state", lambda self: standing())
    patch.setattr(Desk, "machine", lambda self: machine)
    patch.setattr(Desk, "look_for_trouble", lambda self: [])
    patch.setattr(Desk, "boards", lambda self: [board()])
    patch.setattr(Desk, "offers", lambda self: [
        Offer(Path("/media/usb/chat"), "chat", "1.0.0", 27 * GB, "fp8", 131_072, "Apache-2.0", fit="fits"),
        Offer(Path("/media/usb/large"), "large", "2.1.0", 140 * GB, "bf16", 262_144, "MIT", fit="no"),
    ])  # fmt: skip
    app = Wizard(Layout.at(folder / "prefix"), language, plain=plain)
    app.desk.by = "Kim"
    app.desk.amend(pilot={"stages": [{"name": "everybody", "users": ["*"], "duration": 3600.0}]})
    return app


__all__ = ["FAILED", "standing", "still"]
