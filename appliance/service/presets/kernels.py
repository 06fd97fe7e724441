"""Which GPU kernels a medium carries: those of the presets' models with their flags, on the GPUs that presets know."""

from collections.abc import Sequence
from pathlib import Path

from appliance.service.model_config import read_config
from appliance.service.presets.catalogue import GpuModel, Model, catalogue, find_card, find_model
from appliance.service.presets.resolve import Preset, find, names
from engine.plan import shipped_shape
from installer.base.errors import InstallError, usage_error
from installer.base.i18n import t
from offline_bundle.runtime.kernels import Wish

NONE = "none"
_OWN_DEFAULT = 1 << 30  # the engine's own number of sequences, which no preset exceeds


def wishes(gpus: Sequence[str], models: Sequence[str]) -> list[Wish]:
    """For these GPUs and models, by default all of the catalogue. A model may also be a directory with a config.json,
    or a shape that comes with Atoll. "none" among `gpus`: no kernels.

    Raises InstallError for a name that is not known.
    """
    if NONE in gpus:
        if len(gpus) > 1:
            raise usage_error(t("--gpu none excludes other GPUs."), t("Name the GPUs that need kernels, or none."))
        return []
    cards = [find_card(name) for name in gpus] or list(catalogue().cards.values())
    chosen = [_model(name) for name in models] or list(catalogue().models.values())
    found = [wish for card in dict.fromkeys(cards) for model in chosen for wish in _of(model, card)]
    if not found:
        raise usage_error(t("None of these models fits one of these GPUs."),
                          t("atoll presets --gpu NAME shows what fits."))  # fmt: skip
    return found


def _model(name: str) -> Model | Path:
    """Raises InstallError."""
    if name not in catalogue().models:
        directory = shipped_shape(name) or Path(name)
        if (directory / "config.json").is_file():
            return directory
    return find_model(name)


def _of(model: Model | Path, card: GpuModel) -> list[Wish]:
    """One wish for each format that `card` may run the model in."""
    if isinstance(model, Path):
        quantized = "quantization_config" in read_config(model)
        return [Wish(model, card.name, flags) for flags in ((), ("--quantization", "fp8"))[: 1 if quantized else 2]]
    return _of_presets(model, card)


def _of_presets(model: Model, card: GpuModel) -> list[Wish]:
    """One wish for each format of weights and KV cache. Presets of one format differ in how many sequences run at once:
    the one with most sequences needs every kernel of the others."""
    most: dict[tuple[str | None, str], Preset] = {}
    for name in names():
        if name.partition("/")[0] != model.name:
            continue
        try:
            preset = find(name, card)
        except InstallError:
            continue  # it does not fit
        knobs = preset.planned.knobs
        before = most.get(form := (knobs.quantization, knobs.kv_cache_dtype))
        if before is None or _sequences(preset) > _sequences(before):
            most[form] = preset
    return [Wish(preset.model.directory, card.name, tuple(preset.argv)) for preset in most.values()]


def _sequences(preset: Preset) -> int:
    return preset.planned.knobs.sequences or _OWN_DEFAULT
