"""``cpu``: our engine against transformers on the same CPU, the same threads, in the same run.

The two take turns, so that noise on the machine affects both; rows give medians.
"""

import argparse
import statistics

import torch
from tqdm import tqdm

from engine.bench import floor, report, workloads
from engine.bench.author.peer import Transformers
from engine.bench.ours import Ours

_DTYPE = "bfloat16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="turns of each engine (default 3)")
    parser.add_argument("--static-batch", type=int, default=8, help="batch size of transformers (default 8)")
    parser.add_argument("--no-peer", action="store_true", help="measure our engine alone: no transformers needed")


def run(args: argparse.Namespace) -> list[report.Row]:
    device = torch.device("cpu")
    report.say("Loading …")
    ours = Ours(
        args.model, device="cpu", dtype=_DTYPE, skip_tokenizer_init=True, max_model_len=512, load_format="auto"
    )
    peer = None if args.no_peer else Transformers(args.model, torch.bfloat16)
    single = workloads.make("cpu-single", ours.vocab_size)
    batch = workloads.make("cpu-batch", ours.vocab_size)
    seconds: dict[tuple[str, str], list[float]] = {}
    gb_s: dict[str, list[float]] = {}
    total = args.repeats * (2 if peer is None else 3 + len(batch.prompts)) + (1 if peer is None else 2)
    with tqdm(total=total, unit="turn", dynamic_ncols=True, desc="Warming up") as bar:
        ours.run(workloads.Workload("warm-up", batch.prompts[:8], [8] * 8))
        bar.update()
        if peer:
            peer.run(workloads.Workload("warm-up", batch.prompts[:8], [8] * 8), args.static_batch)
            bar.update()
        for turn in range(args.repeats):
            for kind, value in floor.bandwidth(device, repeats=3).items():
                gb_s.setdefault(kind, []).append(value)
            for load, size in ((single, 1), (batch, args.static_batch)):
                bar.set_description(f"{turn + 1}/{args.repeats} {load.name} atoll")
                seconds.setdefault((load.name, "atoll"), []).append(ours.run(load, meter=load is batch))
                bar.update()
                if peer:
                    bar.set_description(f"{turn + 1}/{args.repeats} {load.name} transformers")
                    seconds.setdefault((load.name, "transformers"), []).append(peer.run(load, size, bar.update))
    return _rows(args, ours, peer, (single, batch), seconds, {k: statistics.median(v) for k, v in gb_s.items()})


def _rows(
    args: argparse.Namespace,
    ours: Ours,
    peer: Transformers | None,
    loads: tuple[workloads.Workload, workloads.Workload],
    seconds: dict[tuple[str, str], list[float]],
    gb_s: dict[str, float],
) -> list[report.Row]:
    single, batch = loads
    facts = {"model": args.model.name, "dtype": _DTYPE, **report.machine(torch.device("cpu"))}
    rows = []
    for load in loads:
        mine = seconds[load.name, "atoll"]
        rows.append({"bench": load.name, "engine": "atoll", **facts, **ours.formats, **report.timing(load, mine)})
        if peer:
            theirs = seconds[load.name, "transformers"]
            style = {"static_batch": args.static_batch} if load is batch else {}
            rows.append({"bench": load.name, "engine": "transformers", **facts, **style,
                         **report.timing(load, theirs)})
            rows[-2]["times_transformers"] = round(statistics.median(theirs) / statistics.median(mine), 2)
    tokens_s = single.total_out / statistics.median(seconds[single.name, "atoll"])
    weights = floor.bytes_per_token(args.model)
    limit = {kind: value * 1e9 / weights for kind, value in gb_s.items()}
    rows.append({
        "bench": "floor", "engine": "atoll", **facts, **ours.formats, "weight_mb_per_token": round(weights / 1e6, 1),
        **{f"{kind}_gb_s": round(value, 1) for kind, value in gb_s.items()},
        **{f"{kind}_floor_tok_s": round(value, 1) for kind, value in limit.items()},
        **{f"share_of_{kind}_floor": round(tokens_s / value, 3) for kind, value in limit.items()},
    })  # fmt: skip
    rows.append({"bench": "kv-waste", "engine": "atoll", **facts, "workload": batch.name,
                 "waste": round(ours.meter.waste, 4), "steps": ours.meter.steps,
                 "mean_batch": round(ours.meter.mean_batch, 1)})
    return rows
