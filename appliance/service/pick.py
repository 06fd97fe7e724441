"""What the commands are asked about: a model, a preset or a directory, and a GPU, of this machine or by name."""

from dataclasses import dataclass
from pathlib import Path

from appliance.service.facts import GpuFact
from appliance.service.presets.catalogue import Card, catalogue, find_card, find_model
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


def card(asked: str | None) -> Card | None:
    """By name; without one, the first GPU of this machine, if it has any. Raises InstallError."""
    if asked is not None:
        return find_card(asked)
    for gpu in Machine().gpus().gpus:
        if gpu.memory_total and gpu.compute_cap and gpu.name:
            return _of_this_machine(gpu.name, gpu.memory_total, gpu.compute_cap)
    return None


def card_of(gpu: GpuFact | None) -> Card | None:
    """Of a GPU of this machine; None without one, or where its driver does not tell enough."""
    if gpu is None or not (gpu.memory_bytes and gpu.compute_capability and gpu.name):
        return None
    major, _, minor = gpu.compute_capability.partition(".")
    return _of_this_machine(gpu.name, gpu.memory_bytes, (int(major), int(minor or 0)))


def _of_this_machine(name: str, memory: int, capability: tuple[int, int]) -> Card:
    """With the memory that its driver reports; the rest from the card that it is, if it is a known one."""
    try:
        known = find_card(name)
    except InstallError:
        known = None
    # What the driver shows includes what ECC and firmware keep: PyTorch sees about 1 % less.
    gib = round(memory * 0.99 / (1 << 30), 2)
    return Card.model_validate({
        "name": known.name if known else "this", "title": name, "class": known.gpu_class if known else None,
        "memory_gib": gib, "capability": ".".join(map(str, capability)), "sms": known.sms if known else None,
        "tb_per_s": known.tb_per_s if known else None, "measured": True,
    })  # fmt: skip
