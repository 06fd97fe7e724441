"""Workloads: prompts, and the number of tokens to generate for each. Seeded, so that every engine gets the same
ones."""

import random
from dataclasses import dataclass

_LOWEST_ID = 10       # smaller ids are control tokens in most vocabularies
_HIGHEST_ID = 99_999  # so that all vocabularies of at least 100,000 tokens get the same prompts


@dataclass(frozen=True, slots=True)
class Shape:
    """`count` requests with uniformly random numbers of tokens in and out, bounds included. All prompts begin with the
    same `common` tokens, which `tokens_in` does not count."""

    count: int
    tokens_in: tuple[int, int]
    tokens_out: tuple[int, int]
    common: int = 0

    @property
    def longest(self) -> int:
        return self.common + self.tokens_in[1] + self.tokens_out[1]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all sent at once; request i gets exactly `tokens_out[i]` tokens."""

    name: str
    prompts: list[list[int]]
    tokens_out: list[int]

    @property
    def total_in(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def total_out(self) -> int:
        return sum(self.tokens_out)

    def first(self, count: int) -> "Workload":
        return Workload(self.name, self.prompts[:count], self.tokens_out[:count])


SHAPES = {
    "mixed": Shape(256, (100, 1024), (100, 1024)),        # throughput of chat-like lengths
    "mixed-small": Shape(64, (100, 1024), (100, 512)),
    "single": Shape(1, (128, 128), (256, 256)),           # one stream: latency of a token
    "streams-4": Shape(4, (512, 512), (256, 256)),        # a few people at once
    "streams-8": Shape(8, (512, 512), (256, 256)),
    "streams-16": Shape(16, (512, 512), (256, 256)),
    "prefill": Shape(16, (8192, 8192), (1, 1)),           # how fast prompts are read
    "shared-prefix": Shape(256, (64, 128), (64, 64), 2048),  # one long system prompt for all
    "cpu-single": Shape(1, (32, 32), (128, 128)),
    "cpu-batch": Shape(64, (16, 128), (16, 128)),
}


def make(name: str, vocab_size: int, seed: int = 0) -> Workload:
    """The workload `name` of `SHAPES` for a vocabulary."""
    return draw(name, SHAPES[name], vocab_size, seed)


def draw(name: str, shape: Shape, vocab_size: int, seed: int = 0) -> Workload:
    """Random token ids in `shape`, drawn in this order from Python's `Random`."""
    rng = random.Random(seed)  # noqa: S311 - lengths and prompts, no secret
    highest = min(vocab_size - 1, _HIGHEST_ID)
    common = [rng.randint(_LOWEST_ID, highest) for _ in range(shape.common)]
    prompts = []
    for _ in range(shape.count):
        length = rng.randint(*shape.tokens_in)
        prompts.append(common + [rng.randint(_LOWEST_ID, highest) for _ in range(length)])
    return Workload(name, prompts, [rng.randint(*shape.tokens_out) for _ in range(shape.count)])
