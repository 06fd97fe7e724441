"""``quality``: what a quantisation costs: perplexity, and how often the likeliest token is the 16-bit model's.

Perplexities of different models cannot be compared, nor can those of other texts; of one model in two formats they can.
"""

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.bench import report
from engine.core.params import SamplingParams
from engine.errors import ConfigError
from engine.llm import LLM
from engine.outputs import LogprobsAtPosition
from engine.quality import LANGUAGES, Score, pieces, read_reference, write_reference
from engine.text.tokenizer import TextTokenizer

_AT_ONCE = 8  # pieces, between two lines of progress

Told = Callable[[int, int], None]
"""Pieces that have been read, and of how many."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quantization", help="as of atoll serve")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of atoll serve")
    parser.add_argument("--reference", type=Path, metavar="DIR|FILE",
                        help="the model in 16 bits, if --model is quantised, or what --save wrote of it")  # fmt: skip
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the scores, as a reference for later runs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N",
                        help="of each text, about: its last piece is read to the end (default 4096)")  # fmt: skip
    parser.add_argument("--progress", action="store_true", help="with --json: a line for each few pieces")


def run(args: argparse.Namespace) -> list[report.Row]:
    if args.tokens < 1:
        raise ConfigError("--tokens: at least 1 is needed.", "--tokens")
    told = _print_progress if args.progress and args.json else _quiet
    changed = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    reference = None
    if args.reference is not None and args.reference.is_file():
        reference = read_reference(args.reference)
    elif args.reference is not None or changed != {"quantization": None, "kv_cache_dtype": "auto"}:
        report.say("Reading the texts in 16 bits …")
        reference = scores(args.reference or args.model, args.tokens, told, device=args.device)
    report.say("Reading the texts …")
    found = scores(args.model, args.tokens, told, device=args.device, **changed)
    if args.save is not None:
        write_reference(args.save, args.model.name, found)
    facts = {"model": args.model.name} | {name: value for name, value in changed.items() if value not in (None, "auto")}
    return [_row(language, score, reference, facts) for language, score in found.items()]


def _row(language: str, score: Score, reference: dict[str, Score] | None, facts: report.Row) -> report.Row:
    row = {"bench": f"quality-{language}", **facts, "tokens": len(score.losses),
           "perplexity": round(score.perplexity, 3)}  # fmt: skip
    if reference is not None:
        both = score.alike(reference[language]) if language in reference else None
        if both is None:
            raise ConfigError("--reference: it belongs to another tokenizer, or to other texts.", "--reference")
        mine, before = both
        row |= {"tokens": len(mine.losses), "perplexity": round(mine.perplexity, 3),
                "reference_perplexity": round(before.perplexity, 3),
                "top1_agreement": round(mine.agreement(before), 4)}  # fmt: skip
    return row


def _quiet(done: int, total: int) -> None:
    return


def _print_progress(done: int, total: int) -> None:
    print(json.dumps({"bench": "progress", "done": done, "of": total}), flush=True)


def scores(model: Path, tokens: int, told: Told = _quiet, **options: Any) -> dict[str, Score]:
    """By language. Loads the model, and gives its memory back."""
    tokenizer = TextTokenizer.load(model)
    ids = {language: _first_pieces(tokenizer, language, tokens) for language in LANGUAGES}
    total = sum(map(len, ids.values()))
    longest = max(len(piece) for each in ids.values() for piece in each)
    llm = LLM(model=model, max_model_len=longest + 1, enable_prefix_caching=False, **options)
    try:
        found, done = {language: Score() for language in LANGUAGES}, 0
        for language, score in found.items():
            for at in range(0, len(ids[language]), _AT_ONCE):
                some = ids[language][at : at + _AT_ONCE]
                _read(llm, some, score)
                done += len(some)
                told(done, total)
        return found
    finally:
        del llm
        gc.collect()


def _first_pieces(tokenizer: TextTokenizer, language: str, tokens: int) -> list[list[int]]:
    """The pieces up to the one in which the `tokens`-th token is, as token ids."""
    found: list[list[int]] = []
    for piece in pieces(language):
        if sum(map(len, found)) >= tokens:
            break
        found.append(tokenizer.encode_text(piece))
    return found


def _read(llm: LLM, some: list[list[int]], score: Score) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in some], params, use_tqdm=False)
    for ids, output in zip(some, outputs, strict=True):
        for token, position in zip(ids[1:], (output.prompt_logprobs or [])[1:], strict=True):
            assert position is not None
            score.add(token, position[token].logprob, _first(position))


def _first(position: LogprobsAtPosition) -> int:
    return max(position, key=lambda token: position[token].logprob)
