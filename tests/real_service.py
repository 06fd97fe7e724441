"""What tests of a real service begin with: a model as a signed bundle, and its installation under a prefix."""

from pathlib import Path
from typing import Any

from ports import free_port

from installer.base.layout import Layout
from installer.decide.install_options import InstallOptions
from installer.operate.install import Installer
from offline_bundle import inspect_bundle
from offline_bundle.model.build import build_bundle
from offline_bundle.signing.keys import KeyPair

MODEL = "smollm2-135m-instruct"

# A load that a busy machine of two cores bears.
SMALL_LOAD = """\
endpoint = "completions"
input = [8, 16]
output = [4, 6]
requests = 6
warmup = 1
[arrival]
clients = 2
"""
# What a model of 135 million parameters may miss. A real one's answers are judged.
SMALL_MODEL = dict.fromkeys(("golden", "repetition", "quality-answers"), "a small model for tests")


def signed(model: Path, to: Path, signer: KeyPair, name: str = MODEL) -> Path:
    """A bundle of a model's directory, in `to`. A model without a licence of its own gets a short one."""
    licence = next((path for path in model.iterdir() if path.name.upper().startswith("LICENSE")), None)
    if licence is None:
        licence = to / "LICENSE"
        licence.write_text("You may use this model for tests.\n")
    return build_bundle(
        model, to, name=name, version="1.0.0", sequence=1, license_id="Apache-2.0", license_file=licence,
        source_repo="HuggingFaceTB/SmolLM2-135M-Instruct", source_revision="0" * 40, private_key=signer.private_path,
    )  # fmt: skip


def licence_answer(bundle: Path) -> str:
    """What accepts the licence of a bundle."""
    terms = inspect_bundle(bundle).manifest.license
    return f"{terms.spdx}@{terms.sha256}"


def install(bundle: Path, prefix: Path, signer: KeyPair, front: Any) -> Layout:
    """The bundle, installed under a prefix; its service answers."""
    layout = Layout.at(prefix)
    options = InstallOptions(bundle, layout.prefix, trust_keys=[signer.public_path], port=free_port(), device="cpu",
                             confirmed=True, accept_licenses=[licence_answer(bundle)])  # fmt: skip
    Installer(options, front, layout=layout).run()
    return layout
