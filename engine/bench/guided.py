"""``guided``: what grammars cost, in a mixed workload and in one stream.

    mixed     the same requests, unguided and with every fourth one guided, by turns; the median of the turns
    single    one stream, unguided and guided: milliseconds between two tokens

A guided request follows an endless grammar of JSON objects, so both runs have the same number of tokens. The model's
tokenizer is needed; its weights may be random.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from engine import LLM, SamplingParams
from engine.bench import report, workloads
from engine.bench.engine_flags import add_engine_flags
from engine.text.grammar import forms

_TEMPERATURE = 0.6
_SCHEMA = {"type": "array", "minItems": 100_000, "items": {
    "type": "object", "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"}, "mood": {"enum": ["good", "bad", "none"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    }, "required": ["name", "age", "mood", "tags"], "additionalProperties": False,
}}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=64, help="of the mixed workload (default 64)")
    parser.add_argument("--workload", default="mixed", choices=[n for n in workloads.SHAPES if "mixed" in n])
    parser.add_argument("--share", type=float, default=0.25, help="of these, how many are guided (default 0.25)")
    parser.add_argument("--single-tokens", type=int, default=256, help="of the single stream (default 256)")
    parser.add_argument("--repeats", type=int, default=3, help="turns; the median counts (default 3)")
    parser.add_argument("--max-num-seqs", type=int)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> list[report.Row]:
    shape = workloads.SHAPES[args.workload]
    report.say("Loading …")
    llm = LLM(
        args.model, load_format=args.load_format, device=args.device, dtype=args.dtype, quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype, mamba_ssm_cache_dtype=args.mamba_ssm_cache_dtype,
        max_model_len=max(shape.tokens_in[1] + shape.tokens_out[1], args.single_tokens + 64),
        max_num_seqs=args.max_num_seqs,
    )  # fmt: skip
    grammar = forms.whole(forms.json_schema(_SCHEMA, "schema", strict=True))
    load = workloads.make(args.workload, llm.engine.vocab_size).first(args.requests)
    device = torch.device(llm.engine.info().get("device", "cpu"))
    facts = {"engine": "atoll", "model": args.model.name, "dtype": args.dtype, "quantization": args.quantization,
             **report.machine(device)}
    every = max(1, round(1 / args.share)) if args.share > 0 else 0
    single = workloads.Workload("single", [list(range(10, 42))], [args.single_tokens])
    few = load.first(min(args.requests, 8))
    _time(llm, few, grammar, 2)  # warm-up: compiles the grammar and everything else that the first use needs
    rows: list[report.Row] = []
    for name, what, step in (("mixed", load, every), ("single", single, 1)):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        gaps: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(args.repeats):
            report.say(f"{name} {turn + 1}/{args.repeats}")
            for guided in (False, True) if turn % 2 == 0 else (True, False):
                took, between = _time(llm, what, grammar, step if guided else 0)
                seconds[guided].append(took)
                gaps[guided] += between
        free, held = (statistics.median(seconds[guided]) for guided in (False, True))
        row = {"bench": f"guided-{name}", **facts, "requests": len(what.prompts),
               "guided": len(what.prompts[::step]) if step else 0, "tokens": what.total_out,
               "unguided_secs": round(free, 3), "guided_secs": round(held, 3), "cost": round(held / free - 1, 4)}
        if name == "single":
            row |= {f"{kind}_itl_p50_ms": round(float(np.median(gaps[guided])) * 1e3, 3)
                    for kind, guided in (("unguided", False), ("guided", True))}
        rows.append(row)
    return rows


def _time(llm: LLM, load: workloads.Workload, grammar: str, every: int) -> tuple[float, list[float]]:
    """(seconds from the first request to the last token, seconds between a step's tokens and those of the step before).
    Every `every`-th request is guided; 0: none."""
    engine = llm.engine
    engine.reset_prefix_cache()
    params = [
        SamplingParams(temperature=_TEMPERATURE, max_tokens=n, ignore_eos=True, detokenize=False, seed=i,
                       grammar=grammar if every and i % every == 0 else None)
        for i, n in enumerate(load.tokens_out)
    ]  # fmt: skip
    times: list[float] = []
    step = engine.step

    def timed() -> list:
        outputs = step()
        if any(output.new_token_ids for output in outputs):
            times.append(time.perf_counter())
        return outputs

    engine.step = timed  # type: ignore[method-assign]
    begin = time.perf_counter()
    try:
        answers = llm.generate([{"prompt_token_ids": p} for p in load.prompts], params, use_tqdm=False)
    finally:
        engine.step = step  # type: ignore[method-assign]
    seconds = time.perf_counter() - begin
    if [len(a.outputs[0].token_ids) for a in answers] != load.tokens_out:
        raise RuntimeError("a request ended early")
    return seconds, np.diff(times).tolist()
