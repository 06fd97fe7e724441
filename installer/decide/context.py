"""What the steps of one run share: the operator's options, the tools, and the facts found so far."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from installer.access.api_keys import NewKey
from installer.access.licence import Approval
from installer.base.errors import InstallError
from installer.base.journal import History, Journal
from installer.base.layout import Layout
from installer.decide.frontend import Frontend
from installer.decide.install_options import InstallOptions, ModelChoice
from installer.decide.plan import Plan
from installer.preflight import CheckRecord
from installer.release import config
from installer.release.config import Endpoint
from installer.release.release import Release
from installer.service.manager import ServiceManager
from installer.service.smoke_test import SmokeResult
from installer.service.snapshots import Snapshot
from installer.service.units import UnitFile
from installer.tls.certificates import Pair
from offline_bundle.errors import BundleError
from offline_bundle.model.manifest import BundleManifest
from offline_bundle.signing.keys import Keyring


@dataclass(slots=True)
class Model:
    """One model that will run when the install is done."""

    instance: str                         # its name in the API, and of its unit
    choice: ModelChoice
    source: Path                          # directory of the verified bytes: on the medium, or in the store
    manifest: BundleManifest
    digest: str
    key_fingerprint: str
    kept: bool = False                    # it is already installed, and no bundle was given for it
    in_store: bool = False
    approval: Approval | None = None      # of its licence, given in this run

    def facts(self) -> dict[str, Any]:
        """What a release and the journal record about it."""
        return {
            "instance": self.instance,
            "name": self.manifest.name,
            "version": self.manifest.version,
            "sequence": self.manifest.sequence,
            "digest": self.digest,
            "key_fingerprint": self.key_fingerprint,
            "spdx": self.manifest.license.spdx,
        }


@dataclass(slots=True)
class Context:
    """Filled in by the steps in their order. Each step reads only what an earlier one has set."""

    options: InstallOptions
    layout: Layout
    frontend: Frontend
    service: ServiceManager
    release_command: tuple[str, ...]
    journal: Journal
    before: History                       # what the journal said when this run began
    seen: int = 0                         # number of its records then
    kind: str = "install"                 # or "rollback": kind of the switch that this run opens

    # discover
    trusted_keys: Keyring = field(default_factory=lambda: Keyring(()))    # keys accepted for the medium
    kept_keys: Keyring = field(default_factory=lambda: Keyring(()))       # keys accepted for what is installed
    base_config: str | None = None        # the settings in force, or those from before an interrupted switch
    endpoint: Endpoint = field(default_factory=lambda: Endpoint("127.0.0.1", 0))
    own_pids: frozenset[int] = frozenset()
    tls_names: list[str] = field(default_factory=list)    # names in the certificate; empty: plain HTTP
    tls_import: Pair | None = None                        # the customer's, checked
    # verify
    models: list[Model] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)      # instances to stop
    downgrades: list[dict[str, Any]] = field(default_factory=list)
    release: Release | None = None
    config_text: str = ""
    units: list[UnitFile] = field(default_factory=list)   # system form: every file that systemd reads
    # preflight, plan
    checks: list[CheckRecord] = field(default_factory=list)
    plan: Plan | None = None
    # units, switch, start, smoke
    leaving: list[str] = field(default_factory=list)      # engines to stop once the gateway has let them go
    new_key: NewKey | None = None         # the operator's, made by this run
    smoke_key: NewKey | None = None
    smoke: SmokeResult | None = None      # of the first model
    startup_s: float | None = None        # from starting the processes to an engine's first token
    downtime_s: float | None = None       # from the end of the old service to that token; None: nothing ran before

    @property
    def history(self) -> History:
        """What the journal says now."""
        return History(self.journal.records)

    @property
    def names(self) -> list[str]:
        """The instances that will run: the models, then their replicas."""
        return [*(model.instance for model in self.models), *sorted(self.replicas)]

    @property
    def replicas(self) -> dict[str, str]:
        """Engine -> the model whose replica it is."""
        return config.replicas(self.config_text, self.layout.config) if self.layout.system else {}

    def snapshot(self) -> Snapshot:
        """What a rollback to this release will need."""
        return Snapshot(self.config_text, self.units, self.names)

    def model_dir(self, model: Model) -> Path:
        """The directory that its engine loads."""
        return self.layout.models / model.digest / "model"

    def target(self) -> Release:
        """The release that this run leads to. Asking for it before `verify` is a bug."""
        assert self.release is not None
        return self.release


Step = Callable[[Context], str]
"""Does one step and returns one line about it. Raises InstallError, BundleError or OSError; run again, it converges."""


def as_install_error(error: BundleError, changed: str) -> InstallError:
    """A refusal by `offline_bundle` as an InstallError."""
    return InstallError(error.message, exit_code=error.exit_code, changed=changed, hint=error.hint)
