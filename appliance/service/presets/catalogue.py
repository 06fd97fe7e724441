"""The presets' data (TOML beside this file), read and checked once."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from engine.plan import PlannedGpu, shipped_shape
from installer.base.errors import usage_error
from installer.base.i18n import joined, t

_HERE = Path(__file__).parent
Weights = Literal["bf16", "fp8"]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Words(_Data):
    """A sentence in both languages."""

    en: str = Field(min_length=2)
    ko: str = Field(min_length=2, pattern="[가-힣]")

    def in_language(self, language: str) -> str:
        return self.ko if language == "ko" else self.en


class Reason(Words):
    source: str = Field(min_length=2)


class GpuModel(_Data):
    """A GPU by name. `memory_gib` is what PyTorch reports; `tb_per_s` and `sms` are the data sheet's. `source`: what
    they were compared with; `unchecked`: which of them it does not confirm."""

    title: str
    gpu_class: int | None = Field(alias="class", gt=0)
    memory_gib: float = Field(gt=0)
    capability: str = Field(pattern=r"^\d+\.\d+$")
    sms: int | None = Field(gt=0)
    tb_per_s: float | None = Field(gt=0)
    measured: bool
    source: str = ""
    unchecked: tuple[Literal["memory_gib", "sms", "tb_per_s"], ...] = ()
    name: str

    @property
    def planned(self) -> PlannedGpu:
        major, minor = self.capability.split(".")
        return PlannedGpu(self.title, int(self.memory_gib * (1 << 30)), (int(major), int(minor)))


class Sampling(_Data):
    temperature: float
    top_p: float
    top_k: int
    source: str
    why: Words


class Family(_Data):
    licence: str
    sampling: Sampling


class Model(_Data):
    """A model that presets are made for. `template` is the SHA-256 of its chat template, where it is known."""

    name: str
    title: str
    family: str
    shape: str
    weights: tuple[Weights, ...]
    revision: str | None = None
    template: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    needs_several_gpus: bool = False

    @property
    def directory(self) -> Path:
        """With the config.json, without weights."""
        found = shipped_shape(self.shape) or _HERE / "configs" / self.shape
        assert (found / "config.json").is_file(), self.shape
        return found


class Workload(_Data):
    name: str
    title: Words
    contexts: tuple[int, ...]
    kv: tuple[Literal["auto", "fp8"], ...]
    users: int = Field(gt=0)
    max_num_seqs: int = Field(gt=0)
    gpu_memory_utilization: float = Field(gt=0, le=1)


class Speed(_Data):
    """Measured tokens a second: of one stream, of 64 requests together."""

    single: float
    many: float | None = None


class Verbatim(_Data):
    """A command that the white paper prints."""

    card: str
    argv: str


@dataclass(frozen=True)
class Catalogue:
    cards: dict[str, GpuModel]
    models: dict[str, Model]
    families: dict[str, Family]
    workloads: dict[str, Workload]
    reasons: dict[str, Reason]
    speeds: dict[str, dict[str, dict[str, Speed]]]   # model → weights → card
    white_paper: dict[str, Verbatim]


@cache
def catalogue() -> Catalogue:
    """Raises pydantic's ValidationError for data that is wrong: a defect of the release, found by its tests."""
    speeds = TypeAdapter(dict[str, dict[str, dict[str, Speed]]])
    return Catalogue(
        cards={name: GpuModel(name=name, **entry) for name, entry in _read("cards").items()},
        models={name: Model(name=name, **entry) for name, entry in _read("models").items()},
        families={name: Family(**entry) for name, entry in _read("families").items()},
        workloads={name: Workload(name=name, **entry) for name, entry in _read("workloads").items()},
        reasons={name: Reason(**entry) for name, entry in _read("reasons").items()},
        speeds=speeds.validate_python(_read("speeds")),
        white_paper={name: Verbatim(**entry) for name, entry in _read("white_paper").items()},
    )


def find_card(asked: str) -> GpuModel:
    """By name ("h100", "NVIDIA H100 80GB HBM3") or class ("80", "80GB": the first card of it).

    Raises InstallError for what is not known.
    """
    cards = catalogue().cards
    if size := re.fullmatch(r"\s*(\d{1,4})\s*(GB)?\s*", asked, re.IGNORECASE | re.ASCII):
        found = next((card for card in cards.values() if card.gpu_class == int(size[1])), None)
    else:
        found = next((card for card in cards.values() if _is_called(card, asked)), None)
    if found is None:
        classes = sorted({card.gpu_class for card in cards.values() if card.gpu_class})
        raise usage_error(t("No GPU called '{name}' is known.", name=asked),
                          t("Name one of {names}, or a class: {classes} GB.", names=joined(list(cards)),
                            classes=joined([str(size) for size in classes])))  # fmt: skip
    return found


def find_model(name: str) -> Model:
    """Raises InstallError."""
    models = catalogue().models
    if name not in models:
        raise usage_error(t("No model called '{name}' is known.", name=name),
                          t("Name one of {names}, or a directory with a config.json.", names=joined(list(models))))
    return models[name]


def _is_called(card: GpuModel, asked: str) -> bool:
    """Whether neighbouring words of `asked` make up the card's name, and no other size is named beside it."""
    words = re.findall(r"[a-z0-9]+", asked.lower())
    spans = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, min(i + 4, len(words) + 1))}
    size = re.search(r"(?<!\d)(\d{1,4}) ?GB", asked, re.IGNORECASE | re.ASCII)
    return card.name in spans and (size is None or int(size[1]) == card.gpu_class)


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_HERE / f"{name}.toml").read_text("utf-8"))
