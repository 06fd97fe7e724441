"""``clients``: clients in this process that each send their next request when their last answer is complete.

One row for each number of clients and each latency target: tokens per second, milliseconds to the first token (`ttft`)
and between two tokens (`itl`). `atoll bench serve` measures the same on a server, over HTTP.
"""

import argparse
import time
from collections.abc import Iterator

import torch

from engine import LLM
from engine.bench import report, workloads
from engine.bench.engine_flags import add_engine_flags
from engine.bench.latency import Clock, spread
from engine.core.loop import EngineCore
from engine.core.pace import PromptPace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, nargs="+", default=(64, 256), help="(default 64 256)")
    parser.add_argument("--each", type=int, default=4, help="requests of each client (default 4)")
    parser.add_argument("--tokens", type=int, nargs=2, default=(512, 256), metavar=("IN", "OUT"),
                        help="of each request (default 512 256)")  # fmt: skip
    parser.add_argument("--max-itl-ms", type=int, nargs="+", default=(0, 25, 50), metavar="MS",
                        help="latency targets; 0: none (default 0 25 50)")  # fmt: skip
    add_engine_flags(parser)
    parser.add_argument("--max-num-batched-tokens", type=int)


def run(args: argparse.Namespace) -> Iterator[report.Row]:
    report.say("Loading …")
    llm = LLM(
        args.model, load_format=args.load_format, skip_tokenizer_init=True, device=args.device, dtype=args.dtype,
        quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype, max_model_len=sum(args.tokens) + 1,
        mamba_ssm_cache_dtype=args.mamba_ssm_cache_dtype, max_num_batched_tokens=args.max_num_batched_tokens,
    )  # fmt: skip
    engine = llm.engine
    device = torch.device(engine.info().get("device", "cpu"))
    facts = {"engine": "atoll", "model": args.model.name, "dtype": args.dtype, "quantization": args.quantization,
             "tokens": list(args.tokens), **report.machine(device)}
    few = min(args.clients)
    _measure(engine, few, 2 * few, args.tokens)  # warm-up: the first use of every shape is not measured
    for clients in args.clients:
        for target in args.max_itl_ms:
            report.say(f"{clients} clients, target {target} ms")
            engine.reset_prefix_cache()
            engine.scheduler.pace = PromptPace(target / 1e3)
            measured = _measure(engine, clients, clients * args.each, args.tokens)
            yield {"bench": "clients", **facts, "clients": clients, "max_itl_ms": target, **measured}


def _measure(engine: EngineCore, clients: int, requests: int, tokens: tuple[int, int]) -> report.Row:
    shape = workloads.Shape(requests, (tokens[0], tokens[0]), (1, 1))
    prompts = iter(workloads.draw("clients", shape, engine.vocab_size, clients).prompts)
    clock = Clock(engine)
    begin = time.perf_counter()
    active = {name for _ in range(clients) for name in clock.submit([next(prompts)], tokens[1])}
    while active:
        clock.step()
        for name in [name for name in active if len(clock.requests[name].tokens) == tokens[1]]:
            active.remove(name)
            if (prompt := next(prompts, None)) is not None:
                active.update(clock.submit([prompt], tokens[1]))
    seconds = time.perf_counter() - begin
    names = list(clock.requests)
    first = clock.first_tokens(names)
    return {"requests": requests, "secs": round(seconds, 3), "out_tok_s": round(requests * tokens[1] / seconds, 1),
            "ttft_mean_ms": round(float(first.mean()) * 1e3, 1), **spread("ttft", first),
            **spread("itl", clock.waits(names, begin))}
