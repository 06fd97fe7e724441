"""``latency``: how long running streams wait between two tokens while long prompts arrive.

    quiet    the streams alone
    load     once every stream has produced some tokens: long prompts, followed by short ones, all at once

Rows give milliseconds: `itl` between two tokens of a running stream, `ttft` from submission to the first token. With a
small `--kv-cache-memory-bytes` the streams outgrow the cache: `preemptions` counts how often one had to start over.
"""

import argparse
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from engine import LLM, SamplingParams
from engine.bench import report, workloads
from engine.bench.engine_flags import add_engine_flags
from engine.core.loop import EngineCore
from engine.core.request import EngineRequest
from engine.errors import AtollError

_TEMPERATURE = 0.6
_SETTLED = 32  # tokens of every stream before prompts arrive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=32, help="running streams (default 32)")
    parser.add_argument("--stream-tokens", type=int, nargs=2, default=(512, 512), metavar=("IN", "OUT"),
                        help="of each stream (default 512 512)")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=2, help="long prompts (default 2)")
    parser.add_argument("--prompt-tokens", type=int, default=32768, help="of each long prompt (default 32768)")
    parser.add_argument("--short", type=int, default=8, help="short requests behind the long ones (default 8)")
    parser.add_argument("--short-tokens", type=int, nargs=2, default=(100, 64), metavar=("IN", "OUT"),
                        help="of each short request (default 100 64)")  # fmt: skip
    add_engine_flags(parser)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-itl-ms", type=int, default=0, metavar="MS", help="latency target; 0: none (default 0)")


@dataclass(slots=True)
class _Request:
    """When one request was submitted, and when each of its tokens came."""

    submitted: float
    tokens: list[float] = field(default_factory=list)


class Clock:
    """Submits requests, steps the engine, and records the time of every token."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.requests: dict[str, _Request] = {}
        self._count = 0

    def submit(self, prompts: list[list[int]], tokens_out: int) -> list[str]:
        ids = []
        for prompt in prompts:
            self._count += 1
            params = SamplingParams(temperature=_TEMPERATURE, max_tokens=tokens_out, ignore_eos=True,
                                    detokenize=False, seed=self._count)  # fmt: skip
            ids.append(f"latency-{self._count}")
            self.requests[ids[-1]] = _Request(time.perf_counter())
            self.engine.add_request(EngineRequest(ids[-1], prompt, params))
        return ids

    def step(self) -> None:
        outputs = self.engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise AtollError(f"A request failed: {output.error}")
            self.requests[output.request_id].tokens += [now] * len(output.new_token_ids)

    def run_until(self, ids: list[str], tokens: int) -> None:
        """Step until each of these requests has so many tokens."""
        while self.engine.has_work() and any(len(self.requests[i].tokens) < tokens for i in ids):
            self.step()

    def waits(self, ids: list[str], since: float) -> np.ndarray:
        """Seconds between two tokens of these requests, if the second came after `since`."""
        gaps = [np.diff(times)[np.asarray(times[1:]) > since] for times in (self.requests[i].tokens for i in ids)]
        return np.concatenate(gaps)

    def first_tokens(self, ids: list[str]) -> np.ndarray:
        return np.array([self.requests[i].tokens[0] - self.requests[i].submitted for i in ids])


def run(args: argparse.Namespace) -> list[report.Row]:
    longest = max(args.prompt_tokens + 1, sum(args.stream_tokens), sum(args.short_tokens))
    report.say("Loading …")
    llm = LLM(
        args.model, load_format=args.load_format, skip_tokenizer_init=True, device=args.device, dtype=args.dtype,
        quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype, max_model_len=longest,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes, mamba_ssm_cache_dtype=args.mamba_ssm_cache_dtype,
        max_num_batched_tokens=args.max_num_batched_tokens, max_itl_ms=args.max_itl_ms,
    )  # fmt: skip
    engine = llm.engine
    device = torch.device(engine.info().get("device", "cpu"))
    facts = {
        "engine": "atoll", "model": args.model.name, "dtype": args.dtype, "quantization": args.quantization,
        "streams": args.streams, "stream_tokens": list(args.stream_tokens), "max_itl_ms": args.max_itl_ms,
        **report.machine(device),
    }  # fmt: skip
    _measure(engine, args, with_prompts=True)  # warm-up: the first use of every shape is not measured
    rows = []
    for name, with_prompts in (("quiet", False), ("load", True)):
        report.say(f"latency {name}")
        engine.reset_prefix_cache()
        rows.append({"bench": f"latency-{name}", **facts, **_measure(engine, args, with_prompts=with_prompts)})
    return rows


def _measure(engine: EngineCore, args: argparse.Namespace, *, with_prompts: bool) -> report.Row:
    def prompts(name: str, count: int, tokens: int, seed: int) -> list[list[int]]:
        shape = workloads.Shape(count, (tokens, tokens), (1, 1))
        return workloads.draw(name, shape, engine.vocab_size, seed).prompts

    # Drawn before the streams begin: that would hold them up.
    of_long, of_short = (
        prompts("long", args.prompts, args.prompt_tokens, 2), prompts("short", args.short, args.short_tokens[0], 3)
    )  # fmt: skip
    clock = Clock(engine)
    preemptions = engine.stats().num_preemptions
    streams = clock.submit(prompts("streams", args.streams, args.stream_tokens[0], 1), args.stream_tokens[1])
    clock.run_until(streams, min(_SETTLED, args.stream_tokens[1]))
    arrival, long, short = time.perf_counter(), [], []
    if with_prompts:
        long = clock.submit(of_long, 1)
        short = clock.submit(of_short, args.short_tokens[1])
    while engine.has_work():
        clock.step()
    seconds = time.perf_counter() - arrival
    tokens = sum(sum(t > arrival for t in request.tokens) for request in clock.requests.values())
    row = {"secs": round(seconds, 3), "out_tok_s": round(tokens / seconds, 1),
           "preemptions": engine.stats().num_preemptions - preemptions, **spread("itl", clock.waits(streams, arrival))}
    if with_prompts:
        row |= {"prompts": args.prompts, "prompt_tokens": args.prompt_tokens, "short": args.short}
        row |= spread("ttft_long", clock.first_tokens(long)) | spread("ttft_short", clock.first_tokens(short))
        row |= spread("itl_short", clock.waits(short, arrival))
    return row


def spread(name: str, seconds: np.ndarray) -> report.Row:
    if not len(seconds):
        return {}
    p50, p99, worst = (round(float(q) * 1e3, 1) for q in np.quantile(seconds, (0.5, 0.99, 1.0)))
    return {f"{name}_p50_ms": p50, f"{name}_p99_ms": p99, f"{name}_max_ms": worst}
