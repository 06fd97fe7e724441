"""Which settings of an engine are tuned, in which steps, and which of them the memory planner allows.

On a GPU: sequences at once, tokens per step, the share of its memory, the precision of the KV cache, and of recurrent
layers' states if the model has any. On a CPU: sequences and tokens.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from appliance.service.presets.catalogue import GpuModel
from appliance.service.presets.resolve import Preset
from appliance.service.tuning.search import Knob, Setting, Space, Value
from engine.capabilities import nvidia_driver_present, resolve_device
from engine.config import EngineConfig
from engine.errors import AtollError
from engine.plan import PlannedGpu, plan_engine
from engine.server.settings.commands import model_config, parse_serve
from installer.base.errors import usage_error
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.release.config import with_dashes

SEQS, TOKENS, SHARE = "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization"
KV, STATES = "kv-cache-dtype", "mamba-ssm-cache-dtype"
KNOBS = (SEQS, TOKENS, SHARE, KV, STATES)
KV_BYTES = "kv-cache-memory-bytes"

_SEQS = {"cpu": 256, "cuda": 1024}            # the engine's defaults, if nobody sets them and nothing was planned
_TOKENS = {"cpu": 512, "cuda": 8192}
_TOKENS_RANGE = {"cpu": (64, 4096), "cuda": (512, 32_768)}
_SHARES = (0.85, 0.9, 0.92, 0.95)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A setting that is not tuned, and why (a Text)."""

    name: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """The part of the load that decides the steps. `clients`: most requests in progress at once, None for an open
    loop."""

    clients: int | None
    longest: int                   # tokens of its longest request


def engine_config(layout: Layout, instance: str) -> EngineConfig:
    """The engine's settings, parsed as the engine parses them. Raises InstallError (usage)."""
    try:
        if layout.system:
            return model_config(instance, layout.config)
        return parse_serve(["--config", str(layout.config)]).engine
    except AtollError as error:
        raise usage_error(error.message, error.hint or t("Correct it in {path}.", path=layout.config)) from error


