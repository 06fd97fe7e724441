"""Typed facts that the steps decide on: this machine, what is installed, what the medium holds. Gathered once, then
read."""

import contextlib
import hashlib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from installer.base.errors import ExitCode, InstallError, io_error
from installer.base.i18n import t
from installer.base.layout import Layout, code_root
from installer.decide.context import Context, Model
from installer.decide.frontend import Unattended
from installer.decide.install_options import InstallOptions, ModelChoice
from installer.operate.install import Installer
from installer.operate.lifecycle import history_of
from installer.preflight.machine import Machine
from installer.release import release
from installer.release.release import code_version
from offline_bundle.signing.keys import Keyring

ENGINE_SPDX = "Apache-2.0"


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True)


class GpuFact(_Facts):
    """One GPU, as its driver reports it."""

    index: int | None
    uuid: str | None
    name: str | None
    memory_bytes: int | None
    compute_capability: str | None


class MachineFacts(_Facts):
    """This machine. `form` is "server" (systemd) or "prefix"."""

    form: str
    prefix: str
    memory_bytes: int
    gpus: tuple[GpuFact, ...]
    driver: str | None
    cuda: str | None


class ModelFacts(_Facts):
    """A model on the medium or installed, by its signed manifest."""

    instance: str
    name: str
    version: str
    digest: str
    key_fingerprint: str
    spdx: str
    licence_sha256: str
    acceptance: str
    path: str


class ReleaseFacts(_Facts):
    """What is installed and committed; `live` is where `current` points."""

    committed: str | None
    previous: str | None
    live: str | None
    digests: tuple[str, ...]


class EngineFacts(_Facts):
    """The running code, and its licence."""

    version: str
    spdx: str
    licence_sha256: str | None


class Facts(_Facts):
    """Everything that the steps know at their start. `problem` says why the models are unknown."""

    machine: MachineFacts
    engine: EngineFacts
    installed: ReleaseFacts
    models: tuple[ModelFacts, ...]
    problem: str | None = None


class Survey:
    """The facts, and the installer's objects that they were read from, for the steps that use them."""

    def __init__(self, layout: Layout, options: InstallOptions) -> None:
        self.layout, self.options = layout, options
        self.context: Context | None = None
        self.error: InstallError | None = None
        try:
            self.context = _survey(layout, options)
        except InstallError as error:
            self.error = error
            if error.exit_code == ExitCode.MEDIA and release.live(layout) is not None:
                self._of_what_is_installed()
        self.facts = Facts(
            machine=machine_facts(layout),
            engine=engine_facts(),
            installed=installed_facts(layout),
            models=tuple(model_facts(model) for model in self.models),
            problem=self.error.message if self.error else None,
        )

    def _of_what_is_installed(self) -> None:
        """Without the medium, take the installed models: the store still holds them."""
        with contextlib.suppress(InstallError):
            here = release.bundles_of(release.read_info(self.layout, release.live(self.layout) or ""))
            kept = [ModelChoice(name=bundle["instance"]) for bundle in here]
            options = replace(self.options, bundle=None, media=[], models=kept, trust_keys=[])
            self.context, self.error = _survey(self.layout, options), None

    @property
    def models(self) -> list[Model]:
        return self.context.models if self.context else []

    @property
    def keys(self) -> Keyring:
        return self.context.trusted_keys if self.context else Keyring(())

    def known(self) -> Context:
        """What the installer found. Raises the InstallError that prevented it."""
        if self.error is not None:
            raise self.error
        assert self.context is not None
        return self.context


def _survey(layout: Layout, options: InstallOptions) -> Context:
    try:
        return Installer(options, Unattended(), layout=layout).survey()
    except OSError as error:
        raise io_error(t("read the medium"), error) from error


def machine_facts(layout: Layout, machine: Machine | None = None) -> MachineFacts:
    machine = machine or Machine()
    found = machine.gpus()
    gpus = tuple(
        GpuFact(index=gpu.index, uuid=gpu.uuid, name=gpu.name, memory_bytes=gpu.memory_total,
                compute_capability=_dotted(gpu.compute_cap)) for gpu in found.gpus
    )  # fmt: skip
    return MachineFacts(form="server" if layout.system else "prefix", prefix=str(layout.prefix),
                        memory_bytes=machine.memory()[0], gpus=gpus, driver=found.driver or machine.kernel_driver()
                        or None, cuda=_dotted(found.cuda))  # fmt: skip


def engine_facts() -> EngineFacts:
    text = engine_licence()
    return EngineFacts(version=code_version(), spdx=ENGINE_SPDX,
                       licence_sha256=hashlib.sha256(text).hexdigest() if text else None)  # fmt: skip


def engine_licence() -> bytes | None:
    """The text of Atoll's own licence, as it came with the code; None if it is missing."""
    root = code_root()
    places = [root / "LICENSE"]
    try:
        listed = metadata.files("atoll") or []
    except metadata.PackageNotFoundError:
        listed = []
    places += [Path(str(file.locate())) for file in listed if file.name == "LICENSE"]
    places += sorted(root.glob("atoll-*.dist-info/licenses/LICENSE"))
    for place in places:
        try:
            return place.read_bytes()
        except OSError:
            continue
    return None


def installed_facts(layout: Layout) -> ReleaseFacts:
    try:
        committed: dict[str, Any] = history_of(layout).committed or {}
    except InstallError:  # there is no installation of ours
        committed = {}
    name = committed.get("release")
    bundles = release.bundles_of(release.read_info(layout, name)) if name else []
    return ReleaseFacts(committed=name, previous=committed.get("previous"), live=release.live(layout),
                        digests=tuple(sorted(str(bundle["digest"]) for bundle in bundles)))  # fmt: skip


def model_facts(model: Model) -> ModelFacts:
    manifest = model.manifest
    return ModelFacts(
        instance=model.instance, name=manifest.name, version=manifest.version, digest=model.digest,
        key_fingerprint=model.key_fingerprint, spdx=manifest.license.spdx, licence_sha256=manifest.license.sha256,
        acceptance=manifest.license.acceptance, path=str(model.source),
    )  # fmt: skip


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]}"
