"""What the operator decided, by flags, an answers file or a front end."""

from dataclasses import dataclass, field
from pathlib import Path

from installer.base.timeouts import DRAIN_TIMEOUT, SMOKE_TIMEOUT, START_TIMEOUT


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """One model to run: which bundle, under which name, on which GPUs.

    `bundle` is a directory, or the name of a bundle on the medium; None keeps the model that is installed under `name`.
    `gpus` are indices or UUIDs; None leaves the choice unchanged. `settings` are long engine flags without dashes.
    """

    bundle: Path | str | None = None
    name: str | None = None
    gpus: tuple[int | str, ...] | None = None
    device: str | None = None
    settings: dict[str, int | float | str | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """One more engine for a model that is installed, as instance `name`. `gpus` are indices or UUIDs."""

    name: str
    of: str
    gpus: tuple[int | str, ...] = ()


@dataclass(frozen=True, slots=True)
class TlsChoice:
    """A certificate of the customer's own, or additional names for the one that is made here."""

    certificate: Path | None = None
    private_key: Path | None = None
    names: tuple[str, ...] = ()
    wanted: bool = False     # TLS on loopback too, where plain HTTP would do

    @property
    def asked(self) -> bool:
        """Whether the operator said anything about it."""
        return self.wanted or bool(self.names) or self.certificate is not None or self.private_key is not None


@dataclass(slots=True)
class InstallOptions:
    """The answers to every question that an install may ask. None: decide by what is installed, or take the default.

    `bundle` is short for one entry of `models`. `prefix` None means the server itself, run by systemd.
    """

    bundle: Path | None = None
    prefix: Path | None = None
    trust_keys: list[Path] = field(default_factory=list)
    accept_licenses: list[str] = field(default_factory=list)
    host: str | None = None
    port: int | None = None
    waivers: dict[str, str] = field(default_factory=dict)
    strict: bool = False
    dry_run: bool = False
    confirmed: bool = False                # the plan needs no confirmation
    start_timeout: float = START_TIMEOUT           # seconds until the service must be ready
    smoke_timeout: float = SMOKE_TIMEOUT
    media: list[Path] = field(default_factory=list)         # searched for the runtime and for bundles
    models: list[ModelChoice] = field(default_factory=list)
    only_these: bool = False               # models not named here are removed
    remove: list[str] = field(default_factory=list)         # instances to remove
    replicas: list[ReplicaChoice] = field(default_factory=list)     # to add
    drain_timeout: float = DRAIN_TIMEOUT   # seconds for the running requests of what is removed
    device: str | None = None              # for every model that does not name its own
    tls: TlsChoice = field(default_factory=TlsChoice)
    allow_downgrade: str | None = None     # reason for installing an older bundle; audited
