"""The four knobs of an installed model on one memory budget: what fits, with which reserve, at which expected speed.

A front turns a knob and calls `Board.seen`; the memory planner answers in a millisecond once PyTorch is loaded. Nothing
is written here: the step "tune" sets `settings`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from appliance.service.facts import machine_facts
from appliance.service.model_config import read_config
from appliance.service.planning import model_and_gpu, planner
from appliance.service.planning.planner import MOST_TOKENS, MOST_USERS, Knobs, Planned
from appliance.service.presets.answers import PresetAnswers
from appliance.service.presets.catalogue import GpuModel
from appliance.service.presets.choose import choose
from appliance.service.presets.resolve import Preset
from appliance.service.tuning.knobs import engine_config
from engine.config import EngineConfig
from engine.plan import native_context
from installer.base.errors import usage_error
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.operate.lifecycle import history_of
from installer.release import release

Setting = dict[str, int | float | str | bool]
PRECISIONS = ("auto", "fp8", "int8")
LEAST_SHARE, MOST_SHARE = 0.05, 1.0
_TITLES = {
    "weights": t("weights"), "kv_cache": t("KV cache"), "states": t("states"), "graphs": t("graphs and workspace"),
    "spare": t("spare"), "others": t("left to others"),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A piece of the GPU's memory. `kind` is a key that a front colours by."""

    kind: str
    title: str
    bytes: int


@dataclass(frozen=True)
class Seen:
    """One position of the knobs. `parts` fill the GPU's whole memory; none where it does not fit. Lines are texts."""

    knobs: Knobs
    planned: Planned | None
    parts: tuple[Part, ...]
    total: int
    fits: str
    helps: tuple[str, ...]
    speed: str


@dataclass(frozen=True)
class Board:
    """One installed model on its GPU. `card` None: it computes on the CPU, where no memory is planned."""

    model: str
    title: str
    directory: Path
    card: GpuModel | None
    knobs: Knobs
    preset: Preset | None = None
    why_no_preset: str = ""

    @property
    def longest(self) -> int:
        """The longest context that the model knows, in tokens."""
        return native_context(self.directory)

    def seen(self, knobs: Knobs) -> Seen:
        """Raises InstallError (usage) for a number that no plan can mean."""
        if self.card is None:
            return Seen(knobs, None, (), 0, t("This model computes on the CPU; its memory is not planned."), (), "")
        _check(knobs, self.longest)
        found = planner.plan(self.directory, self.card, knobs)
        if found is None:
            helps = tuple(t("{change} on {gpu}: {users} users with {context} tokens each", change=change, gpu=gpu,
                            users=f"{then.users:,}", context=f"{then.context:,}")
                          for _, change, gpu, then in planner.fitting(self.directory, self.card, knobs))  # fmt: skip
            refused = planner.refusal(self.directory, self.card, knobs)
            return Seen(knobs, None, (), self.card.planned.total, t("Does not fit: {why}", why=refused), helps, "")
        return Seen(knobs, found, _parts(found), found.numbers["total"], self._fits(found), (), self._speed(found))

    def _fits(self, found: Planned) -> str:
        """Such as: Fits: 8 users with 32,768 tokens each, or 64 with 3,072."""
        assert self.card is not None
        seqs = found.numbers["max_num_seqs"]
        full = t("Fits: {users} users with {context} tokens each", users=f"{found.users:,}",
                 context=f"{found.context:,}")  # fmt: skip
        shorter = planner.longest(self.directory, self.card, found.knobs, seqs) if seqs > found.users else None
        if shorter is None:
            return t("{said}.", said=full)
        return t("{said}, or {users} with {context}.", said=full, users=f"{seqs:,}", context=f"{shorter.context:,}")

    def _speed(self, found: Planned) -> str:
        assert self.card is not None
        preset = self.preset
        same = preset is not None and preset.speed.measured and (
            preset.planned.knobs.quantization, preset.planned.knobs.kv_cache_dtype) == (
            found.knobs.quantization, found.knobs.kv_cache_dtype)  # fmt: skip
        if preset is not None and same and preset.speed.many is not None:
            return t("Expected: {many} tokens/s for 64 requests together, {one} for one (measured on such a GPU).",
                     many=f"{preset.speed.many:,.0f}", one=f"{preset.speed.single or 0:,.0f}")  # fmt: skip
        bound = planner.stream_bound(self.directory, self.card, found.knobs)
        if bound is None:
            return t("Expected speed: not known for this GPU. Measure it.")
        return t("Expected: at most {rate} tokens/s for one user (memory bandwidth). Measure it for the rest.",
                 rate=f"{bound:,.0f}")  # fmt: skip

    def settings(self, knobs: Knobs) -> Setting:
        """The four settings, as `atoll.toml` has them. Raises InstallError (usage) for what does not fit."""
        seen = self.seen(knobs)
        if seen.planned is None:
            raise usage_error(seen.fits, seen.helps[0] if seen.helps else "")
        numbers = seen.planned.numbers
        return {"max-model-len": numbers["max_model_len"], "max-num-seqs": numbers["max_num_seqs"],
                "gpu-memory-utilization": knobs.gpu_memory_utilization, "kv-cache-dtype": knobs.kv_cache_dtype}

    def of_preset(self) -> Knobs | None:
        return self.preset.planned.knobs if self.preset is not None else None


