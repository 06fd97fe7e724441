"""The checklist on a GPU: a preset's model in its real shape is installed, tuned, verified and signed off, unattended.

Random weights, so quality is not judged. Needs a server's packages in this Python's own folder (services
start without PYTHONPATH), and disk for the model three times.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kit import DEVICE
from ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)
for package in ("fastapi", "uvicorn", "httptools", "uvloop", "msgspec", "prometheus_client", "transformers",
                "cryptography", "typer", "tomlkit", "psutil"):  # fmt: skip
    pytest.importorskip(package, reason=f"an installation needs {package}, which this machine's Python lacks")

ROOT = Path(__file__).parents[2]
MODEL = os.environ.get("ATOLL_TEST_PRESET", "gemma4-e4b")
CONFIGS = (ROOT / "appliance" / "service" / "presets" / "configs", ROOT / "engine" / "bench" / "configs")
BUDGET = os.environ.get("ATOLL_TEST_BUDGET", "240s")
TARGET = "ttft=500ms,itl=40ms"
REVIEW = {
    "reviewer": "Kim", "expires": "2999-01-01", "lineage": "random", "acceptable_use": "none",
    "commercial_terms": "none", "attribution": "none", "modifications": "none", "drafter": "there is none",
    "trademarks": "none", "export": "none", "redistribution": "not passed on",
}  # fmt: skip
# Nothing that random weights say is right.
WAIVERS = dict.fromkeys(("golden", "repetition", "saturation", "quality-answers"), "random weights")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # Here, and not above: a machine without these packages skips the test.
    import tomlkit
    from random_model import save_random_model

    from appliance.service.facts import engine_facts
    from installer.base.layout import Layout
    from installer.operate.lifecycle import stop
    from offline_bundle import inspect_bundle
    from offline_bundle.model.build import build_bundle
    from offline_bundle.signing.keys import new_keypair

    root = tmp_path_factory.mktemp("checklist")
    config = next(base / MODEL / "config.json" for base in CONFIGS if (base / MODEL / "config.json").exists())
    save_random_model(config, root / "model", DEVICE)
    torch.cuda.empty_cache()
    keys = new_keypair(root, "vendor")
    (root / "LICENSE").write_text("You may use this model for tests.\n" * 20)
    bundle = build_bundle(
        root / "model", root, name=MODEL, version="1.0.0", sequence=1, license_id="Apache-2.0",
        license_file=root / "LICENSE", source_repo="atoll/random", source_revision="0" * 40,
        private_key=keys.private_path,
    )  # fmt: skip
    shutil.rmtree(root / "model")
    terms, engine = inspect_bundle(bundle).manifest.license, engine_facts()
    answers = {
        "schema_version": 1, "bundle": str(bundle), "trust_keys": [str(keys.public_path)], "device": "cuda",
        "port": free_port(), "confirm_plan": True, "waivers": WAIVERS,
        "accept_licenses": [f"{engine.spdx}@{engine.licence_sha256}", f"{terms.spdx}@{terms.sha256}"],
        "review": {MODEL: REVIEW}, "preset": {"workload": "chat"},
        "tune": {"profile": "chat", "budget": BUDGET, "target": TARGET, "confirm": True},
        "verify": {"profile": "chat", "seconds": 20.0, "soak_seconds": 30.0, "targets": {"ttft": 1000, "itl": 80}},
        "pilot": {"interval": 0.5, "signed_by": "Kim", "stages": [
            {"name": "all", "users": ["*"], "duration": 3.0, "stop": {"window": 2.0}, "goal": {"requests": 0}}]},
    }  # fmt: skip
    (root / "answers.toml").write_text(tomlkit.dumps(answers))
    yield root
    stop(Layout.at(root / "prefix"))


def atoll(prefix: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = os.environ | {"ATOLL_PREFIX": str(prefix / "prefix"), "PYTHONPATH": path, "ATOLL_LANG": "en"}
    return subprocess.run(
        [sys.executable, "-m", "appliance.cli", *words], env=environment, capture_output=True, text=True, check=False
    )


def test_a_preset_is_installed_tuned_and_verified(prefix: Path, capsys: pytest.CaptureFixture) -> None:
    done = atoll(prefix, "checklist", "run", "--answers", str(prefix / "answers.toml"))
    shown: dict[str, Any] = json.loads(atoll(prefix, "checklist", "show", "--json").stdout)
    steps = {step["id"]: step for step in shown["steps"]}
    with capsys.disabled():
        print(done.stdout[-12000:], done.stderr[-3000:])
        print(json.dumps(steps["tune"].get("summary")), json.dumps(steps["verify"].get("summary")))
    assert [steps[name]["status"] for name in steps] == ["green"] * 6
    assert shown["done"] is True
    assert f"{MODEL}/chat" in done.stdout
    (tuned,) = steps["tune"]["summary"]["models"]
    assert tuned["after"]["goodput"] >= tuned["before"]["goodput"]
    assert len(tuned["trials"]) >= 3
