"""How well a model predicts the texts that come with Atoll: its perplexity, and the token it thinks most likely.

A benchmark computes scores with the engine, a verification by asking a service; both read the same pieces of the same
texts, so the one's scores can be the other's reference. The texts are parts of Atoll's English and Korean manual.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.message import msg

LANGUAGES = ("en", "ko")
REFERENCE_FILE = "quality_reference.json"  # beside the weights, if their publisher measured them in 16 bits
_TEXTS = Path(__file__).parent / "bench" / "texts"
_PIECE_BYTES = 1500   # about 350 tokens: any service has room for one
_SCHEMA = 1


def text(language: str) -> str:
    return (_TEXTS / f"{language}.txt").read_text("utf-8")


def pieces(language: str) -> list[str]:
    """The text in whole paragraphs. A model reads each piece without the ones before it."""
    found: list[str] = []
    for paragraph in text(language).split("\n\n"):
        longer = f"{found[-1]}\n\n{paragraph}" if found else paragraph
        if found and len(longer.encode()) <= _PIECE_BYTES:
            found[-1] = longer
        else:
            found.append(paragraph)
    return found


@dataclass(slots=True)
class Score:
    """Of the tokens of a text, each after those before it in its piece."""

    tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)   # -log p of each, in nats
    likeliest: list[int] = field(default_factory=list)  # the token that the model thinks most likely in its place

    def add(self, token: int, logprob: float, likeliest: int) -> None:
        self.tokens.append(token)
        self.losses.append(-logprob)
        self.likeliest.append(likeliest)

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.losses) / len(self.losses))

    @property
    def frequency_perplexity(self) -> float:
        """Perplexity of someone who knows how often each token occurs in this text, and nothing else. A model that
        reads a text of a thousand tokens or more must do better."""
        total = len(self.tokens)
        return math.exp(-sum(n / total * math.log(n / total) for n in Counter(self.tokens).values()))

    def agreement(self, other: "Score") -> float:
        """The share of positions at which both models think the same token most likely."""
        pairs = list(zip(self.likeliest, other.likeliest, strict=True))
        return sum(mine == theirs for mine, theirs in pairs) / len(pairs)

    def alike(self, other: "Score") -> tuple["Score", "Score"] | None:
        """Both scores up to the end of the shorter one; None if the texts or the tokenizers differ."""
        count = min(len(self.tokens), len(other.tokens))
        if not count or self.tokens[:count] != other.tokens[:count]:
            return None
        return self._first(count), other._first(count)

    def _first(self, count: int) -> "Score":
        return Score(self.tokens[:count], self.losses[:count], self.likeliest[:count])


# -- reference files ---------------------------------------------------------------------------------------------------


def write_reference(path: Path, model: str, scores: dict[str, Score]) -> None:
    """Store the scores of a model in 16 bits, for services that quantise it."""
    texts = {language: {"text_sha256": _digest(language), "tokens": score.tokens, "likeliest": score.likeliest,
                        "losses": [round(loss, 4) for loss in score.losses]}
             for language, score in scores.items()}  # fmt: skip
    path.write_text(json.dumps({"schema_version": _SCHEMA, "model": model, "texts": texts}) + "\n", "utf-8")


def read_reference(path: Path) -> dict[str, Score]:
    """By language. Raises OSError; ConfigError if it is no reference, or one of other texts than this release's."""
    try:
        stored = json.loads(path.read_text("utf-8"))
        if stored["schema_version"] != _SCHEMA:
            raise ValueError(f"schema_version {stored['schema_version']}")
        found = {language: _score_of(values) for language, values in stored["texts"].items() if language in LANGUAGES}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            msg("{path} is no quality reference: {problem}.", path=str(path),
                problem=f"{type(error).__name__}: {error}"),
            "--reference", msg("Write one with atoll bench quality DIR --save FILE."),
        ) from None  # fmt: skip
    for language in found:
        if stored["texts"][language].get("text_sha256") != _digest(language):
            raise ConfigError(
                msg("{path} was measured on other texts than this release's.", path=str(path)), "--reference",
                msg("Write it again with atoll bench quality DIR --save FILE."),
            )  # fmt: skip
    return found


def _score_of(values: dict[str, Any]) -> Score:
    tokens, losses, likeliest = values["tokens"], values["losses"], values["likeliest"]
    whole = all(type(token) is int for token in _chain(tokens, likeliest))
    if not (tokens and len(tokens) == len(losses) == len(likeliest) and whole and all(map(_is_loss, losses))):
        raise ValueError("its lists do not fit together")
    return Score(tokens, [float(loss) for loss in losses], likeliest)


def _chain(*lists: Sequence[Any]) -> Iterator[Any]:
    for each in lists:
        yield from each


def _is_loss(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= -1e-3


def _digest(language: str) -> str:
    return hashlib.sha256(text(language).encode()).hexdigest()
