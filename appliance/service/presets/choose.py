"""Finds the preset for a model that an operator brings: by the model's shape, this GPU and the named use.

    config.json ──► the catalogue's model ──► MODEL/WORKLOAD ──► flags of `atoll serve`, as settings of the instance

The operator's own settings stay. Settings that an earlier preset wrote are replaced by the new preset's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.service.findings import Finding, made
from appliance.service.model_config import read_config
from appliance.service.presets.answers import PresetAnswers
from appliance.service.presets.catalogue import GpuModel, Model, catalogue
from appliance.service.presets.resolve import Preset, Setting, find
from installer.base.errors import ExitCode, InstallError, usage_error
from installer.base.i18n import joined, t
from installer.preflight.lookup_tables import text_config

_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "num_experts")


@dataclass(frozen=True)
class Chosen:
    """`settings` are what the instance's table gets; `kept` the operator's own values that outrank the preset."""

    finding: Finding
    preset: Preset | None = None
    settings: dict[str, Setting] = field(default_factory=dict)
    kept: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"name": self.preset.name if self.preset else None, "settings": self.settings}


def choose(
    name: str, config: Any, card: GpuModel | None, answers: PresetAnswers, standing: Mapping[str, Any],
    earlier: Mapping[str, Any],
) -> Chosen:  # fmt: skip
    """For the model called `name` with this config.json on `card` (None: no GPU).

    `standing` are the instance's settings now, `earlier` those that the last preset wrote. Raises InstallError (usage)
    for a preset or a use that is not known.
    """
    asked = answers.names.get(name)
    if answers.skip:
        return Chosen(_about(t("left out: {reason}", reason=answers.skip)))
    if card is None:
        return Chosen(_about(t("none: presets are made for GPUs, and {name} computes on the CPU", name=name)))
    model = known_model(config)
    if asked is None and model is None:
        return Chosen(_about(t("none is made for a model of this shape; the engine chooses its own defaults")))
    if asked is None and answers.workload not in catalogue().workloads:
        known = joined(list(catalogue().workloads))
        raise usage_error(t("[preset] workload: '{workload}' is not known.", workload=answers.workload),
                          t("Name one of {names}.", names=known))  # fmt: skip
    try:
        preset = find(asked or f"{model.name}/{answers.workload}", card)  # type: ignore[union-attr]
    except InstallError as error:
        if error.exit_code == ExitCode.USAGE:
            raise
        return Chosen(made("preset", "warn", False, t("Preset"), observed=error.message, fix=error.hint,
                           why=t("The engine fits itself to what is left, with a shorter context or fewer users.")))
    settings = preset.settings
    kept = tuple(sorted(flag for flag, value in standing.items()
                        if flag in settings and value != settings[flag] and earlier.get(flag) != value))
    settings = {flag: value for flag, value in settings.items() if flag not in kept}
    return Chosen(_applied(preset, kept), preset, settings, kept)


def known_model(config: Any) -> Model | None:
    """The catalogue's model of this shape. Fine-tuned weights have their base's shape, and its preset."""
    shape = _shape(config)
    if shape is None:
        return None
    models = catalogue().models.values()
    return next((model for model in models if _shape(read_config(model.directory)) == shape), None)


def _shape(config: Any) -> tuple[Any, ...] | None:
    """The numbers that tell models apart. None if this is no configuration."""
    text = text_config(config)
    found = tuple(text.get(name) for name in _SHAPE)
    return found if all(type(value) is int for value in found[:4]) else None


def _about(observed: str) -> Finding:
    return made("preset", "info", True, t("Preset"), observed=observed)


def _applied(preset: Preset, kept: tuple[str, ...]) -> Finding:
    observed = t("{preset}: {users} users with {context} tokens each", preset=preset.name, users=preset.planned.users,
                 context=preset.planned.context)  # fmt: skip
    if kept:
        observed = t("{found}; your own {names} stay", found=observed, names=joined(kept))
    return made("preset", "info", True, t("Preset"), observed=observed,
                fix=t("Its values and reasons: {command}", command=f"atoll presets show {preset.name}"))  # fmt: skip
