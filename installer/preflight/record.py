"""What a check is, what it may look at, and what it reports."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import update_wrapper
from pathlib import Path
from typing import Any, Literal

from installer.base.i18n import Text, t, told
from installer.base.layout import Layout
from installer.preflight.machine import Machine
from installer.preflight.torch_build import TorchBuild
from installer.release.config import Endpoint

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """One fact about this machine: what was seen, what is needed, why it matters, what to do, and the evidence.

    `fix` is a sentence and `command` the line to type, if one is known. `evidence` is what was looked at, as it appears
    on the machine; it is not translated. `strict` failures cannot be waived. Statuses are words, never just colours.
    """

    id: str
    status: Status
    observed: str
    required: str
    why: str
    fix: str = ""
    evidence: str = ""
    strict: bool = False
    waived: str | None = None  # the operator's typed reason
    number: int = 0
    title: str = ""
    command: str = ""
    seconds: float = 0.0

    def to_json(self, language: str = "en") -> dict[str, object]:
        names = ("number", "id", "title", "status", "observed", "required", "why", "fix", "command", "evidence",
                 "strict", "waived", "seconds")  # fmt: skip
        return {name: told(getattr(self, name), language) for name in names}


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """One model to run. `gpus` are indices or UUIDs; empty: the machine's best. `table_bytes` of the weights may stay
    in main memory (`host.tables_in_main_memory`); `tables` is the setting --per-layer-embeddings."""

    name: str
    weight_bytes: int
    vram_gib: int | None = None
    gpus: tuple[str | int, ...] = ()
    table_bytes: int = 0
    tables: str = "auto"


@dataclass(frozen=True, slots=True)
class PreflightContext:
    """The plans that the machine is checked against. Sizes in bytes, `bundle_created` in Unix seconds.

    With several models the sizes are totals, and `models` has them one by one.
    """

    layout: Layout
    endpoint: Endpoint
    model_bytes: int = 0                 # all files of the bundle
    weight_bytes: int = 0                # its weights
    copy_bytes: int = 0                  # what must still be written: 0 when the store has it
    host_ram_bytes: int | None = None    # required by the bundle
    bundle_created: float | None = None
    own_pids: frozenset[int] = field(default_factory=frozenset)  # of our running service, which will release its port
    code_bytes: int = 0                  # taken by the release itself
    shard_bytes: int = 0                 # the largest file of weights
    device: str = "auto"                 # cuda, cpu, or auto: the GPU if there is one
    gpus: tuple[str | int, ...] = ()
    driver_min: str | None = None        # these four as the bundle's maker wrote them
    cuda: str | None = None
    compute_cap: str | None = None
    vram_gib: int | None = None
    models: tuple[ModelNeed, ...] = ()
    tls: bool = False
    certificate_names: tuple[str, ...] | None = None  # of a customer's own certificate
    runtime: Path | None = None          # the runtime's directory on the medium
    pythons: tuple[str, ...] = ()        # versions that the runtime was built for; empty: any that is new enough
    torch: TorchBuild | None = None      # None: from the runtime, or as installed here
    bundle: Path | None = None           # where the model's files are now
    machine: Machine = field(default_factory=Machine)

    @property
    def system(self) -> bool:
        """The server form, with units and users of its own; otherwise everything lies under a prefix."""
        return self.layout.system

    @property
    def needs(self) -> tuple[ModelNeed, ...]:
        """The models, even if only totals are known."""
        return self.models or (ModelNeed("", self.weight_bytes, self.vram_gib, self.gpus),)

    def torch_build(self) -> TorchBuild:
        """The PyTorch that will run."""
        return self.torch or TorchBuild.of_runtime(self.runtime) or TorchBuild.installed()

    def no_gpu_needed(self) -> Text | None:
        """Why no GPU is needed; None if one is."""
        if self.device == "cpu":
            return t("not needed: the CPU device was chosen")
        if self.device == "auto":
            if self.torch_build().cpu_only:
                return t("not needed: this build of PyTorch runs on the CPU")
            here = self.machine.gpu_addresses() or "nvidia" in self.machine.modules() or self.machine.gpus().gpus
            if not here:
                return t("not needed: there is no GPU, so the CPU device is used")
        return None


@dataclass(frozen=True, slots=True)
class Seen:
    """What a check found. `required` and `why` replace the check's own texts if given."""

    status: Status
    observed: str
    fix: str = ""
    command: str = ""
    evidence: str = ""
    required: str = ""
    why: str = ""


Look = Callable[[PreflightContext], Seen]


class Check:
    """One check: its number in the list, its name for waivers, and its function."""

    __name__: str

    def __init__(
        self, look: Look, number: int, id: str, title: Text, required: Text, why: Text, strict: bool, timeout: float
    ) -> None:
        update_wrapper(self, look)
        self.look, self.number, self.id, self.title = look, number, id, title
        self.required, self.why, self.strict, self.timeout = required, why, strict, timeout

    def __call__(self, context: PreflightContext) -> CheckRecord:
        return self.record(self.look(context))

    def record(self, seen: Seen, seconds: float = 0.0) -> CheckRecord:
        """What was seen, completed by what this check always says."""
        return CheckRecord(
            self.id, seen.status, seen.observed, seen.required or self.required, seen.why or self.why, seen.fix,
            seen.evidence, self.strict, None, self.number, self.title, seen.command, round(seconds, 3),
        )


def check(
    number: int, id: str, title: Text, *, required: Text, why: Text, strict: bool = False, timeout: float = 4.0
) -> Callable[[Look], Check]:
    """Make a function a check. After `timeout` seconds its result counts as unknown."""
    return lambda look: Check(look, number, id, title, required, why, strict, timeout)


def gpu_check(number: int, id: str, title: Text, **words: Any) -> Callable[[Look], Check]:
    """A check that passes as 'not needed' if the models run on the CPU."""

    def make(look: Look) -> Check:
        def unless_cpu(context: PreflightContext) -> Seen:
            reason = context.no_gpu_needed()
            return Seen("pass", reason) if reason is not None else look(context)

        return Check(update_wrapper(unless_cpu, look), number, id, title, words["required"], words["why"],
                     words.get("strict", False), words.get("timeout", 9.0))  # fmt: skip

    return make


def gib(size: float) -> str:
    """A size for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
