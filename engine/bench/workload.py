"""``workload``: one of the standard workloads through the offline API, by default with random weights."""

import argparse
import time

import torch

from engine.bench import floor, report, workloads
from engine.bench.engine_flags import add_engine_flags
from engine.bench.ours import Ours

_TEMPERATURE = 0.6
_KEPT = """do not empty it between workloads. Several begin with the same prompts, which then need not be computed
again: for a comparison with engines that were measured so."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", choices=[n for n in workloads.SHAPES if not n.startswith("cpu-")],
                        metavar="NAME", help="mixed, mixed-small, single, prefill, streams-4, shared-prefix …")
    parser.add_argument("--requests", type=int, help="only the first N requests of each workload")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each workload; the median counts (default 1)")
    add_engine_flags(parser)
    parser.add_argument("--per-layer-embeddings", default="auto")
    parser.add_argument("--max-model-len", type=int, help="default: the longest request of the workloads")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--disable-cascade-attn", action="store_true")
    parser.add_argument("--keep-prefix-cache", action="store_true", help=_KEPT)


def run(args: argparse.Namespace) -> list[report.Row]:
    shapes = [workloads.SHAPES[name] for name in args.names]
    longest = max(s.longest for s in shapes)
    report.say("Loading …")
    begin = time.perf_counter()
    ours = Ours(
        args.model, load_format=args.load_format, skip_tokenizer_init=True, device=args.device, dtype=args.dtype,
        quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype, max_num_seqs=args.max_num_seqs,
        mamba_ssm_cache_dtype=args.mamba_ssm_cache_dtype, per_layer_embeddings=args.per_layer_embeddings,
        max_model_len=args.max_model_len or longest, max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization, enforce_eager=args.enforce_eager,
        batch_invariant=args.batch_invariant, disable_cascade_attn=args.disable_cascade_attn,
    )  # fmt: skip
    ours.run(workloads.Workload("warm-up", [list(range(10, 74))] * 4, [8] * 4), temperature=_TEMPERATURE)
    first_answer = time.perf_counter() - begin
    device = torch.device(ours.llm.engine.info().get("device", "cpu"))
    facts = {
        "engine": "atoll", "model": args.model.name, "dtype": args.dtype, "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype, "mamba_ssm_cache_dtype": args.mamba_ssm_cache_dtype,
        "per_layer_embeddings": args.per_layer_embeddings, "batch_invariant": args.batch_invariant,
        "disable_cascade_attn": args.disable_cascade_attn, "keep_prefix_cache": args.keep_prefix_cache,
        **report.machine(device), "temperature": _TEMPERATURE,
        "start_secs": round(ours.start_secs, 2), "first_answer_secs": round(first_answer, 2),
    }  # fmt: skip
    copy_gb_s = floor.bandwidth(device)["copy"]
    rows = []
    for name in args.names:
        load = workloads.make(name, ours.vocab_size)
        if args.requests:
            load = load.first(args.requests)
        seconds = []
        ours.meter.reset()
        for turn in range(args.repeats):
            report.say(f"{name} {turn + 1}/{args.repeats}")
            seconds.append(ours.run(load, temperature=_TEMPERATURE, bar=True, meter=True,
                                    keep_prefix_cache=args.keep_prefix_cache))  # fmt: skip
        row = {"bench": name, **facts, **report.timing(load, seconds), "kv_waste": round(ours.meter.waste, 4),
               "steps": ours.meter.steps // args.repeats, "mean_batch": round(ours.meter.mean_batch, 1)}  # fmt: skip
        if name == "single" and args.quantization is None:
            limit = copy_gb_s * 1e9 / floor.bytes_per_token(args.model, args.mamba_ssm_cache_dtype, device.type)
            row |= {"copy_gb_s": round(copy_gb_s, 1), "floor_tok_s": round(limit, 1),
                    "share_of_floor": round(row["out_tok_s"] / limit, 3)}  # fmt: skip
        if name == "prefill":
            row["in_tok_s"] = round(load.total_in / row["secs"], 1)
        rows.append(row)
    return rows
