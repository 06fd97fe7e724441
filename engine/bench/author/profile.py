"""``profile``: where the time of a decode step goes, by phase of the step and by operator.

Prompts are read first. Then `--steps` decode steps of `--batch` sequences are timed, and as many again are traced:
operator by operator on a CPU, kernel by kernel on a GPU. Tracing slows the host down, so its shares are meaningful but
its times are not (those of GPU kernels are). On a GPU the phases are those of the host, which waits in `collect`.

GPU kernels overlap: one starts early and waits for the previous one. So the time of a kernel is counted from the end of
the last one before it to its own end, and kernels are listed with the one before.
"""

import argparse
import itertools
import time
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as trace

from engine import LLM, SamplingParams
from engine.bench import report, workloads
from engine.bench.engine_flags import add_engine_flags
from engine.core.request import EngineRequest
from engine.worker import runner as runner_module

_WARM_STEPS = 4
_TOP = 25
_NAME = 60  # characters of a kernel's name: those of libraries fill lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=64, help="sequences (default 64)")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt (default 128)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps to time (default 32)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    add_engine_flags(parser, load_format="auto")
    parser.add_argument("--per-layer-embeddings", default="auto")


class Phases:
    """Wall seconds inside named functions. Nested ones count in both."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Replace `owner.function` by one that is timed as `name`."""
        plain = getattr(owner, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        setattr(owner, function, timed)


def run(args: argparse.Namespace) -> list[report.Row]:
    steps = _WARM_STEPS + 2 * args.steps
    llm = LLM(
        model=args.model, skip_tokenizer_init=True, device=args.device, dtype=args.dtype,
        load_format=args.load_format, max_model_len=args.context + steps + 1, max_num_seqs=args.batch,
        quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype,
        mamba_ssm_cache_dtype=args.mamba_ssm_cache_dtype, per_layer_embeddings=args.per_layer_embeddings,
    )  # fmt: skip
    engine = llm.engine
    runner: Any = engine.runner
    device = torch.device(engine.info()["device"])
    phases = Phases()
    phases.watch(engine.scheduler, "schedule", "schedule")
    if device.type == "cuda":
        phases.watch(runner, "forward", "forward")
        phases.watch(runner, "sample", "sample")
        phases.watch(runner, "collect", "collect")
    else:
        phases.watch(runner_module, "build_inputs", "inputs")
        phases.watch(runner, "forward", "forward")
        phases.watch(runner.model, "logits", "logits")
        phases.watch(runner.sampler, "sample", "sample")
    phases.watch(engine.scheduler, "update", "update")

    shape = workloads.Shape(args.batch, (args.context, args.context), (steps, steps))
    load = workloads.draw("profile", shape, engine.vocab_size)
    for i, prompt in enumerate(load.prompts):
        params = SamplingParams(
            temperature=args.temperature, top_p=args.top_p, max_tokens=steps, ignore_eos=True, seed=i
        )
        engine.add_request(EngineRequest(str(i), prompt, params))
    while any(seq.num_output_tokens == 0 for seq in engine.scheduler.seqs.values()):
        engine.step()
    for _ in range(_WARM_STEPS - 1):
        engine.step()

    phases.seconds.clear()
    start = time.perf_counter()
    for _ in range(args.steps):
        engine.step()
    whole = time.perf_counter() - start
    named = dict(phases.seconds)
    named["rest"] = whole - sum(named.values())
    facts = {"engine": "atoll", "model": args.model.name, "batch": args.batch, "context": args.context,
             "quantization": args.quantization, **report.machine(device)}  # fmt: skip
    per_step = {f"{name}_ms": round(1e3 * s / args.steps, 3) for name, s in named.items()}
    rows = [{"bench": "step", **facts, "step_ms": round(1e3 * whole / args.steps, 3),
             "tok_s": round(args.batch * args.steps / whole, 1), **per_step}]  # fmt: skip

    on_gpu = device.type == "cuda"
    with trace(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        for _ in range(args.steps):
            engine.step()
        if on_gpu:
            torch.cuda.synchronize()
    cost = _kernels(profiler) if on_gpu else _operators(profiler)
    total = sum(microseconds for microseconds, _ in cost.values())
    if on_gpu:
        rows[0]["device_ms"] = round(total / 1e3 / args.steps, 3)
    for operator, (microseconds, count) in sorted(cost.items(), key=lambda pair: -pair[1][0])[:_TOP]:
        rows.append({"bench": "op", **operator._asdict(), "share": round(microseconds / max(total, 1e-9), 4),
                     "us_per_step": round(microseconds / args.steps, 1), "calls_per_step": round(count / args.steps, 1),
                     "us": round(microseconds / count, 2)})  # fmt: skip
    engine.abort([str(i) for i in range(args.batch)])
    return rows


class _Operator(NamedTuple):
    op: str
    after: str  # the kernel before it on a GPU


Costs = dict[_Operator, tuple[float, int]]  # microseconds and calls


def _operators(profiler: trace) -> Costs:
    return {_Operator(event.key, ""): (event.self_cpu_time_total, event.count) for event in profiler.key_averages()}


def _kernels(profiler: trace) -> Costs:
    events = [e for e in profiler.events() or () if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    events.sort(key=lambda event: event.time_range.end)
    found: Costs = {}
    for before, event in itertools.pairwise(events):
        key = _Operator(event.name[:_NAME], before.name[:_NAME])
        microseconds, count = found.get(key, (0.0, 0))
        found[key] = microseconds + event.time_range.end - before.time_range.end, count + 1
    return found
