"""``quality``: what a quantisation costs: perplexity, and how often the likeliest token is the 16-bit model's.

The texts come with Atoll: parts of its English and Korean manual. Perplexities of different models cannot be compared,
nor can those of other texts; of one model in two formats they can.
"""

import argparse
import gc
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.bench import report
from engine.core.params import SamplingParams
from engine.errors import ConfigError
from engine.llm import LLM
from engine.outputs import LogprobsAtPosition

LANGUAGES = ("en", "ko")
_TEXTS = Path(__file__).parent / "texts"
_WINDOW = 512  # tokens that are read at once; each window begins without the ones before it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quantization", help="as of atoll serve")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of atoll serve")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="the model in 16 bits, if --model is quantised")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="of each text, at most (default 4096)")


def run(args: argparse.Namespace) -> list[report.Row]:
    changed = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    reference = None
    if args.reference is not None or changed != {"quantization": None, "kv_cache_dtype": "auto"}:
        report.say("Reading the texts in 16 bits …")
        reference = scores(args.reference or args.model, args.tokens, device=args.device)
    report.say("Reading the texts …")
    found = scores(args.model, args.tokens, device=args.device, **changed)
    facts = {"model": args.model.name} | {name: value for name, value in changed.items() if value not in (None, "auto")}
    rows: list[report.Row] = []
    for language, score in found.items():
        row = {"bench": f"quality-{language}", **facts, "tokens": len(score.losses),
               "perplexity": round(score.perplexity, 3)}  # fmt: skip
        if reference is not None:
            before = reference[language]
            row["reference_perplexity"] = round(before.perplexity, 3)
            row["top1_agreement"] = round(score.agreement(before), 4)
        rows.append(row)
    return rows


@dataclass(slots=True)
class Score:
    """Of the tokens of a text, each after those before it in its window."""

    losses: list[float]    # -log p, in nats
    likeliest: list[int]   # the token that the model thinks most likely

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.losses) / len(self.losses))

    def agreement(self, other: "Score") -> float:
        """The share of positions at which both models think the same token most likely."""
        pairs = list(zip(self.likeliest, other.likeliest, strict=True))
        return sum(mine == theirs for mine, theirs in pairs) / len(pairs)


def scores(model: Path, tokens: int, **options: Any) -> dict[str, Score]:
    """By language. Loads the model, and gives its memory back."""
    llm = LLM(model=model, max_model_len=_WINDOW + 1, enable_prefix_caching=False, **options)
    try:
        return {language: _score(llm, text(language), tokens) for language in LANGUAGES}
    finally:
        del llm
        gc.collect()


def text(language: str) -> str:
    return (_TEXTS / f"{language}.txt").read_text("utf-8")


def _score(llm: LLM, content: str, tokens: int) -> Score:
    ids = llm.get_tokenizer().encode_text(content)[:tokens]
    windows = [ids[at : at + _WINDOW] for at in range(0, len(ids), _WINDOW)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ConfigError("--tokens: at least 2 are needed.", "--tokens")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": window} for window in windows], params, use_tqdm=False)
    score = Score([], [])
    for window, output in zip(windows, outputs, strict=True):
        for token, position in zip(window[1:], (output.prompt_logprobs or [])[1:], strict=True):
            assert position is not None
            score.losses.append(-position[token].logprob)
            score.likeliest.append(_first(position))
    return score


def _first(position: LogprobsAtPosition) -> int:
    return max(position, key=lambda token: position[token].logprob)
