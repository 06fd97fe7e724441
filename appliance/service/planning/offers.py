"""The models that a medium offers: what each is, whether it fits on this machine, under which licence.

A bundle's name is trusted once its signature is valid; an invalid bundle is listed with the reason.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from appliance.service.checklist import options_of
from appliance.service.facts import MachineFacts, machine_facts
from appliance.service.planning.model_and_gpu import card_of
from appliance.service.planning.planner import Knobs, plan
from appliance.service.presets.catalogue import catalogue
from appliance.service.presets.choose import choose
from installer.base.errors import InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.decide.answers import Answers
from installer.decide.frontend import Unattended
from installer.decide.models import signed_manifest
from installer.operate.install import Installer
from installer.preflight.lookup_tables import signed_config, text_config
from installer.preflight.model_needs import bundles_on
from offline_bundle.errors import BundleError
from offline_bundle.model.manifest import BundleManifest

Fit = Literal["fits", "tight", "no", "unknown"]
TIGHT_USERS = 2           # a model that holds fewer full-length users than this is "tight"
_CPU_SHARE = 0.7          # of main memory that weights may take on a CPU


@dataclass(frozen=True)
class Offer:
    """One bundle. `fit_text` says how well it fits, `problem` why it cannot be taken."""

    path: Path
    name: str
    version: str = ""
    bytes: int = 0
    precision: str = ""
    context: int | None = None        # the longest that the model knows, tokens
    spdx: str = ""
    acceptance: str = ""
    digest: str = ""
    fit: Fit = "unknown"
    fit_text: str = ""
    preset: str | None = None
    problem: str = ""


def offers(layout: Layout, answers: Answers) -> list[Offer]:
    """Raises InstallError where the medium or the keys cannot be read at all."""
    context = Installer(options_of(answers, layout), Unattended(), layout=layout).look()
    places = [bundle for medium in answers.medium for bundle in bundles_on(medium)]
    if answers.bundle is not None and answers.bundle not in places:
        places.append(answers.bundle)
    machine, found = machine_facts(layout), []
    for path in places:
        try:
            signed = signed_manifest(context, path)
        except (BundleError, InstallError) as error:
            found.append(Offer(path, path.name, problem=error.message))
            continue
        found.append(_offer(path, signed.manifest, signed.digest, machine, answers))
    return found


def uses() -> dict[str, dict[str, str]]:
    """Use -> its title in both languages, for which presets are made."""
    return {name: {"en": each.title.en, "ko": each.title.ko} for name, each in catalogue().workloads.items()}


def _offer(path: Path, manifest: BundleManifest, digest: str, machine: MachineFacts, answers: Answers) -> Offer:
    config = signed_config(path, manifest)
    weights = sum(file.size for file in manifest.files if file.role == "weights")
    fit, text, preset = _fit(path, config, weights, machine, answers, manifest.name)
    return Offer(
        path, manifest.name, manifest.version, sum(file.size for file in manifest.files), precision_of(config),
        _context_of(config), manifest.license.spdx, manifest.license.acceptance, digest, fit, text, preset,
    )  # fmt: skip


def _fit(
    path: Path, config: Any, weights: int, machine: MachineFacts, answers: Answers, name: str
) -> tuple[Fit, str, str | None]:
    card = None if answers.device == "cpu" else card_of(machine.gpus[0] if machine.gpus else None)
    if card is None:
        if machine.gpus and answers.device != "cpu":
            return "unknown", t("the GPU's driver reports too little"), None
        fits = weights < _CPU_SHARE * machine.memory_bytes
        return ("fits", t("fits in main memory"), None) if fits else ("no", t("larger than main memory"), None)
    chosen = choose(name, config, card, getattr(answers, "preset"), {}, {})  # noqa: B009
    try:
        planned = chosen.preset.planned if chosen.preset else plan(path / "model", card, Knobs())
    except (InstallError, OSError, ValueError) as error:
        return "unknown", getattr(error, "message", str(error)), None
    if planned is None:
        return "no", t("does not fit on {gpu}", gpu=card.title), None
    text = t("{users} users with {context} tokens each", users=f"{planned.users:,}", context=f"{planned.context:,}")
    return "tight" if planned.users < TIGHT_USERS else "fits", text, chosen.preset.name if chosen.preset else None


def precision_of(config: Any) -> str:
    """Precision of the weights on the medium."""
    quantized = config.get("quantization_config") if isinstance(config, dict) else None
    if isinstance(quantized, dict):
        return str(quantized.get("quant_method") or "")
    text = text_config(config)
    return str(text.get("dtype") or text.get("torch_dtype") or "").replace("bfloat16", "bf16").replace("float", "fp")


def _context_of(config: Any) -> int | None:
    value = text_config(config).get("max_position_embeddings")
    return value if type(value) is int else None
