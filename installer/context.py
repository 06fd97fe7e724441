"""What the steps of one run share: the operator's options, the tools, and the facts found on the way."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from installer.config import Endpoint
from installer.errors import InstallError
from installer.frontend import Frontend
from installer.journal import History, Journal
from installer.keys import NewKey
from installer.layout import Layout
from installer.licence import Approval
from installer.options import InstallOptions
from installer.plan import Plan
from installer.preflight import CheckRecord
from installer.release import Release
from installer.service import ServiceManager
from installer.smoke import SmokeResult
from offline_bundle.errors import BundleError
from offline_bundle.manifest import BundleManifest


@dataclass(slots=True)
class Context:
    """Filled in by the steps in their order; each step reads only what an earlier one has set."""

    options: InstallOptions
    layout: Layout
    frontend: Frontend
    service: ServiceManager
    release_command: tuple[str, ...]
    journal: Journal
    before: History                       # as the journal told it when this run began
    seen: int = 0                         # how many records it had then

    # discover
    trusted_keys: list[Path] = field(default_factory=list)
    base_config: str | None = None        # the settings that stand, or stood before an interrupted switch
    endpoint: Endpoint = field(default_factory=lambda: Endpoint("127.0.0.1", 0))
    own_pids: frozenset[int] = frozenset()
    # verify
    source: Path = Path()                 # where the verified bytes are: the medium, or the store
    manifest: BundleManifest | None = None
    digest: str = ""
    key_fingerprint: str = ""
    in_store: bool = False
    release: Release | None = None
    config_text: str = ""
    # preflight, licence, plan
    checks: list[CheckRecord] = field(default_factory=list)
    approval: Approval | None = None
    plan: Plan | None = None
    # start, smoke
    new_key: NewKey | None = None         # the operator's, made by this run
    smoke_key: NewKey | None = None
    smoke: SmokeResult | None = None

    @property
    def history(self) -> History:
        """As the journal tells it now."""
        return History(self.journal.records)

    @property
    def model_dir(self) -> Path:
        """The directory that the engine loads."""
        return self.layout.models / self.digest / "model"

    def require(self) -> tuple[BundleManifest, Release]:
        """The verified manifest and the release made of it; a bug if asked for before `verify`."""
        assert self.manifest is not None
        assert self.release is not None
        return self.manifest, self.release


Step = Callable[[Context], str]
"""Does one step and returns one line about it. Raises InstallError, BundleError or OSError; run again, it converges."""


def as_install_error(error: BundleError, changed: str) -> InstallError:
    """A refusal by `offline_bundle`, in the installer's terms."""
    return InstallError(error.message, exit_code=error.exit_code, changed=changed, hint=error.hint)
