"""The model, preset or directory that a command names, and the GPU: this machine's, or one by name."""

from dataclasses import dataclass
from pathlib import Path

from appliance.service.facts import GpuFact
from appliance.service.presets.catalogue import GpuModel, catalogue, find_card, find_model
from installer.base.errors import InstallError
from installer.preflight.machine import Machine


@dataclass(frozen=True)
class Subject:
    """`preset` is its full name, or None for a model alone."""

    title: str
    directory: Path
    preset: str | None = None


def subject(asked: str) -> Subject:
    """Raises InstallError."""
    path = Path(asked).expanduser()
    if asked not in catalogue().models and (path / "config.json").is_file():
        return Subject(path.name, path)
    name, slash, _ = asked.partition("/")
    model = find_model(name if name in catalogue().models else asked)
    return Subject(model.title, model.directory, asked if slash else None)


def card(asked: str | None) -> GpuModel | None:
    """The card by its name; without a name, this machine's first GPU, if it has one. Raises InstallError."""
    if asked is not None:
        return find_card(asked)
    for gpu in Machine().gpus().gpus:
        if gpu.memory_total and gpu.compute_cap and gpu.name:
            return _of_this_machine(gpu.name, gpu.memory_total, gpu.compute_cap)
    return None


def card_of(gpu: GpuFact | None) -> GpuModel | None:
    """The card of this machine's GPU; None without one, or if its driver reports too little."""
    if gpu is None or not (gpu.memory_bytes and gpu.compute_capability and gpu.name):
        return None
    major, _, minor = gpu.compute_capability.partition(".")
    return _of_this_machine(gpu.name, gpu.memory_bytes, (int(major), int(minor or 0)))


def _of_this_machine(name: str, memory: int, capability: tuple[int, int]) -> GpuModel:
    """Memory as the driver reports it; everything else from the catalogue, if it has this GPU."""
    try:
        known = find_card(name)
    except InstallError:
        known = None
    # The driver's figure includes what ECC and firmware keep: PyTorch sees about 1 % less.
    gib = round(memory * 0.99 / (1 << 30), 2)
    return GpuModel.model_validate({
        "name": known.name if known else "this", "title": name, "class": known.gpu_class if known else None,
        "memory_gib": gib, "capability": ".".join(map(str, capability)), "sms": known.sms if known else None,
        "tb_per_s": known.tb_per_s if known else None, "measured": True,
    })  # fmt: skip
