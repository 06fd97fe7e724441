"""``profile``: where the time of a decode step goes, by phase of the step and by operator.

Prompts are read first. Then `--steps` decode steps of `--batch` sequences are timed, and as many again are traced:
operator by operator on a CPU, kernel by kernel on a GPU. Tracing slows the host down, so its shares are meaningful but
its times are not (those of GPU kernels are). On a GPU the phases are those of the host, which waits in `collect`.
"""

import argparse
import time
from collections import defaultdict
from typing import Any

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
    events = profiler.key_averages()
    if on_gpu:
        kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        cost = [(e.self_device_time_total, e) for e in kernels]
    else:
        cost = [(e.self_cpu_time_total, e) for e in events]
    total = sum(c for c, _ in cost)
    if on_gpu:
        rows[0]["device_ms"] = round(total / 1e3 / args.steps, 3)  # for the rest of step_ms the GPU waited
    for microseconds, event in sorted(cost, key=lambda pair: -pair[0])[:_TOP]:
        rows.append({"bench": "op", "op": event.key, "share": round(microseconds / max(total, 1e-9), 4),
                     "us_per_step": round(microseconds / args.steps, 1),
                     "calls_per_step": round(event.count / args.steps, 1)})  # fmt: skip
    engine.abort([str(i) for i in range(args.batch)])
    return rows
