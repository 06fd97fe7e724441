"""Lengths of prompts and answers: one number, a range, or a weighted mix of these."""

import random
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from installer.base.i18n import t

MOST_TOKENS = 4_000_000  # of one prompt or answer: more is a typing mistake


class Part(BaseModel):
    """Lengths drawn evenly between `least` and `most`, both included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    least: int = Field(ge=1, le=MOST_TOKENS)
    most: int = Field(ge=1, le=MOST_TOKENS)
    weight: float = 1.0


class Lengths:
    """What a profile writes as `128`, `[64, 512]` or `[{ tokens = [64, 512], weight = 3 }, { tokens = 4096 }]`."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts

    @classmethod
    def of(cls, value: Any) -> "Lengths":
        """Raises ValueError with words for the author of the profile."""
        if isinstance(value, Lengths):
            return value
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return cls(*(_weighted(entry) for entry in value))
        return cls(_part(value, 1.0))

    @property
    def longest(self) -> int:
        return max(part.most for part in self.parts)

    @property
    def mean(self) -> float:
        total = sum(part.weight for part in self.parts)
        return sum(part.weight * (part.least + part.most) / 2 for part in self.parts) / total

    def draw(self, rng: random.Random) -> int:
        part = rng.choices(self.parts, [part.weight for part in self.parts])[0]
        return rng.randint(part.least, part.most)

    def scaled(self, factor: float) -> "Lengths":
        """Each length times `factor`, at least 1."""
        return Lengths(*(
            Part(least=max(1, int(part.least * factor)), most=max(1, int(part.most * factor)), weight=part.weight)
            for part in self.parts
        ))  # fmt: skip

    def written(self) -> Any:
        """In the form of a profile."""
        spans = [part.least if part.least == part.most else [part.least, part.most] for part in self.parts]
        if len(spans) == 1:
            return spans[0]
        return [{"tokens": span, "weight": part.weight} for span, part in zip(spans, self.parts, strict=True)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lengths) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return f"Lengths({self.written()})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.of, serialization=core_schema.plain_serializer_function_ser_schema(cls.written)
        )


LengthsField = Annotated[Lengths, Field()]


def _weighted(entry: Any) -> Part:
    if not isinstance(entry, dict) or "tokens" not in entry or entry.keys() - {"tokens", "weight"}:
        raise ValueError(t("each entry of a mix is written {{ tokens = …, weight = … }}"))
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e9:
        raise ValueError(t("a weight is a number above 0"))
    return _part(entry["tokens"], float(weight))


def _part(value: Any, weight: float) -> Part:
    ends = value if isinstance(value, list | tuple) else [value, value]
    if len(ends) != 2 or any(isinstance(end, bool) or not isinstance(end, int) for end in ends):
        raise ValueError(t("a length is written 128 or [64, 512]"))
    least, most = ends
    if not 1 <= least <= most:
        raise ValueError(t("lengths go from the shorter to the longer, and are 1 or more; this is {value}",
                           value=str(value)))
    if most > MOST_TOKENS:
        raise ValueError(t("this is more than {most}", most=MOST_TOKENS))
    return Part(least=least, most=most, weight=weight)
