"""From model, GPU and workload to flags, each with its reason. The memory planner decides what a preset may promise."""

import shlex
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from appliance.service.planning.planner import Knobs, Planned, plan, stream_bound
from appliance.service.presets.catalogue import (
    GpuModel,
    Model,
    Reason,
    Sampling,
    Workload,
    catalogue,
    find_card,
    find_model,
)
from engine.plan import native_context
from installer.base.errors import ExitCode, InstallError, usage_error
from installer.base.i18n import joined, t

WHITE_PAPER = "white-paper"
Setting = int | float | str | bool


@dataclass(frozen=True)
class Choice:
    """A flag of `atoll serve`, its value (None: a switch) and why it has it."""

    flag: str
    value: str | None
    reason: Reason


@dataclass(frozen=True)
class Speed:
    """Tokens a second. `single`: one stream; `many`: 64 requests together. Not `measured`: a bound that no engine
    exceeds, computed from the memory's bandwidth."""

    measured: bool
    single: float | None
    many: float | None
    source: str


@dataclass(frozen=True)
class Preset:
    name: str
    model: Model
    card: GpuModel
    choices: tuple[Choice, ...]
    planned: Planned
    sampling: Sampling
    licence: str
    speed: Speed

    @property
    def argv(self) -> list[str]:
        return [word for c in self.choices for word in (c.flag, c.value) if word is not None]

    @property
    def settings(self) -> dict[str, Setting]:
        """The flags as atoll.toml writes them."""
        return {c.flag.removeprefix("--"): _setting(c.value) for c in self.choices}

    @property
    def command(self) -> str:
        return shlex.join(["atoll", "serve", "MODEL_DIR", *self.argv])

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": self.model.name,
            "gpu": self.card.name,
            "gpu_class": self.card.gpu_class,
            "flags": [
                {"flag": c.flag, "value": c.value, "reason": {"en": c.reason.en, "ko": c.reason.ko},
                 "source": c.reason.source} for c in self.choices
            ],
            "command": self.command,
            "sampling": self.sampling.model_dump(),
            "licence": self.licence,
            "revision": self.model.revision,
            "chat_template_sha256": self.model.template,
            "context": self.planned.context,
            "users": self.planned.users,
            "speed": vars(self.speed),
            "plan": self.planned.numbers,
        }  # fmt: skip


def _setting(word: str | None) -> Setting:
    """A flag's value as TOML writes it. None: the flag is a switch."""
    if word is None:
        return True
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def names() -> list[str]:
    """Every preset: MODEL/WORKLOAD, and the white paper's."""
    data = catalogue()
    of_models = [f"{model}/{workload}" for model in data.models for workload in data.workloads]
    return of_models + [f"{model}/{WHITE_PAPER}" for model in data.white_paper]


def find(name: str, card: GpuModel | None) -> Preset:
    """`card` None: the white paper's own, for its presets. Raises InstallError: not known, or it does not fit."""
    model_name, _, workload_name = name.partition("/")
    model, data = find_model(model_name), catalogue()
    if workload_name == WHITE_PAPER and model_name in data.white_paper:
        return _verbatim(name, model, card)
    if workload_name not in data.workloads:
        known = [each.partition("/")[2] for each in names() if each.startswith(f"{model_name}/")]
        raise usage_error(t("The model '{model}' has no preset '{name}'.", model=model_name, name=workload_name),
                          t("Name one of {names}.", names=joined(known)))  # fmt: skip
    if card is None:
        raise no_gpu()
    return resolve(model, card, data.workloads[workload_name])


def no_gpu() -> InstallError:
    known = joined(list(catalogue().cards))
    return usage_error(t("No GPU is named, and this machine has none."),
                       t("Name one: --gpu h100. The known ones: {names}.", names=known))  # fmt: skip


def resolve(model: Model, card: GpuModel, workload: Workload) -> Preset:
    """The first choice that holds the workload's users; else half of them, and so on. Raises InstallError."""
    if model.needs_several_gpus:
        raise _unfit(
            t("{model} needs several GPUs: not served yet.", model=model.title),
            t("Choose a model that fits one GPU: atoll presets --gpu {gpu}.", gpu=card.name),
        )
    planned = _first_that_fits(model, card, workload)
    if planned is None:
        raise _unfit(
            t("{model} does not fit on {gpu} for '{workload}'.", model=model.title, gpu=card.title,
              workload=workload.name), _nearest(model, card, workload),
        )  # fmt: skip
    name, reasons, knobs = workload.name, catalogue().reasons, planned.knobs
    choices = [Choice("--dtype", "bfloat16", reasons["dtype.bfloat16"])]
    if knobs.quantization:
        choices.append(Choice("--quantization", knobs.quantization, reasons[f"quantization.{knobs.quantization}"]))
    if (kv := knobs.kv_cache_dtype) != "auto":
        choices.append(Choice("--kv-cache-dtype", kv, reasons[f"kv_cache_dtype.{kv}"]))
    choices += [
        Choice(f"--{flag.replace('_', '-')}", str(value), reasons[f"{name}.{flag}"])
        for flag, value in (("max_model_len", planned.context), ("max_num_seqs", knobs.sequences),
                            ("gpu_memory_utilization", knobs.gpu_memory_utilization))
    ]  # fmt: skip
    return _preset(f"{model.name}/{name}", model, card, choices, planned)


