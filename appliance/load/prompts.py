"""The requests of a profile: texts with the requested number of tokens, drawn from a seed, without the tokenizer.

The endpoint says how many tokens a word takes: two prompts are sent, and their usage shows the cost of a word and of
the chat template. So lengths are right for any model and any endpoint that counts tokens.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.load.profile import TrafficProfile

# Frequent words, one or two tokens each in common vocabularies. Drawn at random, they share no prefix by accident.
_WORDS = (Path(__file__).parent / "words.txt").read_text("ascii").split()


@dataclass(frozen=True, slots=True)
class Request:
    """What one request asks: `content` is the prompt or the messages."""

    content: dict[str, Any]
    tokens_out: int


@dataclass(frozen=True, slots=True)
class WordCost:
    """Tokens of a prompt of n words: `base + per_word * n`."""

    base: float = 0.0
    per_word: float = 1.3

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.base) / self.per_word))


def measured_cost(short: tuple[int, int], long: tuple[int, int]) -> WordCost:
    """Computed from two prompts, each (words, tokens). Implausible counts, as from an endpoint that counts nothing,
    give the default."""
    per_word = (long[1] - short[1]) / (long[0] - short[0])
    base = short[1] - per_word * short[0]
    return WordCost(max(0.0, base), per_word) if 0.3 <= per_word <= 8 else WordCost()


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def content_of(text: str, endpoint: str) -> dict[str, Any]:
    return {"prompt": text} if endpoint == "completions" else {"messages": [{"role": "user", "content": text}]}


def requests(profile: TrafficProfile, cost: WordCost, run: str, *, warmup: bool = False) -> Iterator[Request]:
    """Requests without end.

    Lengths come from the profile's seed and are the same in every run; words come from `run`, so that the server's
    prefix cache does not know them from an earlier run. A warm-up shares only the prefixes.
    """
    part = "warmup" if warmup else "run"
    lengths = random.Random(f"{profile.seed}-{part}")  # noqa: S311 - no secret
    rng = random.Random(f"{profile.seed}-{part}-{run}")  # noqa: S311
    beginnings = random.Random(f"{profile.seed}-prefix-{run}")  # noqa: S311
    prefix, starts = profile.prefix, []
    if prefix is not None:
        count = max(1, round(prefix.tokens / cost.per_word))
        starts = [words(beginnings, count) for _ in range(prefix.groups)]
    while True:
        tokens_in, tokens_out = profile.input.draw(lengths), profile.output.draw(lengths)
        start = lengths.choice(starts) if prefix is not None and lengths.random() < prefix.share else ""
        count = cost.words(tokens_in)
        if start:
            text = f"{start} {words(rng, max(1, count - start.count(' ') - 1))}"
        else:
            text = words(rng, count)
        yield Request(content_of(text, profile.endpoint), tokens_out)