class Knobs:
    """Finds the search space of one engine.

    `settings`: those in the file. `ours`: values that a tuning wrote or a preset has; any other value is the operator's
    and stays. `only`: tune exactly these, even the operator's.
    """

    def __init__(
        self, config: EngineConfig, settings: Mapping[str, Any], traffic: Traffic, *, card: GpuModel | None = None,
        ours: Mapping[str, Collection[Any]] | None = None, only: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.config, self.settings, self.traffic, self.card = config, with_dashes(settings), traffic, card
        self.ours, self.only = ours or {}, only
        has_gpu = card is not None or config.device == "cuda" or nvidia_driver_present()
        self.device = resolve_device(config.device, has_gpu)
        self.base = self._plan(config)

    @property
    def is_unplanned(self) -> bool:
        """A GPU of unknown memory: what does not fit is found by trying."""
        return self.device == "cuda" and self.base is None

    def space(self) -> tuple[Space, list[Pinned]]:
        """Raises InstallError (usage) for knobs that are unknown here, or that exclude each other."""
        knobs, pinned = [], []
        known = self._ladders()
        self._check_only(known)
        for name, (amounts, now) in known.items():
            if why := self._why_not(name):
                pinned.append(Pinned(name, self.settings.get(name), why))
            elif (knob := _knob(name, amounts, self.settings.get(name), now)) is not None:
                knobs.append(knob)
        return Space(tuple(knobs), self._fits()), pinned

    def _check_only(self, known: Mapping[str, Any]) -> None:
        for name in self.only:
            if name not in known:
                raise usage_error(
                    t("'{name}' cannot be tuned here.", name=name),
                    t("On this device and for this model these can: {names}.", names=joined(known)),
                )
        if SHARE in self.only and KV_BYTES in self.settings:
            raise usage_error(
                t("{one} has no effect together with {other}.", one=SHARE, other=KV_BYTES),
                t("Remove {other} from the settings, or leave {one} out.", one=SHARE, other=KV_BYTES),
            )

    def _why_not(self, name: str) -> str:
        if self.only:
            return "" if name in self.only else t("not among the requested ones")
        if name == SHARE and KV_BYTES in self.settings:
            return t("it has no effect together with {other}", other=KV_BYTES)
        if name in self.settings and self.settings[name] not in self.ours.get(name, ()):
            return t("the operator's own value")
        return ""

    def _ladders(self) -> dict[str, tuple[list[Any], Any]]:
        """Knob → (its steps, from least to most memory; the current value)."""
        found: dict[str, tuple[list[Any], Any]] = {}
        seqs = self.config.max_num_seqs or (self.base["max_num_seqs"] if self.base else _SEQS[self.device])
        found[SEQS] = (sequence_steps(seqs, self.traffic.clients), seqs)
        planned_tokens = self.base["max_num_batched_tokens"] if self.base else _TOKENS[self.device]
        tokens = self.config.max_num_batched_tokens or planned_tokens
        most = self.traffic.longest * (self.traffic.clients or 1_000)
        found[TOKENS] = (token_steps(tokens, self.device, most), tokens)
        if self.device == "cuda":
            share = self.config.gpu_memory_utilization
            found[SHARE] = (sorted({*_SHARES, share}), share)
            kv = self.config.kv_cache_dtype
            found[KV] = (["fp8", "auto"] if kv in ("auto", "fp8") else [kv], kv)
            if self.base is None or self.base["state_bytes_per_sequence"]:
                states = self.config.mamba_ssm_cache_dtype
                found[STATES] = (["bfloat16", "auto"] if states in ("auto", "bfloat16") else [states], states)
        return found

    def _fits(self) -> Callable[[Setting], bool]:
        base = self.base
        if base is None:
            return lambda setting: True

        def fits(setting: Setting) -> bool:
            """As planned, without a shorter context or fewer sequences than requested."""
            found = self._plan(replace(self.config, **{
                name.replace("-", "_"): value for name, value in setting.items() if value is not None
            }))  # fmt: skip
            if found is None or found["max_model_len"] < base["max_model_len"]:
                return False
            wanted = setting.get(SEQS)
            return not isinstance(wanted, int) or found["max_num_seqs"] >= wanted

        return fits

    def _plan(self, config: EngineConfig) -> dict[str, Any] | None:
        """The planner's numbers; None if it refuses, or if there is nothing to plan with."""
        if self.device != "cuda" or self.card is None:
            return None
        planned: PlannedGpu = self.card.planned
        try:
            return plan_engine(config, planned).numbers()
        except AtollError:
            return None


def sequence_steps(now: int, clients: int | None) -> list[int]:
    """Steps of the number of sequences at once.

    With a known number of clients, more than these change nothing; fewer make streams steadier, but requests wait.
    """
    if clients is None:
        return sorted({max(1, now // 4), max(1, now // 2), now, now * 2, now * 4})
    below = {max(1, clients // 2), max(1, clients // 4)}
    steps = {step for step in below if step < now} | {now}
    step = now
    while step < clients:
        step = min(step * 2, clients)
        steps.add(step)
    return sorted(steps)


def token_steps(now: int, device: str, most: int) -> list[int]:
    """Tokens of one step, halved and doubled. More than the load ever brings at once would change nothing."""
    low, high = _TOKENS_RANGE[device]
    steps = {step for step in (now // 4, now // 2, now * 2, now * 4) if low <= step <= high}
    return sorted({step for step in steps if step < now or step // 2 < most} | {now})


def _knob(name: str, amounts: list[Any], written: Any, now: Any) -> Knob | None:
    """None if there is nothing to choose from. The current value keeps its spelling: an absent key stays absent."""
    if len(amounts) < 2 or now not in amounts:
        return None
    values: tuple[Value, ...] = tuple(written if amount == now else amount for amount in amounts)
    return Knob(name, values, amounts.index(now), now if isinstance(now, int) else None)


def preset_values(preset: Preset) -> dict[str, Any]:
    """Knob → the preset's value."""
    return {name: value for name, value in preset.settings.items() if name in KNOBS}