def _first_that_fits(model: Model, card: GpuModel, workload: Workload) -> Planned | None:
    limit = native_context(model.directory)
    contexts = [context for context in workload.contexts if context <= limit]
    users = workload.users * 2
    while users := users // 2:
        for context, kv, weights in product(contexts, workload.kv, model.weights):
            knobs = Knobs(
                context=context, quantization=None if weights == "bf16" else weights, kv_cache_dtype=kv,
                gpu_memory_utilization=workload.gpu_memory_utilization, sequences=workload.max_num_seqs,
            )  # fmt: skip
            found = plan(model.directory, card, knobs)
            if found and found.users >= users:
                return found
    return None


def _verbatim(name: str, model: Model, card: GpuModel | None) -> Preset:
    data = catalogue()
    printed = data.white_paper[model.name]
    card = card or find_card(printed.card)
    argv = printed.argv.split()
    given = {flag: value for flag, value in pairwise(argv) if not value.startswith("--")}
    sequences = given.get("--max-num-seqs")
    knobs = Knobs(
        context=int(given["--max-model-len"]), quantization=given.get("--quantization"),
        kv_cache_dtype=given.get("--kv-cache-dtype", "auto"),
        gpu_memory_utilization=float(given["--gpu-memory-utilization"]),
        sequences=int(sequences) if sequences else None,
    )  # fmt: skip
    planned = plan(model.directory, card, knobs)
    if planned is None:
        raise _unfit(
            t("{model} does not fit on {gpu} for '{workload}'.", model=model.title, gpu=card.title,
              workload=WHITE_PAPER), t("It was written for {gpu}.", gpu=data.cards[printed.card].title),
        )  # fmt: skip
    choices: list[Choice] = []
    for word in argv:
        if word.startswith("--"):
            choices.append(Choice(word, None, data.reasons[WHITE_PAPER]))
        else:
            choices[-1] = Choice(choices[-1].flag, word, choices[-1].reason)
    return _preset(name, model, card, choices, planned)


def _preset(name: str, model: Model, card: GpuModel, choices: list[Choice], planned: Planned) -> Preset:
    family = catalogue().families[model.family]
    speed = _speed(model, card, planned)
    return Preset(name, model, card, tuple(choices), planned, family.sampling, family.licence, speed)


def _speed(model: Model, card: GpuModel, planned: Planned) -> Speed:
    """Measured with the same weights, GPU and KV cache; else the bound."""
    weights = planned.knobs.quantization or "bf16"
    found = catalogue().speeds.get(model.name, {}).get(weights, {}).get(card.name)
    if found and planned.knobs.kv_cache_dtype == "auto":
        return Speed(True, found.single, found.many, "docs/performance.md")
    bound = stream_bound(model.directory, card, planned.knobs)
    return Speed(False, round(bound, 1) if bound else None, None, t("memory bandwidth (data sheet) / bytes per token"))


def _nearest(model: Model, card: GpuModel, workload: Workload) -> str:
    """The smallest GPU that this would fit, and the largest model of the family that fits here."""
    data = catalogue()
    larger = sorted((c for c in data.cards.values() if c.memory_gib > card.memory_gib), key=lambda c: c.memory_gib)
    gpu = next((c for c in larger if _first_that_fits(model, c, workload)), None)
    others = [m for m in data.models.values() if m.family == model.family and not m.needs_several_gpus and m != model]
    other = next((m for m in reversed(others) if _first_that_fits(m, card, workload)), None)
    if gpu and other:
        return t("Use {gpu} or larger, or {model}.", gpu=gpu.title, model=other.name)
    if gpu:
        return t("Use {gpu} or larger.", gpu=gpu.title)
    return t("Use {model}.", model=other.name) if other else t("Use a smaller model.")


def _unfit(message: str, hint: str) -> InstallError:
    return InstallError(message, exit_code=ExitCode.PREFLIGHT_FAIL, changed=t("Nothing was changed."), hint=hint)