def boards(layout: Layout, answers: PresetAnswers) -> list[Board]:
    """One for each installed model. Loads PyTorch. Raises InstallError."""
    committed = history_of(layout).committed
    if committed is None:
        raise usage_error(t("Nothing is installed yet, so there is nothing to tune."),
                          t("Install first: atoll checklist run"))  # fmt: skip
    gpus = machine_facts(layout).gpus
    found = []
    for bundle in release.bundles_of(committed):
        name = str(bundle["instance"])
        config = engine_config(layout, name)
        card = model_and_gpu.card_of(gpus[0]) if gpus and config.device != "cpu" else None
        directory = layout.models / str(bundle["digest"]) / "model"
        found.append(board_of(name, str(bundle["name"]), directory, card, config, answers))
    return found


def board_of(
    name: str, title: str, directory: Path, card: GpuModel | None, config: EngineConfig, answers: PresetAnswers,
) -> Board:  # fmt: skip
    """The board with its knobs at the current settings; a knob that is not set stands where the engine would put it."""
    context = config.max_model_len if isinstance(config.max_model_len, int) else None
    knobs = Knobs(context=context, quantization=config.quantization, kv_cache_dtype=config.kv_cache_dtype,
                  gpu_memory_utilization=config.gpu_memory_utilization, sequences=config.max_num_seqs)  # fmt: skip
    if card is None:
        return Board(name, title, directory, None, knobs)
    if (found := planner.plan(directory, card, knobs)) is not None:
        knobs = replace(knobs, context=found.context, sequences=found.numbers["max_num_seqs"])
    chosen = choose(name, read_config(directory), card, answers, {}, {})
    return Board(name, title, directory, card, knobs, chosen.preset, "" if chosen.preset else chosen.finding.observed)


def _check(knobs: Knobs, longest: int) -> None:
    """In the words of a form, not of a command line."""
    limits = ((t("Context length"), knobs.context, min(longest, MOST_TOKENS)),
              (t("Users at once"), knobs.sequences, MOST_USERS))  # fmt: skip
    for title, value, most in limits:
        if value is not None and not 1 <= value <= most:
            raise usage_error(t("{title}: a whole number from 1 to {most}.", title=title, most=f"{most:,}"))
    if not LEAST_SHARE <= knobs.gpu_memory_utilization <= MOST_SHARE:
        raise usage_error(t("GPU memory share: a number from {least} to {most}.", least=LEAST_SHARE, most=MOST_SHARE))
    if knobs.kv_cache_dtype not in PRECISIONS:
        raise usage_error(t("KV precision: auto, fp8 or int8."))


def _parts(found: Planned) -> tuple[Part, ...]:
    numbers = found.numbers
    fixed, parts = numbers["parts"], []
    states = numbers["state_bytes_per_sequence"] * found.users
    cache = max(0, numbers["kv_cache"] - states)
    rest = sum(size for name, size in fixed.items() if name != "weights") + numbers["request_table"]
    taken = fixed.get("weights", 0) + numbers["kv_cache"] + rest
    sizes = {"weights": fixed.get("weights", 0), "kv_cache": cache, "states": min(states, numbers["kv_cache"]),
             "graphs": rest, "spare": max(0, numbers["usable"] - taken),
             "others": max(0, numbers["total"] - numbers["usable"])}  # fmt: skip
    parts = [Part(kind, _TITLES[kind], size) for kind, size in sizes.items() if size]
    return tuple(parts)
