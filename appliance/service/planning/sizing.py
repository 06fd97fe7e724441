"""The sizing table of the documents: models, formats and GPU classes, computed by the planner."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from appliance.service.planning.planner import Knobs, plan, weights_of
from appliance.service.presets.catalogue import GpuModel, catalogue
from engine.plan import shipped_shape
from installer.base.i18n import t, told

CONTEXTS = (8_192, 32_768)
_CLASSES = (24, 48, 80, 96, 141)
_MEASURED = {"Qwen3-0.6B": "qwen3-0.6b", "Qwen3-8B": "qwen3-8b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}  # without presets


def table(language: str) -> Iterator[str]:
    """Lines of Markdown. A cell: users at each of CONTEXTS (the longest context of one request); a dash: does not
    fit."""
    data, columns = catalogue(), _columns()
    titles = [f"{size} GB: {', '.join(_short(card) for card in cards)}" for size, cards in columns.items()]
    yield f"| {told(t('Model, weights'), language)} | " + " | ".join(titles) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    models = {model.title: model.directory for model in data.models.values() if not model.needs_several_gpus}
    models |= {title: path for title, shape in _MEASURED.items() if (path := shipped_shape(shape))}
    for title, directory in models.items():
        for weights, quantization in (("bf16", None), ("fp8", "fp8")):
            yield f"| {title} {weights}, {_row(directory, quantization)} |"


def _columns() -> dict[int, list[GpuModel]]:
    """GPUs by the size of their memory."""
    cards = catalogue().cards.values()
    return {size: [card for card in cards if card.gpu_class == size] for size in _CLASSES}


@cache
def _row(model: Path, quantization: str | None) -> str:
    """The same in every language."""
    cells = [_cell(model, _smallest(cards), quantization) for cards in _columns().values()]
    return " | ".join([f"{weights_of(model, quantization)[0] / (1 << 30):.1f} GiB", *cells])


def _cell(model: Path, card: GpuModel, quantization: str | None) -> str:
    longest = plan(model, card, Knobs(quantization=quantization))
    if longest is None:
        return "–"
    counts = []
    for context in CONTEXTS:
        found = plan(model, card, Knobs(context=context, quantization=quantization))
        counts.append(f"{found.users:,}" if found else "–")
    return f"{' / '.join(counts)} ({longest.context:,})"


def _smallest(cards: list[GpuModel]) -> GpuModel:
    return min(cards, key=lambda card: card.memory_gib)


def _short(card: GpuModel) -> str:
    return card.title.removeprefix("NVIDIA ").removeprefix("GeForce ").removesuffix(f" {card.gpu_class} GB")
